// The decode step: embeddings, layers, head and sampling for a few tokens at a time, on one thread's share.
//
// Every number is computed in one order, whatever else is in the batch: a matrix product adds up k by k in one
// accumulator per output, and all else is per row. So an image does not depend on its neighbours, bit for bit.

#include <sched.h>

#include "decode.h"
#include "philox.h"
#include "vec.h"

namespace linpix::LINPIX_ISA {
namespace {

// --- matrix product ----------------------------------------------------------------------------------------------

// Accumulators that fit in the registers beside one row of weights and one value of a.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_BLOCKS = 4;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 3, TILE_BLOCKS = 2;
#elif defined(__aarch64__)
constexpr int TILE_ROWS = 6, TILE_BLOCKS = 1;
#else
constexpr int TILE_ROWS = 3, TILE_BLOCKS = 1;
#endif
constexpr int FEW_ROWS = 2, AHEAD = 2048;  // with so few rows, weights are waited for; bytes to ask for them ahead

using Tile = float[TILE_ROWS][TILE_BLOCKS * LANES];

// ROWS rows of a times BLOCKS blocks of a panel that is `width` blocks wide. ASK: prefetch weights `ahead` bytes on.
template <int ROWS, int BLOCKS, bool ASK, class T>
void tile(const T* a, int stride, const T* w, int width, int depth, Tile& result, int ahead) {
  using Op = Operand<T>;
  Floats sums[ROWS][BLOCKS];  // in registers: every loop over it is unrolled before they are dealt out
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) sums[r][b] = 0.0f;
  for (int k = 0; k < depth; k += Op::K, w += width * LANES * Op::K) {
    Op weights[BLOCKS];
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) {
      weights[b] = Op::load(w + b * LANES * Op::K);
      if (ASK) __builtin_prefetch((const char*)(w + b * LANES * Op::K) + ahead, 0, ROWS <= FEW_ROWS ? 3 : 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Op value = Op::broadcast(a + r * stride + k);
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; ++b) sums[r][b] = value.times(weights[b], sums[r][b]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) store(&result[r][b * LANES], sums[r][b]);
}

template <int ROWS, bool ASK, class T>
void tile_of(int blocks, const T* a, int stride, const T* w, int width, int depth, Tile& result, int ahead) {
  if (blocks == 1) return tile<ROWS, 1, ASK>(a, stride, w, width, depth, result, ahead);
  if constexpr (TILE_BLOCKS >= 2)
    if (blocks == 2) return tile<ROWS, 2, ASK>(a, stride, w, width, depth, result, ahead);
  if constexpr (TILE_BLOCKS >= 3)
    if (blocks == 3) return tile<ROWS, 3, ASK>(a, stride, w, width, depth, result, ahead);
  if constexpr (TILE_BLOCKS >= 4) return tile<ROWS, 4, ASK>(a, stride, w, width, depth, result, ahead);
}

template <bool ASK, class T>
void tile_of(int rows, int blocks, const T* a, int stride, const T* w, int width, int depth, Tile& result, int ahead) {
  switch (rows) {
    case 1: return tile_of<1, ASK>(blocks, a, stride, w, width, depth, result, ahead);
    case 2: return tile_of<2, ASK>(blocks, a, stride, w, width, depth, result, ahead);
    case 3: return tile_of<3, ASK>(blocks, a, stride, w, width, depth, result, ahead);
#if defined(__AVX512F__) || defined(__aarch64__)
    case 4: return tile_of<4, ASK>(blocks, a, stride, w, width, depth, result, ahead);
    case 5: return tile_of<5, ASK>(blocks, a, stride, w, width, depth, result, ahead);
    case 6: return tile_of<6, ASK>(blocks, a, stride, w, width, depth, result, ahead);
#endif
  }
}

int least(int a, int b) { return a < b ? a : b; }

int panels_of(int columns) {
  const int blocks = columns / LANES;
  return (blocks + Matrix::PANEL - 1) / Matrix::PANEL;
}

// Panels first .. last-1 of m (counted through all its groups) for `rows` rows of a; epilogue(row, column, sums) gets
// sixteen columns at a time, while they are in the nearest cache. column counts through the padded groups.
template <class T, class Epilogue>
void product(const T* a, int stride, int rows, const Matrix& m, int first, int last, Epilogue epilogue) {
  const int panels = panels_of(m.columns), blocks = m.columns / LANES;
  const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int panel = first; panel < last; ++panel) {
    // blocks of a group are dealt to its panels as evenly as can be, the wider ones first: as in model/packing.py
    const int group = panel / panels, at = panel % panels;
    const int begin = at * (blocks / panels) + least(at, blocks % panels);
    const int width = blocks / panels + (at < blocks % panels);
    const int column = group * m.columns + begin * LANES;
    const T* w = (const T*)m.weights + (size_t)column * m.depth;
    for (int i = 0; i < tiles; ++i) {
      const int row = i * rows / tiles, count = (i + 1) * rows / tiles - row;
      for (int b = 0; b < width; b += TILE_BLOCKS) {
        alignas(64) Tile sums;
        const int wide = least(TILE_BLOCKS, width - b);
        const T *from = a + row * stride, *block = w + b * LANES * Operand<T>::K;
        const int panel_bytes = width * LANES * m.depth * (int)sizeof(T);
        if (rows <= FEW_ROWS)
          tile_of<true>(count, wide, from, stride, block, width, m.depth, sums, AHEAD);
        else if (m.far && tiles > 1 && i == tiles - 1)  // with this panel in a near cache, there is time for the next
          tile_of<true>(count, wide, from, stride, block, width, m.depth, sums, panel_bytes);
        else
          tile_of<false>(count, wide, from, stride, block, width, m.depth, sums, 0);
        for (int r = 0; r < count; ++r)
          for (int c = 0; c < wide * LANES; c += LANES) {
            const int to = column + b * LANES + c;
            epilogue(row + r, to, load(&sums[r][c]) + load(m.bias + to));
          }
      }
    }
  }
}

// --- attention ---------------------------------------------------------------------------------------------------

// V vectors of the values: S += k v^T, then numerator = q S (equations 18 and 20).
template <int V>
LINPIX_INLINE void fold_and_read(const float* q, const float* k, const float* v, float* S, int D, int M,
                                 float* numerator) {
  constexpr int CHAINS = 4;  // sums side by side, since one would wait for each addition to end
  Floats value[V], total[CHAINS][V];
  for (int j = 0; j < V; ++j) value[j] = load(v + j * LANES);
  for (int i = 0; i < CHAINS; ++i)
    for (int j = 0; j < V; ++j) total[i][j] = 0.0f;
  const auto one = [&](int d, Floats(&chain)[V]) {
    for (int j = 0; j < V; ++j) {
      float* s = S + (size_t)d * M + j * LANES;
      const Floats updated = multiply_add(k[d], value[j], load(s));
      store(s, updated);
      chain[j] = multiply_add(q[d], updated, chain[j]);
    }
  };
  int d = 0;
  for (; d + CHAINS <= D; d += CHAINS)
    for (int i = 0; i < CHAINS; ++i) one(d + i, total[i]);
  for (int i = 0; i < CHAINS - 1; ++i)
    if (d + i < D) one(d + i, total[i]);
  for (int j = 0; j < V; ++j)
    store(numerator + j * LANES, (total[0][j] + total[1][j]) + (total[2][j] + total[3][j]));
}

// phi of the first n numbers, in place
void map_features(float* x, int n) {
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(x + i, phi(load(x + i)));
  if (i < n) store_some(x + i, phi(load_some(x + i, n - i)), n - i);
}

// One token of one head: fold it into (S, z) and read the state out. q and k after the feature map; y: M floats.
void attend_mapped(const float* q, const float* k, const float* v, float* S, float* z, int D, int M, float eps,
                   float* y) {
  Floats products = 0.0f;
  int d = 0;
  for (; d + LANES <= D; d += LANES) {
    const Floats updated = load(z + d) + load(k + d);
    store(z + d, updated);
    products = multiply_add(load(q + d), updated, products);
  }
  if (d < D) {
    const Floats updated = load_some(z + d, D - d) + load_some(k + d, D - d);
    store_some(z + d, updated, D - d);
    products = multiply_add(load_some(q + d, D - d), updated, products);
  }
  int m = 0;
  for (; m + 2 * LANES <= M; m += 2 * LANES) fold_and_read<2>(q, k, v + m, S + m, D, M, y + m);
  for (; m + LANES <= M; m += LANES) fold_and_read<1>(q, k, v + m, S + m, D, M, y + m);
  for (; m < M; ++m) {
    float total = 0;
    for (d = 0; d < D; ++d) {
      float& s = S[(size_t)d * M + m];
      s = s + k[d] * v[m];
      total = total + q[d] * s;
    }
    y[m] = total;
  }
  const float normaliser = sum(products) + eps;
  for (m = 0; m < M; ++m) y[m] = y[m] / normaliser;
}

void attend(float* q, float* k, const float* v, float* S, float* z, int D, int M, float eps, float* y) {
  map_features(q, D);
  map_features(k, D);
  attend_mapped(q, k, v, S, z, D, M, eps, y);
}

// --- a pass: some tokens through all layers ------------------------------------------------------------------------

void wait(Share share) {
  if (share.count == 1) return;
  Barrier& b = *share.barrier;
  const int round = __atomic_load_n(&b.round, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&b.arrived, 1, __ATOMIC_ACQ_REL) == b.members) {
    __atomic_store_n(&b.arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&b.round, round + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int spins = 0; __atomic_load_n(&b.round, __ATOMIC_ACQUIRE) == round; ++spins) {
    if (spins < 4000) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    } else {
      sched_yield();  // more threads than cores: let the other one run
    }
  }
}

