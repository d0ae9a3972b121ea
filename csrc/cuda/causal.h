// Causal linear attention over whole sequences, and its gradient: a block for each head of each sequence.
//
// Goes chunk by chunk as csrc/causal.h does, with a chunk's vectors in shared memory. A warp computes 16 rows and half
// of the columns of a result: first scores, 16 x 16 at a time, then what they multiply. The state stays in registers,
// and is copied to shared memory.
//
// Why it is fast: where the elements are bfloat16, as in training, matrix units multiply. Their operands are sums of
// two bfloat16, so what is rounded away does not show beside the rounding of the results. A number is split once, when
// it is written to shared memory; values and incoming gradients are bfloat16 already. Scores go from product to product
// in registers. The compiler knows all sizes, so products have no loops. With heads of 32, four or five blocks share a
// multiprocessor of an A100 or H100: while the threads of one wait for one another, the others go on. Float and double,
// for tests and full precision, are multiplied number by number.
#pragma once

#include "../functions.h"
#include "../sequence.h"
#include "threads.h"

namespace linpix::LINPIX_ISA {

LINPIX_INLINE float number(float x) { return x; }
LINPIX_INLINE double number(double x) { return x; }
LINPIX_INLINE float number(bfloat16 x) { return to_float(x); }
LINPIX_INLINE void put(float* to, float x) { *to = x; }
LINPIX_INLINE void put(double* to, double x) { *to = x; }
LINPIX_INLINE void put(bfloat16* to, float x) { *to = rounded(x); }
LINPIX_INLINE double multiply_add(double a, double b, double c) { return a * b + c; }

// e^x for x of at most 0, and 1 / x, as exact as elements of the first type need them
LINPIX_INLINE float power(bfloat16, float x) { return fast_exp(x).x; }
LINPIX_INLINE float power(float, float x) { return exp(Floats(x)).x; }
LINPIX_INLINE double power(double, double x) { return natural_exp(x); }
LINPIX_INLINE float inverse(bfloat16, float x) { return reciprocal(x).x; }
LINPIX_INLINE float inverse(float, float x) { return 1 / x; }
LINPIX_INLINE double inverse(double, double x) { return 1 / x; }

constexpr int C = SEQUENCE_CHUNK, UNIT = 16;  // UNIT: rows or columns of an operand of matrix units

template <class E>
constexpr bool ON_MATRIX_UNITS = sizeof(E) == 2;

// Eight neighbouring numbers of a token, as they lie in memory.
template <class E>
struct Eight {
  E x[8];

  LINPIX_INLINE E operator[](int e) const { return x[e]; }
  LINPIX_INLINE void set(int e, E first, E second) { x[e] = first, x[e + 1] = second; }
};
template <>
struct Eight<bfloat16> {
  Chunk x;

  LINPIX_INLINE float operator[](int e) const {
    return float_of(e % 2 ? x.word[e / 2] & 0xffff0000 : x.word[e / 2] << 16);
  }
  LINPIX_INLINE void set(int e, float first, float second) { x.word[e / 2] = rounded_pair(first, second); }
};

// A matrix in shared memory. As bfloat16, a number is the sum of those in two planes, the rounded ones and the rests;
// in one plane it is a bfloat16. Rows are padded so that the eight that matrix units read lie in different banks. A
// matrix of one row has this row everywhere. TURNED: as the transpose of what lies there, but for `at` and `set`.
template <class E, int PLANES_, int ROWS, int COLUMNS, bool TURNED_ = false>
struct Matrix {
  static constexpr int PLANES = ON_MATRIX_UNITS<E> ? PLANES_ : 1;
  static constexpr bool TURNED = TURNED_;
  alignas(16) E plane[PLANES][ROWS][COLUMNS + 8];

