// Tests of the kernels without torch. `make sanitize` runs them under the sanitizers, tests/model/test_csrc.py on an
// emulated arm64.
//
// Every buffer is a heap block of its exact size, so that the sanitizers find a read or write beyond it.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

#include "decode.h"
#include "philox.h"
#include "team.h"
#include "functions.h"
#include "product.h"

namespace linpix {
namespace {

std::atomic<int> failures = 0;

void expect(bool true_, const char* what) {
  if (!true_) std::printf("FAILED: %s\n", what);
  failures += !true_;
}

// --- philox: the published vectors (Random123, kat_vectors) -------------------------------------------------------

void philox_gives_its_published_vectors() {
  struct {
    Words counter;
    uint32_t key0, key1;
    Words result;
  } const known[] = {
      {{{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0,
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const auto& k : known) {
    const Words found = philox4x32(k.counter, k.key0, k.key1);
    for (int i = 0; i < 4; ++i) expect(found.word[i] == k.result.word[i], "philox");
  }
  expect(uniform(0) > 0 && uniform(~0u) < 1 && 1 - uniform(~0u) > 0, "uniforms are inside (0, 1)");
}

// --- functions -----------------------------------------------------------------------------------------------------

using portable::Floats;

float lane(Floats x) {
  float lanes[portable::LANES];
  portable::store(lanes, x);
  return lanes[portable::LANES - 1];
}

void functions_are_those_of_the_library() {
  double worst_exp = 0, worst_log = 0, worst_log1p = 0, worst_one_minus = 0, worst_gelu = 0, worst_tanh = 0;
  for (int i = -8000; i <= 8000; ++i) {
    const float x = i / 100.0f;
    worst_exp = std::max(worst_exp, std::abs(lane(portable::exp(x)) / std::exp((double)x) - 1));
    worst_gelu = std::max(worst_gelu, std::abs(lane(portable::gelu(x)) - x * 0.5 * std::erfc(-x / std::sqrt(2.0))));
    const float positive = std::exp(x);
    for (const float of : {x, positive, -positive})  // small numbers too
      if (of) worst_tanh = std::max(worst_tanh, std::abs(lane(portable::tanh(of)) / std::tanh((double)of) - 1));
    worst_log = std::max(worst_log, std::abs(lane(portable::log(positive)) - std::log((double)positive)) /
                                        std::max(1.0, std::abs(std::log((double)positive))));
    if (positive <= 1)
      worst_log1p = std::max(worst_log1p, std::abs(lane(portable::log1p(positive)) / std::log1p((double)positive) - 1));
    worst_one_minus = std::max(worst_one_minus,
                               std::abs(lane(portable::one_minus_exp(positive)) / -std::expm1(-(double)positive) - 1));
  }
  expect(worst_exp < 3e-7, "exp");
  expect(worst_log < 3e-7, "log");
  expect(worst_log1p < 3e-7, "log1p");
  expect(worst_one_minus < 3e-7, "1 - exp(-x)");
  expect(worst_gelu < 1e-6, "gelu");
  expect(worst_tanh < 3e-7, "tanh");
  expect(lane(portable::tanh(0.0f)) == 0 && lane(portable::tanh(INFINITY)) == 1 && lane(portable::tanh(-INFINITY)) == -1,
         "tanh at its ends");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  expect(std::isnan(lane(portable::exp(nan))) && std::isnan(lane(portable::phi(nan))) &&
             std::isnan(lane(portable::gelu(nan))) && std::isnan(lane(portable::tanh(nan))), "a NaN stays one");
}

std::mt19937 generator(0);

std::vector<float> numbers(size_t n, float scale = 1) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> x(n);
  for (float& one : x) one = normal(generator);
  x.shrink_to_fit();
  return x;
}

// --- products of bytes ---------------------------------------------------------------------------------------------

// Sums are exact as integers. largest: all numbers are as large as possible, so sums of two products exceed 16 bits.
void products_of_bytes_are_exact(int rows, int columns, int depth, bool largest) {
  std::vector<uint8_t> a((size_t)rows * depth);
  std::vector<int8_t> w((size_t)columns * depth);
  for (uint8_t& one : a) one = (uint8_t)(largest ? 255 : generator() % 256);
  for (int8_t& one : w) one = (int8_t)(largest ? -127 : (int)(generator() % 255) - 127);
  std::vector<float> bias(3 * columns, 0.0f);  // and scales of 1
  for (int c = 0; c < columns; ++c) bias[columns + c] = 1;
  const std::vector<portable::Affine> as_they_are(rows, {0, 1});
  std::vector<float> found((size_t)rows * columns);
  const Matrix matrix{w.data(), bias.data(), 1, columns, depth, true};
  portable::product(a.data(), depth, rows, matrix, 0, portable::panels_of(columns),
                    [&](int r, int c, Floats s) { portable::store(&found[(size_t)r * columns + c], s); },
                    as_they_are.data());
  const int blocks = columns / TILE;  // of one panel
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) {
      int exact = 0;
      for (int k = 0; k < depth; ++k)
        exact += a[r * depth + k] * w[((k / 4 * blocks + c / TILE) * TILE + c % TILE) * 4 + k % 4];
      expect(found[(size_t)r * columns + c] == (float)exact, "products of bytes");
    }
}

// --- products of bfloat16 weights ----------------------------------------------------------------------------------

// As those of the same weights in float, bit for bit.
void products_of_narrow_weights_are_exact(int rows, int columns, int depth) {
  const std::vector<float> a = numbers((size_t)rows * depth), bias = numbers(columns);
  std::vector<float> wide((size_t)columns * depth), found[2];
  std::vector<portable::bfloat16> narrow(wide.size());
  for (int c = 0; c < columns; ++c)  // of one panel
    for (int k = 0; k < depth; ++k) {
      const uint32_t bits = (uint32_t)(generator() % 2 ? 0x3f00 : 0xbf00) + generator() % 256;  // +-0.5 to +-2
      narrow[(size_t)(k / 2 * columns + c) * 2 + k % 2].bits = (uint16_t)bits;
      const uint32_t widened = bits << 16;
      std::memcpy(&wide[(size_t)k * columns + c], &widened, sizeof widened);
    }
  for (bool is_narrow : {false, true}) {
    std::vector<float>& sums = found[is_narrow];
    sums.resize((size_t)rows * columns);
    const auto keep = [&](int r, int c, portable::Floats s) { portable::store(&sums[(size_t)r * columns + c], s); };
    const void* weights = is_narrow ? (const void*)narrow.data() : wide.data();
    const Matrix matrix{weights, bias.data(), 1, columns, depth, false, is_narrow};
    if (is_narrow)
      portable::product<float, portable::bfloat16>(a.data(), depth, rows, matrix, 0, 1, keep);
    else
      portable::product(a.data(), depth, rows, matrix, 0, 1, keep);
  }
  expect(found[0] == found[1], "products of narrow weights");
}

void a_row_of_bytes_is_near_the_row() {
  for (float scale : {1e-30f, 1.0f, 1e30f}) {
    std::vector<float> x = numbers(48, scale);
    x[5] += 3 * scale;
    std::vector<uint8_t> bytes(48);
    const portable::Affine row = portable::quantise(x.data(), 48, bytes.data());
    for (int i = 0; i < 48; ++i)
      expect(std::abs(row.low + row.step * bytes[i] - x[i]) <= 0.501f * row.step, "bytes are the nearest");
    x.assign(48, scale);
    const portable::Affine flat = portable::quantise(x.data(), 48, bytes.data());
    for (int i = 0; i < 48; ++i) expect(flat.low + flat.step * bytes[i] == scale, "all alike");
    for (float bad : {NAN, INFINITY, -INFINITY})
      for (int at : {0, 17, 47}) {
        x = numbers(48, scale), x[at] = bad;
        expect(std::isnan(portable::quantise(x.data(), 48, bytes.data()).low), "a value that is not finite gives NaN");
      }
  }
}

// --- attention -----------------------------------------------------------------------------------------------------

void attention_is_equations_18_to_20(int D, int M) {
  std::vector<float> S(D * M), z(D), y(M);
  std::vector<double> S_exact(D * M), z_exact(D);
  for (int t = 0; t < 50; ++t) {
    std::vector<float> q = numbers(D), k = numbers(D), v = numbers(M);
    const auto phi = [](double x) { return x > 0 ? x + 1 : std::exp(x); };
    double normaliser = 1e-6;
    std::vector<double> numerator(M);
    for (int d = 0; d < D; ++d) {
      z_exact[d] += phi(k[d]);
      normaliser += phi(q[d]) * z_exact[d];
      for (int m = 0; m < M; ++m) {
        S_exact[d * M + m] += phi(k[d]) * v[m];
        numerator[m] += phi(q[d]) * S_exact[d * M + m];
      }
    }
    kernels_portable.attend(q.data(), k.data(), v.data(), S.data(), z.data(), D, M, 1e-6f, y.data());
    for (int m = 0; m < M; ++m) expect(std::abs(y[m] - numerator[m] / normaliser) < 1e-5, "attention");
  }
  for (int i = 0; i < D * M; ++i) expect(std::abs(S[i] - S_exact[i]) < 1e-4, "the state");
}

// --- attention over whole sequences ------------------------------------------------------------------------------

// q, k, v, y, normaliser, g, dq, dk and dv of three sequences, one of them empty, in blocks of their exact sizes.
template <class E>
struct Whole {
  static constexpr int HEADS = 3;
  using R = std::conditional_t<std::is_same_v<E, double>, double, float>;

  Whole(Element element, int tokens, int D, int M)
      : element(element), D(D), M(M), offsets{0, tokens, tokens, 2 * tokens + 1},
        normaliser(offsets.back() * HEADS) {
    for (int i = 0; i < 8; ++i) x[i].resize(offsets.back() * HEADS * (i == 2 || i == 3 || i == 4 || i == 7 ? M : D));
  }
  Heads at(int i, int width) { return {x[i].data(), HEADS * width, width}; }
  // Every head of every sequence, with scratch of the exact size.
  void run(const SequenceKernel& kernel) {
    const Sequences s = {(int64_t)offsets.size() - 1, offsets.data(), HEADS, D, M, element, 1e-6, at(0, D), at(1, D),
                         at(2, M), at(3, M), {normaliser.data(), HEADS, 1}, at(4, M), at(5, D), at(6, D), at(7, M)};
    for (int64_t i = 0; i < s.count * s.heads; ++i) {
      const size_t bytes = (kernel.scratch_bytes(s) + 63) / 64 * 64;
      void* scratch = std::aligned_alloc(64, bytes);
      std::memset(scratch, 0, bytes);
      kernel.run(s, i / s.heads, i % s.heads, scratch);
      std::free(scratch);
    }
  }
  void run() {
    run(kernels_portable.causal);
    run(kernels_portable.causal_backward);
  }

  Element element;
  int D, M;
  std::vector<int64_t> offsets;
  std::vector<E> x[8];  // q, k, v, y, g, dq, dk, dv
  std::vector<R> normaliser;
};

void the_gradient_of_whole_sequences_is_that_of_finite_differences(int tokens, int D, int M) {
  Whole<double> whole(Element::float64, tokens, D, M);
  for (int i : {0, 1, 2, 4})
    for (double& one : whole.x[i]) one = numbers(1)[0];
  whole.run();
  for (int i = 0; i < 3; ++i) {  // along a random direction in q, k and v
    double along = 0, values[2];
    const std::vector<float> direction = numbers(whole.x[i].size());
    for (size_t j = 0; j < direction.size(); ++j) along += whole.x[5 + i][j] * direction[j];
    for (int side = 0; side < 2; ++side) {
      Whole<double> moved = whole;
      for (size_t j = 0; j < direction.size(); ++j) moved.x[i][j] += (side ? 1e-6 : -1e-6) * direction[j];
      moved.run(kernels_portable.causal);
      values[side] = 0;
      for (size_t j = 0; j < moved.x[3].size(); ++j) values[side] += moved.x[3][j] * whole.x[4][j];
    }
    expect(std::abs((values[1] - values[0]) / 2e-6 - along) < 1e-5 * (1 + std::abs(along)), "gradient");
  }
}

void whole_sequences_are_steps(int tokens, int D, int M) {
  Whole<float> whole(Element::float32, tokens, D, M);
  Whole<uint16_t> rounded(Element::bfloat16, tokens, D, M);
  for (int i : {0, 1, 2, 4}) {
    whole.x[i] = numbers(whole.x[i].size());
    for (size_t j = 0; j < whole.x[i].size(); ++j) {
      uint32_t bits;
      std::memcpy(&bits, &whole.x[i][j], sizeof bits);
      rounded.x[i][j] = (uint16_t)(bits >> 16);
      bits &= 0xffff0000;
      std::memcpy(&whole.x[i][j], &bits, sizeof bits);
    }
  }
  whole.run();
  rounded.run();
  std::vector<float> S(D * M), z(D), y(M);  // of the last head of the last sequence
  for (int64_t t = whole.offsets[2]; t < whole.offsets[3]; ++t) {
    const size_t token = t * whole.HEADS + whole.HEADS - 1;
    std::vector<float> q(&whole.x[0][token * D], &whole.x[0][token * D] + D);
    std::vector<float> k(&whole.x[1][token * D], &whole.x[1][token * D] + D);
    kernels_portable.attend(q.data(), k.data(), &whole.x[2][token * M], S.data(), z.data(), D, M, 1e-6f, y.data());
    for (int m = 0; m < M; ++m) expect(std::abs(whole.x[3][token * M + m] - y[m]) < 1e-5, "whole sequences");
  }
  for (int i : {3, 5, 6, 7}) {
    double difference = 0, size = 0;
    for (size_t j = 0; j < whole.x[i].size(); ++j) {
      const uint32_t bits = (uint32_t)rounded.x[i][j] << 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      difference += std::pow(value - whole.x[i][j], 2), size += std::pow(whole.x[i][j], 2);
    }
    // Gradients of q and k come from differences to y, which was rounded; with one feature only rounding errors remain.
    const bool direct = i == 3 || i == 7;
    expect((D == 1 && !direct) || std::sqrt(difference) <= (direct ? 0.005 : 0.05) * std::sqrt(size) + 1e-6,
           "bfloat16 is float32 rounded");
  }
}

// --- a whole model ---------------------------------------------------------------------------------------------------

struct Shape {
  int layers, heads, key_dim, value_dim, d_model, d_ff, mixtures;
  bool pre_norm, gelu, bf16, background = false;  // background: skips layers, and looks up a following neighbour
  int token_size = 1;                             // sub-pixels
  bool int8 = false;                              // all products but the first and last layer's feed-forwards
  bool categorical = false;                       // with 256 logits for mixtures
};

constexpr int HEIGHT = 6, WIDTH = 6, PIXELS = HEIGHT * WIDTH, CLASSES = 3;

// Random weights in blocks of their exact sizes.
class Net {
 public:
  explicit Net(Shape s) {
    m.layers = s.layers, m.heads = s.heads, m.key_dim = s.key_dim, m.value_dim = s.value_dim, m.d_model = s.d_model;
    m.d_ff = s.d_ff, m.mixtures = s.mixtures, m.subpixels = PIXELS;
    m.token_size = s.token_size, m.tokens = PIXELS / s.token_size;
    m.pre_norm = s.pre_norm, m.gelu = s.gelu, m.bf16 = s.bf16, m.eps = 1e-6f;
    for (int l = 0; l < s.layers; ++l) {
      const bool inner = s.int8 && 0 < l && l < s.layers - 1;
      layers_.push_back({matrix(s.heads, 2 * s.key_dim + s.value_dim, s.d_model, s.bf16, s.int8),
                         matrix(1, s.d_model, s.heads * s.value_dim, s.bf16, s.int8),
                         matrix(1, s.d_ff, s.d_model, s.bf16, inner), matrix(1, s.d_model, s.d_ff, s.bf16, inner),
                         norm(), norm()});
    }
    m.layer = layers_.data();
    m.norm = norm();
    m.categorical = s.categorical;
    const int groups = s.categorical ? 1 : s.token_size == 3 ? 10 : 3;
    m.head = matrix(groups, s.mixtures, s.d_model, false);
    m.values = 2 + s.background, m.following = s.background, m.places = 1, m.classes = CLASSES;
    const int rows = 3 * 258 + CLASSES + PIXELS;
    m.table = keep(numbers((size_t)rows * s.d_model, 0.5f));
    for (int t = 0; t < m.tokens; ++t) {
      const int first = t * s.token_size;
      source_.push_back(first - 1);
      source_.push_back(first >= WIDTH ? first - WIDTH : -1);
      if (s.background) source_.push_back(t + 1 < PIXELS ? t + 1 : -1);
      place_.push_back(2 * 257 + CLASSES + 258 + t);
    }
    m.source = source_.data(), m.place = place_.data(), m.base = base_;
    if (!s.background) return;
    constexpr int DIM = 2 * TILE;
    m.background = 0;
    m.project = matrix(1, DIM, s.d_model, false), m.skipped_head = matrix(groups, s.mixtures, DIM, false);
    m.skipped_table = keep(numbers((size_t)(PIXELS + CLASSES + 1 + m.following + 1) * DIM));
  }
  Model m{};

 private:
  const float* keep(std::vector<float> x) { return floats_.emplace_back(std::move(x)).data(); }
  Norm norm() { return {keep(numbers(m.d_model)), keep(numbers(m.d_model))}; }
  Matrix matrix(int groups, int columns, int depth, bool bf16, bool int8 = false) {
    const int wide = round_up(columns, TILE), deep = round_up(depth, TILE);
    if (int8) {
      std::vector<int8_t> bytes((size_t)groups * wide * deep);
      for (int8_t& one : bytes) one = (int8_t)((int)(generator() % 255) - 127);
      const void* weights = bytes_.emplace_back(std::move(bytes)).data();
      return {weights, keep(numbers((size_t)3 * groups * wide, 0.01f)), groups, wide, deep, true};
    }
    const std::vector<float> w = numbers((size_t)groups * wide * deep, 1 / std::sqrt((float)deep));
    const void* weights;
    if (bf16) {
      std::vector<uint16_t> halves;
      for (float x : w) {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        halves.push_back((uint16_t)(bits >> 16));
      }
      weights = halves_.emplace_back(std::move(halves)).data();
    } else {
      weights = keep(w);
    }
    return {weights, keep(numbers((size_t)groups * wide)), groups, wide, deep};
  }

  std::vector<Layer> layers_;
  std::vector<std::vector<float>> floats_;
  std::vector<std::vector<uint16_t>> halves_;
  std::vector<std::vector<int8_t>> bytes_;
  std::vector<int32_t> source_, place_;
  const int32_t base_[3] = {0, 257 + CLASSES, 2 * 257 + CLASSES};
};

// Slots, images and rows of one call.
struct Batch {
  Batch(const Model& m, int slots)
      : m(m), canvas((slots + 1) * PIXELS), known((slots + 1) * PIXELS), S((size_t)(slots + 1) * m.layers * m.heads *
        m.key_dim * m.value_dim), z((size_t)(slots + 1) * m.layers * m.heads * m.key_dim),
        last((size_t)(slots + 1) * m.project.columns) {}

  std::vector<float> decode(std::vector<int64_t> at, std::vector<int64_t> positions, std::vector<int64_t> steps,
                            std::vector<int64_t> seeds, int threads) {
    return decode(at, positions, steps, seeds,
                  [&](const Rows& rows) { linpix::decode(kernels_portable, m, rows, threads, INFINITY); });
  }
  std::vector<float> decode(std::vector<int64_t> at, std::vector<int64_t> positions, std::vector<int64_t> steps,
                            std::vector<int64_t> seeds, const std::function<void(const Rows&)>& run) {
    int64_t most = 0;
    for (int64_t n : steps) most = std::max(most, n);
    std::vector<int64_t> start(at.size(), 256);
    std::vector<float> heat(at.size(), 1), log_probs(at.size() * most * m.token_size);
    std::vector<char> finite(at.size(), 1);
    passes.assign(at.size(), 0), taken.assign(at.size(), 0);
    Rows rows = pools(at, start, steps);
    rows.most_steps = rows.most_passes = most, rows.positions = positions.data(), rows.seeds = seeds.data();
    rows.temperatures = heat.data(), rows.log_probs = log_probs.data(), rows.finite = (bool*)finite.data();
    rows.passes = passes.data(), rows.taken = taken.data();
    run(rows);
    for (char fine : finite) expect(fine, "parameters are finite");
    return log_probs;
  }
  void prefill(std::vector<int64_t> at, std::vector<int64_t> positions, std::vector<int64_t> steps, int threads) {
    std::vector<int64_t> start(at.size(), 256);
    Rows rows = pools(at, start, steps);
    rows.positions = positions.data();
    linpix::prefill(kernels_portable, m, rows, threads);
  }
  Rows pools(std::vector<int64_t>& at, std::vector<int64_t>& start, std::vector<int64_t>& steps) {
    Rows rows{};
    rows.count = (int)at.size(), rows.canvas = canvas.data(), rows.known = (const bool*)known.data();
    rows.S = S.data(), rows.z = z.data(), rows.last = last.data(), rows.slots = at.data(), rows.start = start.data(), rows.steps = steps.data();
    return rows;
  }

  const Model& m;
  std::vector<uint8_t> canvas;
  std::vector<char> known;
  std::vector<float> S, z, last;
  std::vector<int64_t> passes, taken;  // of the rows of the last call
};

std::vector<int64_t> counting(int n, int64_t from) {
  std::vector<int64_t> x(n);
  for (int i = 0; i < n; ++i) x[i] = from + i;
  return x;
}

void an_image_is_the_same_alone_and_in_a_batch(Shape shape, bool few) {
  const Net net(shape);
  const int tokens = net.m.tokens, size = net.m.token_size;
  Batch alone(net.m, 1);
  const std::vector<float> expected = alone.decode({1}, {0}, {tokens}, {5}, 1);
  for (int threads : {1, 2, 3})
    for (int rows : {1, 2, 9, 41}) {
      if (few && threads > 1 && rows != (threads == 2 ? 41 : 9)) continue;  // all numbers of rows on one thread
      Batch batch(net.m, rows);
      for (int t = 0; t < tokens; t += 10) {
        std::vector<int64_t> steps(rows, std::min(10, tokens - t));
        const std::vector<float> found =
            batch.decode(counting(rows, 1), std::vector<int64_t>(rows, t), steps, counting(rows, 5), threads);
        for (int64_t i = 0; i < steps[0] * size; ++i) expect(found[i] == expected[t * size + i], "log-probabilities, bit for bit");
      }
      for (int t = 0; t < PIXELS; ++t) expect(batch.canvas[PIXELS + t] == alone.canvas[PIXELS + t], "sub-pixels");
      Batch filled(net.m, rows);
      filled.canvas = batch.canvas;
      const std::vector<int64_t> from(rows, 0), middle(rows, tokens / 3), rest(rows, tokens - tokens / 3);
      filled.prefill(counting(rows, 1), from, middle, threads);
      filled.prefill(counting(rows, 1), middle, rest, threads);
      expect(filled.S == batch.S && filled.z == batch.z, "prefill leaves what decoding leaves, bit for bit");
    }
}

// A second call goes on with the remaining steps; the result is the same bit for bit.
void threads_that_keep_each_other_waiting_stop_at_the_same_step() {
  const Net net({2, 2, 8, 8, 16, 128, 3, true, true, false});
  Batch expected(net.m, 3), batch(net.m, 3);
  expected.decode(counting(3, 1), {0, 0, 0}, {10, 10, 10}, counting(3, 0), 1);
  batch.decode(counting(3, 1), {0, 0, 0}, {10, 10, 10}, counting(3, 0), [&](const Rows& rows) {
    const Sizes sizes = kernels_portable.sizes(net.m, 3);
    void* scratch[3];
    for (int i = 0; i < 3; ++i) {
      const size_t bytes = ((i < 2 ? sizes.own : sizes.common) + 63) / 64 * 64;
      std::memset(scratch[i] = std::aligned_alloc(64, bytes), 0, bytes);
    }
    const struct {
      double patience;
      int64_t from, to, reached;
    } calls[] = {{INFINITY, 0, 4, 4}, {0, 4, 10, 5}};
    for (const auto& call : calls) {
      Barrier barrier{2, call.patience};
      run_together(2, [&](int i) {
        const int64_t reached = kernels_portable.decode(net.m, rows, {0, 3, call.from, call.to}, 3,
                                                        Share{i, 2, &barrier}, scratch[i], scratch[2]);
        expect(reached == call.reached, "every thread stops at the same step");
      });
    }
    kernels_portable.decode(net.m, rows, {0, 3, 5, 10}, 3, Share{0, 1, nullptr}, scratch[0], scratch[2]);
    for (void* one : scratch) std::free(one);
  });
  expect(batch.canvas == expected.canvas && batch.S == expected.S, "given up in the middle, bit for bit");
}

// Each call begins with threads that share columns, and give that up after one step.
void what_is_left_when_sharing_is_given_up_is_dealt_out(bool background) {
  const Net net({2, 2, 8, 8, 96, 128, 3, true, true, false, background});
  const std::vector<int64_t> steps{10, 7, 9};
  Batch expected(net.m, 3);
  const std::vector<float> log_probs = expected.decode(counting(3, 1), {0, 0, 0}, steps, counting(3, 0), 1);
  for (int call = 0; call < 3; ++call) {
    Batch batch(net.m, 3);
    const std::vector<float> found =
        batch.decode(counting(3, 1), {0, 0, 0}, steps, counting(3, 0),
                     [&](const Rows& rows) { linpix::decode(kernels_portable, net.m, rows, 2, 0); });
    expect(found == log_probs && batch.canvas == expected.canvas && batch.S == expected.S && batch.z == expected.z,
           "what is left is dealt out, bit for bit");
    expect(batch.passes == expected.passes && (background || batch.passes == steps), "passes are counted once");
  }
}

void callers_on_several_threads_take_turns() {
  const Net net({2, 2, 8, 8, 16, 32, 3, true, true, false});
  Batch expected(net.m, 20);
  expected.decode(counting(20, 1), std::vector<int64_t>(20, 0), std::vector<int64_t>(20, PIXELS), counting(20, 0), 2);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller)
    callers.emplace_back([&] {
      for (int round = 0; round < 5; ++round) {
        Batch batch(net.m, 20);
        for (int t = 0; t < PIXELS; t += 6)
          batch.decode(counting(20, 1), std::vector<int64_t>(20, t), std::vector<int64_t>(20, 6), counting(20, 0), 2);
        expect(batch.canvas == expected.canvas, "callers do not disturb each other");
      }
    });
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace linpix

int main(int arguments, char**) {
  using namespace linpix;
  const bool few = arguments > 1;  // any argument: a part of the slowest test, for emulators
  philox_gives_its_published_vectors();
  functions_are_those_of_the_library();
  for (const auto& [D, M] : {std::pair{8, 8}, {32, 32}, {5, 7}, {17, 48}, {33, 65}, {1, 1}})
    attention_is_equations_18_to_20(D, M);
  for (const auto& [D, M] : {std::pair{8, 8}, {32, 32}, {5, 7}, {17, 48}, {33, 65}, {1, 1}})
    for (int tokens : {2, 32, 33, 70}) {
      the_gradient_of_whole_sequences_is_that_of_finite_differences(tokens, D, M);
      whole_sequences_are_steps(tokens, D, M);
    }
  for (int rows : {1, 3, 6, 13})
    for (int columns : {16, 32, 48, 64}) {
      for (bool largest : {false, true}) products_of_bytes_are_exact(rows, columns, 512, largest);
      products_of_narrow_weights_are_exact(rows, columns, 128);
    }
  a_row_of_bytes_is_near_the_row();
  for (const auto& [bf16, int8] : {std::pair{false, false}, {true, true}, {true, false}, {false, true}}) {
    if (few && bf16 != int8) continue;
    for (Shape shape : {Shape{2, 2, 8, 8, 16, 32, 3, true, true, bf16}, {3, 3, 5, 7, 48, 37, 17, false, false, bf16},
                        {1, 4, 16, 16, 128, 160, 10, false, true, bf16}, {1, 1, 8, 8, 16, 16, 300, true, true, bf16},
                        {2, 3, 5, 7, 48, 37, 17, false, true, bf16, true},
                        {3, 3, 5, 7, 48, 37, 17, true, true, bf16, false, 3},
                        {1, 2, 8, 8, 16, 32, 256, true, true, bf16, true, 1, false, true}}) {
      shape.int8 = int8;
      an_image_is_the_same_alone_and_in_a_batch(shape, few);
    }
  }
  threads_that_keep_each_other_waiting_stop_at_the_same_step();
  for (bool background : {false, true}) what_is_left_when_sharing_is_given_up_is_dealt_out(background);
  callers_on_several_threads_take_turns();
  if (failures) std::printf("%d failures\n", failures.load());
  return failures != 0;
}