struct Token {
  int64_t slot;
  int64_t t;      // the position being predicted
  int64_t start;  // start index of its image
  bool folded;    // false at position 0 of a model without a start token: there is nothing to fold in
};

LINPIX_INLINE void store_as(float* to, Floats x) { store(to, x); }
LINPIX_INLINE void store_as(bfloat16* to, Floats x) { store(to, x); }

template <class T>
class Pass {
 public:
  // For `most` tokens at most. Without own and common it only counts the bytes that it would take of them.
  Pass(const Model& model, const Rows& rows, Share share, int most, void* own, void* common)
      : m(model), rows(rows), share(share) {
    uintptr_t at = (uintptr_t)own;
    token = take<Token>(at, most);
    x = take<float>(at, most * m.d_model);
    a = take<T>(at, most * m.d_model);
    qkv = take<float>(at, most * m.layer[0].qkv.columns);
    features = take<float>(at, most * m.d_model);
    parameters = take<float>(at, most * m.head.groups * m.head.columns);
    read = take<float>(at, round_up(m.value_dim, LANES));
    scratch = take<float>(at, m.head.columns);
    own_bytes = at - (uintptr_t)own;
    at = (uintptr_t)common;
    sum = take<float>(at, most * m.d_model);
    y = take<T>(at, most * m.layer[0].out.depth);
    hidden = take<T>(at, most * m.layer[0].down.depth);
    common_bytes = at - (uintptr_t)common;
  }