  LINPIX_INLINE const auto& turned() const { return (const Matrix<E, PLANES_, ROWS, COLUMNS, !TURNED>&)*this; }
  LINPIX_INLINE E* at(int p, int r, int c) const { return (E*)&plane[p][ROWS == 1 ? 0 : r][c]; }
  LINPIX_INLINE auto operator()(int r, int c) const {
    auto sum = number(*at(0, TURNED ? c : r, TURNED ? r : c));
    if constexpr (PLANES == 2) sum = sum + number(*at(1, TURNED ? c : r, TURNED ? r : c));
    return sum;
  }
  template <class R>
  LINPIX_INLINE void set(int r, int c, R x) const {
    put(at(0, r, c), x);
    if constexpr (PLANES == 2) put(at(1, r, c), x - number(*at(0, r, c)));
  }
  template <class R>
  LINPIX_INLINE void set(int r, int c, R x, R y) const {  // (r, c) and (r, c + 1)
    if constexpr (PLANES == 2)
      split_pair(x, y, *(uint32_t*)at(0, r, c), *(uint32_t*)at(1, r, c));
    else
      set(r, c, x), set(r, c + 1, y);
  }
  // value(x) for each x of eight; in one plane, these must be bfloat16
  template <class Value>
  LINPIX_INLINE void set(int r, int c, const Eight<E>& eight, Value value) const {
    Eight<E> first, rest;
#pragma unroll
    for (int e = 0; e < 8; e += 2)
      if constexpr (PLANES == 2)
        split_pair(value(eight[e]), value(eight[e + 1]), first.x.word[e / 2], rest.x.word[e / 2]);
      else
        first.set(e, value(eight[e]), value(eight[e + 1]));
    *(Eight<E>*)at(0, r, c) = first;
    if constexpr (PLANES == 2) *(Eight<E>*)at(1, r, c) = rest;
  }
};

// A lane's part of 16 x 16 numbers, as operands of mma.m16n8k16 have them.
template <int PLANES_>
struct Operand {
  static constexpr int PLANES = PLANES_;
  uint32_t plane[PLANES][4];
};

// A lane's part of 16 rows of sums, of N times 8 columns, as results of mma.m16n8k16 have them.
template <class R, int N>
struct Sums {
  R tile[N][4];
};

enum class Pass { forward, queries, keys_and_values };

// Heads of at most SIZE; what is beyond their own sizes is zero.
template <class R, class E, int SIZE, bool BACKWARD>
struct Causal {
  static constexpr int BLOCK = 128, PER_SM = sizeof(R) == 8 ? 2 : (SIZE == 32 ? 5 : 3) - BACKWARD;
  static constexpr int TILES = SIZE / 16, LANES_OF_TOKEN = BLOCK / C;
  template <class T>
  using Own = typename Threads<BLOCK>::template Own<T>;

  struct Shared {
    Matrix<E, 2, C, SIZE> q, k;
    Matrix<E, 1, C, SIZE> v, g;
    Matrix<E, 2, SIZE, SIZE> S;  // (M, D)
    Matrix<E, 2, 1, SIZE> z;
    Matrix<E, 1, 1, C> ones;
    R down[C], scale[C];         // of a token: the gradient of its normaliser, times it; 1 / normaliser
    Matrix<E, 2, 1, C> weights;  // down, as an operand
    Matrix<E, 1, ON_MATRIX_UNITS<E> ? 1 : BLOCK / WARP * UNIT, UNIT> scores;  // of each warp, if not in registers
  };

  Threads<BLOCK>& threads;
  const Sequences& s;
  Shared& m;
  int64_t head, first, end;  // of tokens first .. end - 1
  int64_t t;                 // of the chunk: tokens t .. t + count - 1
  int count;
  int warp, row, column;                // what a warp computes begins in this row of a chunk, and column of a head
  Own<Sums<R, TILES>> S[SIZE / 32], z;  // a warp has a quarter of S, and half of z in each row of the sums

  LINPIX_INLINE Causal(Threads<BLOCK>& threads, const Sequences& s)
      : threads(threads), s(s), m(*(Shared*)threads.shared), head(threads.x % s.heads),
        first(s.offsets[threads.x / s.heads]), end(s.offsets[threads.x / s.heads + 1]) {
    threads.each([&](int i) { warp = i / WARP, row = warp % 2 * UNIT, column = warp / 2 * (SIZE / 2); });
  }

  LINPIX_BODY run(Threads<BLOCK>& threads, const Sequences& s) {
    Causal causal(threads, s);
    BACKWARD ? causal.backward() : causal.forward();
  }

  LINPIX_INLINE void move(int64_t to) {
    t = to;
    count = end - t < C ? (int)(end - t) : C;
  }
  // 32 bits of a token's number: of 64, the compiler keeps an address in each tensor from chunk to chunk, and spills.
  template <class T>
  LINPIX_INLINE T* token(const Heads& of, int i) const {
    return (T*)of.at + head * of.head + (uint32_t)(t + i) * of.token;
  }

  // Calls f(r, c, x, y) for all pairs of sums x and y, in row r and columns c and c + 1.
  template <int N, class F>
  LINPIX_INLINE void pairs(Own<Sums<R, N>>& sums, F f) {
    threads.each([&](int i) {
#pragma unroll
      for (int at = 0; at < 2 * N; ++at) {
        R* x = &sums[i].tile[at / 2][at % 2 * 2];
        f(i % WARP / 4 + at % 2 * 8, i % 4 * 2 + at / 2 * 8, x[0], x[1]);
      }
    });
  }
  template <int N>
  LINPIX_INLINE void fill(Own<Sums<R, N>>& sums, R with) {
    pairs(sums, [&](int, int, R& x, R& y) { x = y = with; });
  }

