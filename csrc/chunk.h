// The building blocks of causal.h: matrices of a chunk's tokens and their products, in float, or in double for tests of
// gradients.
//
// Why it is fast: products compute as many rows and vectors at a time as leave their sums in registers, and skip the
// masked half of the scores.
#pragma once

#include "decode.h"
#include "functions.h"
#include "sequence.h"

namespace linpix::LINPIX_ISA {

// One double at a time is enough: doubles serve to check gradients, not to train.
struct Doubles {
  double x;
  Doubles() = default;
  LINPIX_INLINE Doubles(double x) : x(x) {}
};
LINPIX_INLINE Doubles operator+(Doubles a, Doubles b) { return a.x + b.x; }
LINPIX_INLINE Doubles operator*(Doubles a, Doubles b) { return a.x * b.x; }
LINPIX_INLINE Doubles operator/(Doubles a, Doubles b) { return a.x / b.x; }
LINPIX_INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return a.x * b.x + c.x; }
LINPIX_INLINE Doubles at_most(Doubles x, double high) { return high < x.x ? high : x.x; }
LINPIX_INLINE Doubles phi(Doubles x) { return 0 < x.x ? x.x + 1 : natural_exp(x.x); }
LINPIX_INLINE Doubles load(const double* from) { return *from; }
LINPIX_INLINE void store(double* to, Doubles x) { *to = x.x; }
LINPIX_INLINE double sum(Doubles x) { return x.x; }