  size_t own_bytes, common_bytes;
  Token* token;       // of this pass
  int tokens = 0;
  float* parameters;  // (tokens, 3, columns): what head() leaves
  float* scratch;     // K, rounded up

  // All layers; the last one only as far as its state if nothing is to be predicted.
  void run(bool predict) {
    embed();
    settle(x, nullptr, m.layer[0].norm1);
    for (int l = 0; l < m.layers; ++l) {
      const Layer& layer = m.layer[l];
      attention(l);
      if (l == m.layers - 1 && !predict) return;
      wait(share);
      columns(y, layer.out, [&](int r, int c, Floats s) { add_residual(r, c, s); });
      wait(share);
      settle(sum, &layer.norm1, layer.norm2);
      if (m.gelu)
        columns(a, layer.up, [&](int r, int c, Floats s) { store_as(hidden + r * layer.down.depth + c, gelu(s)); });
      else
        columns(a, layer.up,
                [&](int r, int c, Floats s) { store_as(hidden + r * layer.down.depth + c, at_least(s, 0.0f)); });
      wait(share);
      columns(hidden, layer.down, [&](int r, int c, Floats s) { add_residual(r, c, s); });
      wait(share);
      settle(sum, &layer.norm2, l + 1 < m.layers ? m.layer[l + 1].norm1 : Norm{});
    }
  }

  // Mixture parameters of every token, from x.
  void head() {
    const int width = m.head.groups * m.head.columns;
    for (int r = 0; r < tokens; ++r) normalise(x + r * m.d_model, m.norm, features + r * m.d_model);
    product(features, m.d_model, tokens, m.head, 0, m.head.groups * panels_of(m.head.columns),
            [&](int r, int c, Floats s) { store(parameters + r * width + c, s); });
  }

 private:
  template <class U>
  static U* take(uintptr_t& at, size_t count) {
    U* taken = (U*)at;
    at += (count * sizeof(U) + 63) / 64 * 64;
    return taken;
  }

