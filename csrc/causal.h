// Causal linear attention over whole sequences, and its gradient, one head of one image at a time.
//
// Both go through the tokens chunk by chunk (algorithm 1 of "Transformers are RNNs", many tokens a step): what came
// before a chunk through its state, what is inside through a masked C x C matrix of scores. So memory is that of one
// chunk and one state, whatever T. Numbers are float, or double for tests of gradients.
#pragma once

#include "decode.h"
#include "functions.h"
#include "sequence.h"

namespace linpix::LINPIX_ISA {

// One double at a time is enough: it serves to check gradients, not to train.
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
struct Vector;  // as many numbers R as are computed together
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

// --- matrices of a chunk: rows side by side in scratch, each padded with zeros to a multiple of 16 -----------------

constexpr int C = SEQUENCE_CHUNK, ROWS = 8;  // tokens of a chunk; rows of a product that are computed together
static_assert(C % 16 == 0 && C % ROWS == 0);

struct Range {
  int from, to;
};

// c = a b, or c += a b, for ROWS rows and V vectors of columns. a's element (r, k) stands at a[r * a_row + k * a_column],
// so that a may be a transpose; b and c are plain.
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
  constexpr int SIZE = Vector<R>::SIZE;
  int j = columns.from;
  for (; j + 2 * SIZE <= columns.to; j += 2 * SIZE)
    tile<COUNT, 2>(a, a_row, a_column, b + j, b_row, c + j, c_row, k, add);
  for (; j < columns.to; j += SIZE) tile<COUNT, 1>(a, a_row, a_column, b + j, b_row, c + j, c_row, k, add);
}

template <class R>
struct Block {
  R* at;
  int row;  // elements from one row to the next, a multiple of 16
};

// Which part of a product is wanted or not zero. Of a triangle, whole tiles: what is beyond the diagonal in them is
// masked. (Rows of a LOWER factor end at the diagonal, those of an UPPER one begin there.)
enum Part { WHOLE, LOWER, UPPER };

LINPIX_INLINE Range part_of(Part part, int row, int size, int unit) {
  if (part == LOWER) return {0, size < row + ROWS ? size : (row + ROWS + unit - 1) / unit * unit};
  if (part == UPPER) return {row / unit * unit, size};
  return {0, size};
}

// The scores of a chunk, c = a b: tokens by tokens.
template <class R>
void score(Part part, Block<R> a, int depth, Block<R> b, Block<R> c) {
  for (int r = 0; r < C; r += ROWS) {
    tiles<ROWS>(a.at + r * a.row, a.row, 1, b.at, b.row, c.at + r * c.row, c.row, {0, depth},
                part_of(part, r, C, 16), false);
    for (int i = r; i < r + ROWS; ++i)
      for (int j = part == LOWER ? i + 1 : r; j < (part == LOWER ? r + ROWS : i); ++j) c.at[i * c.row + j] = 0;
  }
}

// c = scores b, tokens by features
template <class R>
void apply(Part part, Block<R> scores, Block<R> b, Block<R> c) {
  for (int r = 0; r < C; r += ROWS)
    tiles<ROWS>(scores.at + r * scores.row, scores.row, 1, b.at, b.row, c.at + r * c.row, c.row,
                part_of(part, r, C, 1), {0, c.row}, false);
}