namespace {

template <class R>
struct Vector;  // the numbers R that are computed together
template <>
struct Vector<float> {
  using Type = Floats;
  static constexpr int SIZE = LANES;
};
template <>
struct Vector<double> {
  using Type = Doubles;
  static constexpr int SIZE = 1;
};

LINPIX_INLINE float number(float x) { return x; }
LINPIX_INLINE double number(double x) { return x; }
LINPIX_INLINE float number(bfloat16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

// --- matrices of a chunk: row after row in scratch, each row padded with zeros to a multiple of 16 -----------------

constexpr int C = SEQUENCE_CHUNK, ROWS = 8;  // tokens of a chunk; rows that share a range of columns
static_assert(C % 16 == 0 && C % ROWS == 0);
// rows and vectors that are computed together
#if defined(__AVX512F__)
constexpr int CHUNK_TILE_ROWS = 8, CHUNK_TILE_VECTORS = 2;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int CHUNK_TILE_ROWS = 4, CHUNK_TILE_VECTORS = 1;
#else
constexpr int CHUNK_TILE_ROWS = 2, CHUNK_TILE_VECTORS = 1;
#endif

struct Range {
  int from, to;
};

// c = a b, or c += a b, for COUNT rows and V vectors of columns. Element (r, k) of a is a[r * a_row + k * a_column], so
// a may be a transpose.
template <int COUNT, int V, class R>
LINPIX_INLINE void tile(const R* a, int a_row, int a_column, const R* b, int b_row, R* c, int c_row, Range k, bool add) {
  using W = typename Vector<R>::Type;
  constexpr int SIZE = Vector<R>::SIZE;
  W total[COUNT][V];
  for (int r = 0; r < COUNT; ++r)
    for (int j = 0; j < V; ++j) total[r][j] = add ? load(c + r * c_row + j * SIZE) : W(0);
  for (int i = k.from; i < k.to; ++i) {
    W right[V];
    for (int j = 0; j < V; ++j) right[j] = load(b + i * b_row + j * SIZE);
    for (int r = 0; r < COUNT; ++r) {
      const W left = a[r * a_row + i * a_column];
      for (int j = 0; j < V; ++j) total[r][j] = multiply_add(left, right[j], total[r][j]);
    }
  }
  for (int r = 0; r < COUNT; ++r)
    for (int j = 0; j < V; ++j) store(c + r * c_row + j * SIZE, total[r][j]);
}

template <int COUNT, class R>
LINPIX_INLINE void tiles(const R* a, int a_row, int a_column, const R* b, int b_row, R* c, int c_row, Range k,
                         Range columns, bool add) {
  constexpr int SIZE = Vector<R>::SIZE, TOGETHER = COUNT < CHUNK_TILE_ROWS ? COUNT : CHUNK_TILE_ROWS;
  constexpr int WIDE = CHUNK_TILE_VECTORS;
  for (int r = 0; r < COUNT; r += TOGETHER, a += TOGETHER * a_row, c += TOGETHER * c_row) {
    int j = columns.from;
    for (; j + WIDE * SIZE <= columns.to; j += WIDE * SIZE)
      tile<TOGETHER, WIDE>(a, a_row, a_column, b + j, b_row, c + j, c_row, k, add);
    for (; j < columns.to; j += SIZE) tile<TOGETHER, 1>(a, a_row, a_column, b + j, b_row, c + j, c_row, k, add);
  }
}

template <class R>
struct Block {
  R* at;
  int row;  // elements from one row to the next, a multiple of 16
};

// Which triangle of the scores is computed: rows end at the diagonal (LOWER) or begin there (UPPER). Whole tiles are
// computed; what lies beyond the diagonal in them is set to 0 or not read.
enum Part { LOWER, UPPER };

LINPIX_INLINE Range part_of(Part part, int row, int unit) {
  return part == LOWER ? Range{0, round_up(row + ROWS, unit)} : Range{row / unit * unit, C};
}

// The scores of a chunk, c = a b^T: tokens by tokens. across: b^T, a result of transpose.
template <class R>
void score(Part part, Block<R> a, int depth, const R* across, Block<R> c) {
  for (int r = 0; r < C; r += ROWS) {
    tiles<ROWS>(a.at + r * a.row, a.row, 1, across, C, c.at + r * c.row, c.row, {0, depth}, part_of(part, r, 16),
                false);
    for (int i = r; i < r + ROWS; ++i)
      for (int j = part == LOWER ? i + 1 : r; j < (part == LOWER ? r + ROWS : i); ++j) c.at[i * c.row + j] = 0;
  }
}

// c = scores b, tokens by features
template <class R>
void apply(Part part, Block<R> scores, Block<R> b, Block<R> c) {
  for (int r = 0; r < C; r += ROWS)
    tiles<ROWS>(scores.at + r * scores.row, scores.row, 1, b.at, b.row, c.at + r * c.row, c.row,
                part_of(part, r, 1), {0, c.row}, false);
}

// c += a b, tokens by features
template <class R>
void multiply(Block<R> a, int depth, Block<R> b, Block<R> c) {
  for (int r = 0; r < C; r += ROWS)
    tiles<ROWS>(a.at + r * a.row, a.row, 1, b.at, b.row, c.at + r * c.row, c.row, {0, depth}, {0, c.row}, true);
}

// state += a^T b, summed over the chunk's tokens
template <class R>
void fold(Block<R> a, int rows, Block<R> b, Block<R> state) {
  int r = 0;
  for (; r + ROWS <= rows; r += ROWS)
    tiles<ROWS>(a.at + r, 1, a.row, b.at, b.row, state.at + r * state.row, state.row, {0, C}, {0, b.row}, true);
  for (; r < rows; ++r)
    tiles<1>(a.at + r, 1, a.row, b.at, b.row, state.at + r * state.row, state.row, {0, C}, {0, b.row}, true);
}

// across (from.row, C) = the transpose of from (C, from.row), in blocks of 4 x 4.
template <class R>
void transpose(Block<R> from, R* across) {
  typedef R Four __attribute__((vector_size(4 * sizeof(R))));
  for (int i = 0; i < C; i += 4)
    for (int j = 0; j < from.row; j += 4) {
      Four x[4];
      for (int r = 0; r < 4; ++r) memcpy(&x[r], from.at + (i + r) * from.row + j, sizeof x[r]);
      const Four a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), b = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
      const Four c = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5), d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
      x[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5), x[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
      x[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5), x[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
      for (int r = 0; r < 4; ++r) memcpy(across + (j + r) * C + i, &x[r], sizeof x[r]);
    }
}

// The tokens of a chunk: t .. t + count - 1 of a head.
struct Place {
  int64_t head, t;
  int count;

  template <class E>
  LINPIX_INLINE E* token(const Heads& of, int i) const {
    return (E*)of.at + head * of.head + (t + i) * of.token;
  }
};

// The chunk that begins at token t, in a sequence that ends before token `end`.
inline Place place_of(int64_t head, int64_t t, int64_t end) { return {head, t, end - t < C ? (int)(end - t) : C}; }

template <class R>
void copy(R* to, const R* from, int width) {
  memcpy(to, from, width * sizeof(R));
}
void copy(float* to, const bfloat16* from, int width) {
  for (int i = 0; i < width; ++i) to[i] = number(from[i]);
}
void copy(bfloat16* to, const float* from, int width) {
  int i = 0;
  for (; i + LANES <= width; i += LANES) store(to + i, load(from + i));
  bfloat16 rest[LANES];
  if (i < width) store(rest, load(from + i));  // from is padded
  memcpy(to + i, rest, (width - i) * sizeof(bfloat16));
}

// Reads the vectors of a chunk's tokens. The rows of `to` after them become 0.
template <class R, class E>
void read(const Heads& from, const Place& place, int width, Block<R> to) {
  for (int i = 0; i < place.count; ++i) copy(to.at + i * to.row, (const E*)place.token<E>(from, i), width);
  memset(to.at + place.count * to.row, 0, (size_t)(C - place.count) * to.row * sizeof(R));
}

// Divides one block of memory, which begins as zeros. If `at` is null, it only counts.
template <class R>
struct Scratch {
  R* at;
  size_t used = 0;

  R* take(size_t count) {
    R* result = at ? at + used : nullptr;
    used += (count + 15) / 16 * 16;
    return result;
  }
  Block<R> block(int rows, int columns) {
    const int row = round_up(columns, 16);
    return {take((size_t)rows * row), row};
  }
};

// Pass: Forward or Backward of causal.h.
template <template <class> class Pass>
size_t scratch_bytes(const Sequences& s) {
  return s.element == Element::float64 ? Pass<double>(nullptr, s.D, s.M).scratch.used * sizeof(double)
                                       : Pass<float>(nullptr, s.D, s.M).scratch.used * sizeof(float);
}

template <template <class> class Pass>
void run(const Sequences& s, int64_t sequence, int64_t head, void* zeros) {
  if (s.element == Element::float64)
    Pass<double>(zeros, s.D, s.M).template run<double>(s, sequence, head);
  else if (s.element == Element::bfloat16)
    Pass<float>(zeros, s.D, s.M).template run<bfloat16>(s, sequence, head);
  else
    Pass<float>(zeros, s.D, s.M).template run<float>(s, sequence, head);
}

}  // namespace
}  // namespace linpix::LINPIX_ISA