  // This thread's share of the panels of a matrix.
  template <class Epilogue>
  void columns(const T* from, const Matrix& w, Epilogue epilogue) {
    const int panels = w.groups * panels_of(w.columns);
    product(from, w.depth, tokens, w, share.index * panels / share.count, (share.index + 1) * panels / share.count,
            epilogue);
  }

  void add_residual(int r, int c, Floats s) { store(sum + r * m.d_model + c, load(x + r * m.d_model + c) + s); }

  void embed() {
    for (int r = 0; r < tokens; ++r) {
      const Token& k = token[r];
      const uint8_t* image = rows.canvas + k.slot * m.subpixels;
      const int32_t *source = m.source + k.t * m.values, *place = m.place + k.t * m.places;
      float* to = x + r * m.d_model;
      for (int i = 0; i < m.values + m.places; ++i) {
        int64_t row;
        if (i >= m.values)
          row = place[i - m.values];
        else if (source[i] >= 0)
          row = m.base[i] + image[source[i]];
        else
          row = m.base[i] + (i == 0 ? k.start : 256);
        const float* from = m.table + row * m.d_model;
        for (int c = 0; c < m.d_model; c += LANES) store(to + c, i ? load(to + c) + load(from + c) : load(from + c));
      }
    }
  }

  void normalise(const float* from, Norm norm, float* to) {
    const int n = m.d_model;
    Floats total = 0.0f, squares = 0.0f;
    for (int c = 0; c < n; c += LANES) total = total + load(from + c);
    const Floats mean = linpix::LINPIX_ISA::sum(total) / (float)n;
    for (int c = 0; c < n; c += LANES) {
      const Floats centred = load(from + c) - mean;
      squares = multiply_add(centred, centred, squares);
    }
    const Floats scale = 1.0f / __builtin_sqrtf(linpix::LINPIX_ISA::sum(squares) / (float)n + 1e-5f);
    for (int c = 0; c < n; c += LANES)
      store(to + c, multiply_add((load(from + c) - mean) * scale, load(norm.weight + c), load(norm.bias + c)));
  }

  // Between two sub-layers: the residual stream x from what the last one left, and a, which the next one multiplies.
  // Post-norm: x = norm(from), a = x. Pre-norm: x = from, a = norm(x).
  void settle(const float* from, const Norm* post, Norm pre) {
    const int n = m.d_model;
    for (int r = 0; r < tokens; ++r) {
      float* to = x + r * n;
      if (!m.pre_norm && post)
        normalise(from + r * n, *post, to);
      else if (from != x)
        memcpy(to, from + r * n, n * sizeof(float));
      const float* next = to;
      if (m.pre_norm && pre.weight) {
        normalise(to, pre, features + r * n);
        next = features + r * n;
      }
      for (int c = 0; c < n; c += LANES) store_as(a + r * n + c, load(next + c));
    }
  }

  // This thread's share of the heads: projections, feature map, state, read-out into y.
  void attention(int l) {
    const Matrix& w = m.layer[l].qkv;
    const int D = m.key_dim, M = m.value_dim, panels = panels_of(w.columns), stride = m.layer[l].out.depth;
    for (int h = share.index * m.heads / share.count; h < (share.index + 1) * m.heads / share.count; ++h) {
      product(a, m.d_model, tokens, w, h * panels, (h + 1) * panels,
              [&](int r, int c, Floats s) { store(qkv + r * w.columns + c - h * w.columns, s); });
      for (int r = 0; r < tokens; ++r) {
        T* to = y + r * stride + h * M;
        float* q = qkv + r * w.columns;
        if (token[r].folded) {
          const int64_t state = (token[r].slot * m.layers + l) * m.heads + h;
          map_features(q, 2 * D);
          attend_mapped(q, q + D, q + 2 * D, rows.S + state * D * M, rows.z + state * D, D, M, m.eps, read);
        } else {
          for (int i = 0; i < M; ++i) read[i] = 0;
        }
        for (int i = 0; i < M; i += LANES) {
          alignas(64) T rounded[LANES];
          store_as(rounded, load(read + i));
          memcpy(to + i, rounded, least(LANES, M - i) * sizeof(T));
        }
      }
    }
  }