// c += a b, tokens by features
template <class R>
void add_read(Block<R> a, int depth, Block<R> b, Block<R> c) {
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

// to (columns, C) = the transpose of from (C, columns); columns are a multiple of 4
template <class R>
void transpose(Block<R> from, int columns, R* to) {
  typedef R Four __attribute__((vector_size(4 * sizeof(R))));
  for (int i = 0; i < C; i += 4)
    for (int j = 0; j < columns; j += 4) {
      Four x[4];
      for (int r = 0; r < 4; ++r) memcpy(&x[r], from.at + (i + r) * from.row + j, sizeof x[r]);
      const Four a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), b = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
      const Four c = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5), d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
      x[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5), x[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
      x[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5), x[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
      for (int r = 0; r < 4; ++r) memcpy(to + (j + r) * C + i, &x[r], sizeof x[r]);
    }
}

// A chunk's tokens: t .. t + count - 1 of a head of an image.
struct Place {
  int64_t image, head, t;
  int count;

  template <class E>
  LINPIX_INLINE E* token(const Heads& of, int i) const {
    return (E*)of.at + image * of.image + head * of.head + (t + i) * of.token;
  }
};

// The rest of the chunk becomes 0.
template <class R, class E>
void read(const Heads& from, const Place& place, int width, Block<R> to) {
  for (int i = 0; i < place.count; ++i) {
    const E* x = place.token<E>(from, i);
    for (int d = 0; d < width; ++d) to.at[i * to.row + d] = number(x[d]);
  }
  memset(to.at + place.count * to.row, 0, (size_t)(C - place.count) * to.row * sizeof(R));
}

// The same after the feature map. Whole vectors are mapped; what is beyond a token's features is made 0 again.
template <class R, class E>
void read_mapped(const Heads& from, const Place& place, int width, Block<R> to) {
  read<R, E>(from, place, width, to);
  for (int i = 0; i < place.count; ++i) {
    R* row = to.at + i * to.row;
    for (int d = 0; d < width; d += Vector<R>::SIZE) store(row + d, phi(load(row + d)));
    for (int d = width; d < to.row; ++d) row[d] = 0;
  }
}

template <class R>
void write(R* to, const R* from, int width) {
  memcpy(to, from, width * sizeof(R));
}
void write(bfloat16* to, const float* from, int width) {
  int i = 0;
  for (; i + LANES <= width; i += LANES) store(to + i, load(from + i));
  bfloat16 rest[LANES];
  if (i < width) store(rest, load(from + i));  // rows are padded
  memcpy(to + i, rest, (width - i) * sizeof(bfloat16));
}

// Memory is handed out from one block, which begins as zeros.
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

// --- y_i = sum_{j<=i} (phi(q_i) . phi(k_j)) v_j / (sum_{j<=i} phi(q_i) . phi(k_j) + eps) -----------------------------

template <class R>
struct Forward {
  Scratch<R> scratch;
  Block<R> q, k, v, scores, y, S;  // S: (D, M)
  R *z, *k_across;

  Forward(void* memory, int D, int M)
      : scratch{(R*)memory}, q(scratch.block(C, D)), k(scratch.block(C, D)), v(scratch.block(C, M)),
        scores(scratch.block(C, C)), y(scratch.block(C, M)), S(scratch.block(D, M)), z(scratch.take(q.row)),
        k_across(scratch.take((size_t)q.row * C)) {}

  template <class E>
  void run(const Sequences& s, int64_t image, int64_t head) {
    using W = typename Vector<R>::Type;
    constexpr int SIZE = Vector<R>::SIZE;
    for (int64_t t = 0; t < s.tokens; t += C) {
      const Place place = {image, head, t, s.tokens - t < C ? (int)(s.tokens - t) : C};
      read_mapped<R, E>(s.q, place, s.D, q);
      read_mapped<R, E>(s.k, place, s.D, k);
      read<R, E>(s.v, place, s.M, v);
      transpose(k, q.row, k_across);
      score(LOWER, q, s.D, {k_across, C}, scores);
      apply(LOWER, scores, v, y);
      add_read(q, s.D, S, y);
      for (int i = 0; i < place.count; ++i) {
        W products = W(0);
        for (int d = 0; d < q.row; d += SIZE) {
          const W updated = load(z + d) + load(k.at + i * k.row + d);
          store(z + d, updated);
          products = multiply_add(load(q.at + i * q.row + d), updated, products);
        }
        const R normaliser = sum(products) + (R)s.eps;
        *place.token<R>(s.normaliser, i) = normaliser;
        R* row = y.at + i * y.row;
        for (int m = 0; m < y.row; m += SIZE) store(row + m, load(row + m) / W(normaliser));
        write(place.token<E>(s.y, i), row, s.M);
      }
      if (t + C < s.tokens) fold(k, s.D, v, S);
    }
  }
};

// --- its gradient: equations 13 to 15, where v has one more column, of ones, whose sum is the normaliser ------------------

template <class R>
struct Backward {
  Scratch<R> scratch;
  // n: the gradient of the numerators, and as their column M that of the normaliser; v: its column M is 1
  Block<R> q, k, v, n, scores, gradients, result, S, n_q, q_n;
  R* across;

  Backward(void* memory, int D, int M)
      : scratch{(R*)memory}, q(scratch.block(C, D)), k(scratch.block(C, D)), v(scratch.block(C, M + 1)),
        n(scratch.block(C, M + 1)), scores(scratch.block(C, C)), gradients(scratch.block(C, C)),
        result(scratch.block(C, D > M ? D : M + 1)), S(scratch.block(M + 1, D)), n_q(scratch.block(M + 1, D)),
        q_n(scratch.block(D, M + 1)), across(scratch.take((size_t)(q.row > v.row ? q.row : v.row) * C)) {}

  template <class E>
  void run(const Sequences& s, int64_t image, int64_t head) {
    const auto chunk = [&](int64_t t) {
      return Place{image, head, t, s.tokens - t < C ? (int)(s.tokens - t) : C};
    };
    for (int64_t t = 0; t < s.tokens; t += C) queries<E>(s, chunk(t));
    for (int64_t t = (s.tokens - 1) / C * C; t >= 0; t -= C) keys_and_values<E>(s, chunk(t));
  }

  template <class E>
  void read_all(const Sequences& s, const Place& place) {
    read_mapped<R, E>(s.q, place, s.D, q);
    read_mapped<R, E>(s.k, place, s.D, k);
    read<R, E>(s.v, place, s.M, v);
    read<R, E>(s.g, place, s.M, n);
    for (int i = 0; i < place.count; ++i) {
      R *row = n.at + i * n.row, down = 0;
      const R normaliser = *place.token<R>(s.normaliser, i);
      const E* y = place.token<E>(s.y, i);
      for (int m = 0; m < s.M; ++m) {
        down += row[m] * number(y[m]);
        row[m] = row[m] / normaliser;
      }
      row[s.M] = -down / normaliser;
      v.at[i * v.row + s.M] = 1;
    }
  }

  // Equation 13, from the first chunk to the last; S (M + 1, D) is the state before the chunk.
  template <class E>
  void queries(const Sequences& s, const Place& place) {
    read_all<E>(s, place);
    transpose(v, v.row, across);
    score(LOWER, n, s.M + 1, {across, C}, gradients);
    const Block<R> dq = {result.at, q.row};
    apply(LOWER, gradients, k, dq);
    add_read(n, s.M + 1, S, dq);
    if (place.t + C < s.tokens) fold(v, s.M + 1, k, S);
    write_mapped<E>(q, dq, s.dq, place, s.D);
  }

  // Equations 14 and 15, from the last chunk to the first; n_q and q_n are the state after it.
  template <class E>
  void keys_and_values(const Sequences& s, const Place& place) {
    read_all<E>(s, place);
    transpose(q, q.row, across);
    score(UPPER, k, s.D, {across, C}, scores);
    transpose(n, n.row, across);
    score(UPPER, v, s.M + 1, {across, C}, gradients);
    const Block<R> dv = {result.at, n.row}, dk = {result.at, q.row};  // one after the other
    apply(UPPER, scores, n, dv);
    add_read(k, s.D, q_n, dv);
    for (int i = 0; i < place.count; ++i) write(place.token<E>(s.dv, i), dv.at + i * dv.row, s.M);
    apply(UPPER, gradients, q, dk);
    add_read(v, s.M + 1, n_q, dk);
    if (place.t > 0) {
      fold(n, s.M + 1, q, n_q);
      fold(q, s.D, n, q_n);
    }
    write_mapped<E>(k, dk, s.dk, place, s.D);
  }

  // Through the feature map: phi'(x) = 1 where x > 0, and there phi(x) > 1; else it is phi(x).
  template <class E>
  static void write_mapped(Block<R> mapped, Block<R> gradient, const Heads& to, const Place& place, int width) {
    for (int i = 0; i < place.count; ++i) {
      R* row = gradient.at + i * gradient.row;
      for (int d = 0; d < gradient.row; d += Vector<R>::SIZE)
        store(row + d, load(row + d) * at_most(load(mapped.at + i * mapped.row + d), 1));
      write(place.token<E>(to, i), row, width);
    }
  }
};

template <template <class> class Pass>
size_t scratch_bytes(const Sequences& s) {
  return s.element == Element::float64 ? Pass<double>(nullptr, s.D, s.M).scratch.used * sizeof(double)
                                       : Pass<float>(nullptr, s.D, s.M).scratch.used * sizeof(float);
}

template <template <class> class Pass>
void run(const Sequences& s, int64_t image, int64_t head, void* zeros) {
  if (s.element == Element::float64)
    Pass<double>(zeros, s.D, s.M).template run<double>(s, image, head);
  else if (s.element == Element::bfloat16)
    Pass<float>(zeros, s.D, s.M).template run<bfloat16>(s, image, head);
  else
    Pass<float>(zeros, s.D, s.M).template run<float>(s, image, head);
}

}  // namespace
}  // namespace linpix::LINPIX_ISA