  // 16 x 16 numbers, the left operand of a product or the right one. edge: their first row, or column; k: where they
  // begin along the sum.
  template <bool LEFT, class M>
  LINPIX_INLINE void load(const M& from, int edge, int k, Own<Operand<M::PLANES>>& to) {
    constexpr bool ALONG = LEFT == M::TURNED;  // rows in memory lie along the sum
#pragma unroll
    for (int plane = 0; plane < M::PLANES; ++plane)
      threads.template matrices<ALONG>([&](int i) { return to[i].plane[plane]; }, [&](int i) {
        const int lane = i % WARP, r = M::TURNED ? lane % 8 + lane / 16 * 8 : lane % 16;
        const int c = M::TURNED ? lane / 8 % 2 * 8 : lane / 16 * 8;
        return from.at(plane, r + (ALONG ? k : edge), c + (ALONG ? edge : k));
      });
  }

  // sums += left x right: 16 rows, columns of the right one from `across` on, and 16 terms from k on
  template <class L, class M, int N>
  LINPIX_INLINE void add_unit(Own<L>& left, const M& right, int across, int k, Own<Sums<R, N>>& sums) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      Own<Operand<M::PLANES>> two;
      load<false>(right, across + n * 8, k, two);
#pragma unroll
      for (int which = 0; which < L::PLANES * M::PLANES && which < 3; ++which)  // rest times rest is too small to count
#pragma unroll
        for (int tile = 0; tile < 2 && n + tile < N; ++tile)
          threads.multiply([&](int i) { return left[i].plane[which / M::PLANES]; },
                           [&](int i) { return two[i].plane[which % M::PLANES] + 2 * tile; },
                           [&](int i) -> float(&)[4] { return sums[i].tile[n + tile]; });
    }
  }

  // The same number by number, of `depth` terms.
  template <class A, class B, int N>
  LINPIX_INLINE void add_numbers(int depth, const A& a, int above, const B& b, int across, int k,
                                 Own<Sums<R, N>>& sums) {
    pairs(sums, [&](int r, int c, R& x, R& y) {
#pragma unroll 1
      for (int at = 0; at < depth; ++at) {
        x = multiply_add(a(above + r, at), b(k + at, across + c), x);
        y = multiply_add(a(above + r, at), b(k + at, across + c + 1), y);
      }
    });
  }

  // sums += a x b: rows of a from `above` on, and columns of b from `across` on
  template <int DEPTH, class A, class B, int N>
  LINPIX_INLINE void add(const A& a, int above, const B& b, int across, Own<Sums<R, N>>& sums) {
    if constexpr (ON_MATRIX_UNITS<E>) {
#pragma unroll
      for (int k = 0; k < DEPTH; k += UNIT) {
        Own<Operand<A::PLANES>> left;
        load<true>(a, above, k, left);
        add_unit(left, b, across, k, sums);
      }
    } else {
      add_numbers(DEPTH, a, above, b, across, 0, sums);
    }
  }

  // Calls use(scores, first j) for 16 x 16 scores at a time: start(i, j) + row i of a times column j of b, for j <= i
  // or, if LATER, j >= i.
  template <bool LATER, class A, class B, class Start, class Use>
  LINPIX_INLINE void score(const A& a, const B& b, Start start, Use use) {
#pragma unroll
    for (int first = 0; first < C; first += UNIT) {
      if (!threads.some_warp([&](int) { return LATER ? row <= first : first <= row; })) continue;
      Own<Sums<R, 2>> sums;
      pairs(sums, [&](int r, int c, R& x, R& y) { x = start(row + r, first + c), y = start(row + r, first + c + 1); });
      add<SIZE>(a, row, b, first, sums);
      pairs(sums, [&](int r, int c, R& x, R& y) {
        const int distance = first + c - row - r;
        if (LATER ? distance < 0 : distance > 0) x = 0;
        if (LATER ? distance < -1 : distance > -1) y = 0;
      });
      Own<Operand<2>> scores;
      keep(sums, scores);
      use(scores, first);
    }
  }

  // Makes scores the left operand of the next product: registers of results are those of operands.
  LINPIX_INLINE void keep(Own<Sums<R, 2>>& sums, Own<Operand<2>>& scores) {
    if constexpr (ON_MATRIX_UNITS<E>) {
      threads.each([&](int i) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float* x = &sums[i].tile[w / 2][w % 2 * 2];
          split_pair(x[0], x[1], scores[i].plane[0][w], scores[i].plane[1][w]);
        }
      });
    } else {
      threads.warp_barrier();
      pairs(sums, [&](int r, int c, R& x, R& y) { m.scores.set(warp * UNIT + r, c, x, y); });
      threads.warp_barrier();
    }
  }

  // sums += scores x b: rows of b from `first` on, and columns from `across` on
  template <class B, int N>
  LINPIX_INLINE void apply(Own<Operand<2>>& scores, const B& b, int across, int first, Own<Sums<R, N>>& sums) {
    if constexpr (ON_MATRIX_UNITS<E>)
      add_unit(scores, b, across, first, sums);
    else
      add_numbers(UNIT, m.scores, warp * UNIT, b, across, first, sums);
  }

  // Eight numbers of token i of the chunk, from d on; `beyond` where its vector, or the chunk, has ended
  LINPIX_INLINE Eight<E> eight(const Heads& from, int i, int d, int width, R beyond) const {
    const int left = i < count ? width - d : 0;
    const E* at = token<E>(from, i) + d;
    if (left >= 8 && (uintptr_t)at % sizeof(Chunk) == 0) return *(const Eight<E>*)at;
    Eight<E> found;
#pragma unroll
    for (int e = 0; e < 8; e += 2)
      found.set(e, e < left ? number(at[e]) : beyond, e + 1 < left ? number(at[e + 1]) : beyond);
    return found;
  }

  LINPIX_INLINE void read(Pass pass) {
    const auto same = [](R x) { return x; };
    const auto mapped = [](R x) { return 0 < x ? x + 1 : power(E(), x); };
    const R none = float_of(0xff800000);  // -infinity, which is mapped to 0 or next to nothing
    Own<R> down, scale;
    threads.each([&](int thread) {
      const int i = thread / LANES_OF_TOKEN;
      down[thread] = scale[thread] = 0;
      if (pass != Pass::forward && i < count) scale[thread] = inverse(E(), *token<R>(s.normaliser, i));
#pragma unroll
      for (int part = 0; part < SIZE / (8 * LANES_OF_TOKEN); ++part) {
        const int d = (part * LANES_OF_TOKEN + thread % LANES_OF_TOKEN) * 8;
        const Eight<E> q = eight(s.q, i, d, s.D, none), k = eight(s.k, i, d, s.D, none), v = eight(s.v, i, d, s.M, 0);
        if (pass != Pass::forward) {
          const Eight<E> g = eight(s.g, i, d, s.M, 0), y = eight(s.y, i, d, s.M, 0);
          m.g.set(i, d, g, same);
#pragma unroll
          for (int e = 0; e < 8; ++e) down[thread] = multiply_add(-g[e], (R)y[e], down[thread]);
        }
        m.q.set(i, d, q, [&](R x) { return pass == Pass::keys_and_values ? mapped(x) * scale[thread] : mapped(x); });
        m.k.set(i, d, k, mapped);
        m.v.set(i, d, v, same);
      }
    });
    if (pass != Pass::forward) {
      for (int stride = 1; stride < LANES_OF_TOKEN; stride *= 2)
        threads.add_across(stride, [&](int thread) -> R& { return down[thread]; });
      threads.each([&](int thread) {
        if (thread % LANES_OF_TOKEN) return;
        const int i = thread / LANES_OF_TOKEN;
        m.down[i] = down[thread], m.scale[i] = scale[thread];
        m.weights.set(0, i, down[thread]);
      });
    }
    threads.barrier();
  }

  // Writes value(i, d, sum) for each sum, of token i of the chunk.
  template <class Value>
  LINPIX_INLINE void write(const Heads& to, int width, Own<Sums<R, TILES>>& sums, Value value) {
    pairs(sums, [&](int r, int c, R x, R y) {
      const int i = row + r, d = column + c;
      if (i >= count) return;
      E* at = token<E>(to, i) + d;
      if (d < width) put(at, value(i, d, x));
      if (d + 1 < width) put(at + 1, value(i, d + 1, y));
    });
  }
  // phi'(x) is 1 where x > 0 (and phi(x) > 1), else phi(x).
  LINPIX_INLINE static R slope(R mapped) { return mapped < 1 ? mapped : 1; }

  // S += sum over the chunk's tokens j of a_j b_j^T; z += sum of weight_j b_j
  template <class A, class B, class W>
  LINPIX_INLINE void fold(const A& a, const B& b, const W& weights) {
#pragma unroll
    for (int n = 0; n < SIZE / 32; ++n) add<C>(a.turned(), row * (SIZE / 32) + n * UNIT, b, column, S[n]);
    if (threads.some_warp([&](int) { return row == 0; })) add<C>(weights, 0, b, column, z);
    threads.barrier();
    copy();
  }

  LINPIX_INLINE void copy() {
#pragma unroll
    for (int n = 0; n < SIZE / 32; ++n)
      pairs(S[n], [&](int r, int c, R x, R y) { m.S.set(row * (SIZE / 32) + n * UNIT + r, column + c, x, y); });
    pairs(z, [&](int r, int c, R x, R y) {
      if (row + r == 0) m.z.set(0, column + c, x, y);
    });
  }

  LINPIX_INLINE void clear() {
#pragma unroll
    for (auto& part : S) fill(part, R(0));
    fill(z, R(0));
    copy();
    threads.each([&](int i) {
      if (i < C) m.ones.set(0, i, R(1));
    });
  }

  LINPIX_INLINE void forward() {
    clear();
    for (move(first); t < end; move(t + C)) {
      read(Pass::forward);
      Own<Sums<R, TILES>> y;  // one sum over tokens of the chunk and features
      Own<Sums<R, 1>> normaliser;
      fill(y, R(0));
      fill(normaliser, (R)s.eps);
      score<false>(m.q, m.k.turned(), [](int, int) { return R(0); }, [&](Own<Operand<2>>& scores, int j) {
        apply(scores, m.v, column, j, y);
        apply(scores, m.ones, 0, j, normaliser);
      });
      add<SIZE>(m.q, row, m.S.turned(), column, y);
      add<SIZE>(m.q, row, m.z.turned(), 0, normaliser);
      pairs(normaliser, [&](int r, int c, R& x, R&) {
        if (column + c == 0 && row + r < count) *token<R>(s.normaliser, row + r) = x;
        x = inverse(E(), x);
      });
      threads.each([&](int i) {
#pragma unroll
        for (int at = 0; at < TILES * 4; ++at) y[i].tile[at / 4][at % 4] *= normaliser[i].tile[0][at % 4 / 2 * 2];
      });
      write(s.y, s.M, y, [](int, int, R x) { return x; });
      fold(m.v, m.k, m.ones);
    }
  }

  // Equation 13, from the first chunk to the last. S and z: the state before the chunk.
  LINPIX_INLINE void queries() {
    read(Pass::queries);
    Own<Sums<R, TILES>> dq;  // times normalisers, until it is written
    pairs(dq, [&](int r, int c, R& x, R& y) {
      x = m.down[row + r] * m.z(0, column + c), y = m.down[row + r] * m.z(0, column + c + 1);
    });
    score<false>(m.g, m.v.turned(), [&](int i, int) { return m.down[i]; },
                 [&](Own<Operand<2>>& gradients, int j) { apply(gradients, m.k, column, j, dq); });
    add<SIZE>(m.g, row, m.S, column, dq);
    write(s.dq, s.D, dq, [&](int i, int d, R x) { return x * m.scale[i] * slope(m.q(i, d)); });
    fold(m.v, m.k, m.ones);
  }

  // Equations 14 and 15, from the last chunk to the first. S (value dim, query dim) and z: sums over later chunks.
  // Queries are divided by their normalisers, not the gradients of results, which so stay bfloat16.
  LINPIX_INLINE void keys_and_values() {
    read(Pass::keys_and_values);
    Own<Sums<R, TILES>> dk, dv;
    pairs(dk, [&](int, int c, R& x, R& y) { x = m.z(0, column + c), y = m.z(0, column + c + 1); });
    score<true>(m.v, m.g.turned(), [&](int, int i) { return m.down[i]; },
                [&](Own<Operand<2>>& gradients, int i) { apply(gradients, m.q, column, i, dk); });
    add<SIZE>(m.v, row, m.S, column, dk);
    write(s.dk, s.D, dk, [&](int j, int d, R x) { return x * slope(m.k(j, d)); });
    fill(dv, R(0));
    score<true>(m.k, m.q.turned(), [](int, int) { return R(0); },
                [&](Own<Operand<2>>& scores, int i) { apply(scores, m.g, column, i, dv); });
    add<SIZE>(m.k, row, m.S.turned(), column, dv);
    write(s.dv, s.M, dv, [](int, int, R x) { return x; });
    fold(m.g, m.q, m.weights);
  }

  LINPIX_INLINE void backward() {
    clear();
    for (move(first); t < end; move(t + C)) queries();
    clear();
    for (move(first + (end - first - 1) / C * C); t >= first; move(t - C)) keys_and_values();
  }
};

}  // namespace linpix::LINPIX_ISA