  const Model& m;
  const Rows& rows;
  const Share share;
  float* x;         // (tokens, d_model): the residual stream
  T* a;             // (tokens, d_model): what a sub-layer multiplies
  float* qkv;       // (tokens, q k v of one head)
  float* features;  // (tokens, d_model)
  float* read;      // M, rounded up
  float* sum;       // (tokens, d_model): a sub-layer's output and its residual. From here on, common to the share:
  T* y;             // (tokens, H * M)
  T* hidden;        // (tokens, d_ff)
};

// --- drawing -------------------------------------------------------------------------------------------------------

struct Mixture {
  const float *logits, *means, *log_scales;
  int K;
};

bool all_finite(const float* x, int n) {
  bool finite = true;
  for (int i = 0; i < n; ++i) finite &= x[i] - x[i] == 0;
  return finite;
}

// model.mixture.draw: u0 picks the component, u1 the value.
uint8_t draw(const Mixture& p, float u0, float u1, float temperature, bool elu_scale, float* weights) {
  int best = 0;
  for (int j = 1; j < p.K; ++j)
    if (p.logits[j] > p.logits[best]) best = j;
  int picked = best;
  if (temperature > 0) {
    const Floats divisor = temperature;
    for (int j = 0; j < p.K; j += LANES) store(weights + j, exp((load(p.logits + j) - p.logits[best]) / divisor));
    float total = 0, passed = 0;
    for (int j = 0; j < p.K; ++j) total = total + weights[j];
    picked = p.K - 1;
    for (int j = 0; j < p.K; ++j) {
      passed = passed + weights[j];
      if (passed > u0 * total) {
        picked = j;
        break;
      }
    }
  }
  alignas(64) float scale[LANES], logistic[LANES];
  const float s = p.log_scales[picked];
  const Floats as_elu = Floats(phi(Floats(s))) + 0.0001f;  // elu(s) + 1.0001
  store(scale, elu_scale ? as_elu : exp(at_least(s, -7.0f)));
  store(logistic, log(u1) - log(1 - u1));
  const float x = p.means[picked] + scale[0] * temperature * logistic[0];
  const float value = (x + 1) / 2 * 255;
  if (!(value > 0)) return 0;  // NaN too: the row is reported as not finite
  return value > 255 ? 255 : (uint8_t)__builtin_nearbyintf(value);
}

// model.mixture.log_likelihood of one value; terms is scratch for K floats.
float log_probability(const Mixture& p, int value, float* terms) {
  const auto lanes = [](int j) {
    Floats r;
    alignas(64) float index[LANES];
    for (int i = 0; i < LANES; ++i) index[i] = (float)(j + i);
    r = load(index);
    return r;
  };
  const auto log_sigmoid = [](Floats a) { return at_most(a, 0.0f) - log1p(exp(-magnitude(a))); };
  const auto log_sum_exp = [&](const float* of) {
    float most = of[0];
    for (int j = 1; j < p.K; ++j) most = of[j] > most ? of[j] : most;
    Floats total = 0.0f;
    for (int j = 0; j < p.K; j += LANES)
      total = total + where_less(lanes(j), (float)p.K, exp(load(of + j) - most), 0.0f);
    return Floats(most) + log(Floats(sum(total)));
  };
  const Floats normaliser = log_sum_exp(p.logits);
  const float centre = (float)value / 127.5f - 1, half = 1.0f / 255;
  for (int j = 0; j < p.K; j += LANES) {
    const Floats inverse = exp(-at_least(load(p.log_scales + j), -7.0f));
    const Floats centred = Floats(centre) - load(p.means + j);
    Floats term = load(p.logits + j) - normaliser;
    if (value < 255) term = term + log_sigmoid((centred + half) * inverse);
    if (value > 0) term = term + log_sigmoid(-((centred - half) * inverse));
    if (value > 0 && value < 255) term = term + log(one_minus_exp(at_least(2 * half * inverse, 1.17549435e-38f)));
    store(terms + j, term);
  }
  alignas(64) float result[LANES];
  store(result, log_sum_exp(terms));
  return result[0];
}

uint8_t draw_marginal(const double* cumulative, float u0) {
  int value = 0;
  while (value < 255 && !(cumulative[value] > u0 * cumulative[255])) ++value;
  return (uint8_t)value;
}

// The sub-pixel of one row at one position: drawn, or the known one; and its log-probability.
void finish_subpixel(const Model& m, const Rows& rows, int row, int64_t step, const float* parameters, float* scratch) {
  const int64_t t = rows.positions[row] + step, slot = rows.slots[row];
  uint8_t* pixel = rows.canvas + slot * m.subpixels + t;
  const bool known = rows.known[slot * m.subpixels + t];
  const Words words = noise(rows.seeds[row], t, 0);
  const float u0 = uniform(words.word[0]), u1 = uniform(words.word[1]);
  float& log_prob = rows.log_probs[row * rows.most_steps + step];
  if (m.marginal && t == 0) {
    if (!known) *pixel = draw_marginal(m.marginal, u0);
    const double mass = m.marginal[*pixel] - (*pixel ? m.marginal[*pixel - 1] : 0);
    log_prob = (float)__builtin_log(mass / m.marginal[255]);
    return;
  }
  const int width = m.head.columns;
  const Mixture p = {parameters, parameters + width, parameters + 2 * width, m.mixtures};
  if (!(all_finite(p.logits, p.K) && all_finite(p.means, p.K) && all_finite(p.log_scales, p.K)))
    rows.finite[row] = false;
  if (!known) *pixel = draw(p, u0, u1, rows.temperatures[row], m.elu_scale, scratch);
  log_prob = log_probability(p, *pixel, scratch);
}

// --- entry points --------------------------------------------------------------------------------------------------

template <class T>
void decode(const Model& m, const Rows& rows, int first, int last, int most, Share share, void* own, void* common) {
  Pass<T> pass(m, rows, share, most, own, common);
  const int width = m.head.groups * m.head.columns;
  for (int64_t step = 0;; ++step) {
    pass.tokens = 0;
    for (int row = first; row < last; ++row) {
      if (step >= rows.steps[row]) continue;
      const int64_t t = rows.positions[row] + step;
      pass.token[pass.tokens++] = {rows.slots[row], t, rows.start[row], !(m.marginal && t == 0)};
    }
    if (!pass.tokens) return;
    pass.run(true);
    if (share.index == 0) {
      pass.head();
      int r = 0;
      for (int row = first; row < last; ++row)
        if (step < rows.steps[row]) finish_subpixel(m, rows, row, step, pass.parameters + r++ * width, pass.scratch);
    }
    wait(share);  // until the sub-pixels that the next step looks up are there
  }
}

template <class T>
void prefill(const Model& m, const Rows& rows, int row, Share share, void* own, void* common) {
  Pass<T> pass(m, rows, share, PREFILL_TOKENS, own, common);
  for (int64_t t = m.marginal ? 1 : 0; t < rows.steps[row]; t += PREFILL_TOKENS) {
    const int64_t left = rows.steps[row] - t;
    pass.tokens = left < PREFILL_TOKENS ? (int)left : PREFILL_TOKENS;
    for (int i = 0; i < pass.tokens; ++i) pass.token[i] = {rows.slots[row], t + i, rows.start[row], true};
    pass.run(false);
    wait(share);
  }
}

template <class T>
Sizes sizes_of(const Model& m, int tokens) {
  const Pass<T> counted(m, Rows{}, Share{}, tokens, nullptr, nullptr);
  return {counted.own_bytes, counted.common_bytes};
}
Sizes sizes(const Model& m, int tokens) { return (m.bf16 ? sizes_of<bfloat16> : sizes_of<float>)(m, tokens); }
void decode_any(const Model& m, const Rows& rows, int first, int last, int most, Share share, void* own, void* common) {
  (m.bf16 ? decode<bfloat16> : decode<float>)(m, rows, first, last, most, share, own, common);
}
void prefill_any(const Model& m, const Rows& rows, int row, Share share, void* own, void* common) {
  (m.bf16 ? prefill<bfloat16> : prefill<float>)(m, rows, row, share, own, common);
}

}  // namespace
}  // namespace linpix::LINPIX_ISA

#define LINPIX_STRING_(name) #name
#define LINPIX_STRING(name) LINPIX_STRING_(name)
#define LINPIX_JOIN_(a, b) a##b
#define LINPIX_JOIN(a, b) LINPIX_JOIN_(a, b)

namespace linpix {
const Kernels LINPIX_JOIN(kernels_, LINPIX_ISA) = {
    LINPIX_STRING(LINPIX_ISA),
#if defined(__AVX512BF16__)
    true,
#else
    false,
#endif
    LINPIX_ISA::sizes, LINPIX_ISA::decode_any, LINPIX_ISA::prefill_any,
    LINPIX_ISA::attend};
}
