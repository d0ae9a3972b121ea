// Causal linear attention over whole sequences, and its gradient: a block for each head of each sequence.
//
// Goes chunk by chunk as csrc/causal.h does, with a chunk's vectors, its scores and the state in shared memory.
//
// Why it is fast: where the elements are bfloat16, as in training, matrix units multiply. Their operands are sums of two
// bfloat16, so what is rounded away does not show beside the rounding of the results. A warp computes 16 x 16 numbers
// at a time, so it reads an operand once for 16 products. With heads of 32, four or five blocks share a multiprocessor
// of an A100 or H100: while the threads of one wait for one another, the others go on. Float and double, for tests and
// full precision, are multiplied number by number.
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
LINPIX_INLINE float mapped(float x) { return phi(Floats(x)).x; }
LINPIX_INLINE double mapped(double x) { return 0 < x ? x + 1 : natural_exp(x); }

constexpr int C = SEQUENCE_CHUNK;

// The tokens of a chunk: t .. t + count - 1 of a head.
struct Place {
  int64_t head, t;
  int count;

  template <class E>
  LINPIX_INLINE E* token(const Heads& of, int i) const {
    return (E*)of.at + head * of.head + (t + i) * of.token;
  }
};

// The tokens that a block goes through: first .. end - 1 of a head of a sequence.
struct Walk {
  int64_t head, first, end;

  LINPIX_INLINE Place at(int64_t t) const { return {head, t, end - t < C ? (int)(end - t) : C}; }
};

LINPIX_INLINE Walk walk_of(const Sequences& s, int64_t block) {
  const int64_t sequence = block / s.heads;
  return {block % s.heads, s.offsets[sequence], s.offsets[sequence + 1]};
}

// A matrix in shared memory. Its sides are multiples of 16, as matrix units want it; what is beyond `rows` and `columns`
// stays zero. Rows are padded so that, when a warp reads for matrix units, at most two of its numbers share a bank.
template <class R, class E>
struct Shared {
  static constexpr bool ON_MATRIX_UNITS = sizeof(E) == 2;
  static constexpr int UNIT = 16;
  R* at;
  int row;

  LINPIX_INLINE R& operator()(int r, int c) const { return at[r * row + c]; }
  // Places the matrix at `from`; returns where the next one may begin.
  LINPIX_HOST_DEVICE R* place(R* from, int rows, int columns) {
    at = from;
    row = (columns + UNIT - 1) / UNIT * UNIT + (ON_MATRIX_UNITS ? 8 : 1);
    return from + (rows + UNIT - 1) / UNIT * UNIT * row;
  }
};

// A sum over k < depth of a(r, k) b(k, c).
template <class A, class B>
struct Term {
  int depth;
  A a;
  B b;
};

template <class A, class B>
LINPIX_INLINE Term<A, B> term(int depth, A a, B b) {
  return {depth, a, b};
}

// A lane's part of the 16 x 16 numbers of a product that its warp computes, as mma.m16n8k16 has them: rows r and r + 8,
// columns c, c + 1, c + 8 and c + 9. Operands: [0] rounded, [1] the rest.
struct WarpTile {
  int r, c;
  uint32_t a[2][4], b[2][2][2];
  float sum[2][4];

  template <class A, class B>
  LINPIX_INLINE void load(const Term<A, B>& term, int lane, int k) {
    k += lane % 4 * 2;
    const int column = c + lane / 4 - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = r + i % 2 * 8, depth = k + i / 2 * 8, across = column + i % 2 * 8;
      split_pair(term.a(row, depth), term.a(row, depth + 1), a[0][i], a[1][i]);
      split_pair(term.b(depth, across), term.b(depth + 1, across), b[0][i % 2][i / 2], b[1][i % 2][i / 2]);
    }
  }
};

// Calls write(r, c, sum of the terms) for all r and c, shared among the threads of a block.
template <class R, class E, int BLOCK, class Write, class... Terms>
LINPIX_INLINE void product(Threads<BLOCK>& threads, int rows, int columns, Write write, Terms... terms) {
  constexpr int UNIT = Shared<R, E>::UNIT, WARPS = BLOCK / WARP;
  if constexpr (Shared<R, E>::ON_MATRIX_UNITS) {
    const int across = (columns + UNIT - 1) / UNIT, tiles = (rows + UNIT - 1) / UNIT * across;
    for (int first = 0; first < tiles; first += WARPS) {
      typename Threads<BLOCK>::template Own<WarpTile> own;
      threads.each([&](int i) {
        const int lane = i % WARP, tile = first + i / WARP < tiles ? first + i / WARP : first;  // one too many: any
        own[i].r = tile / across * UNIT + lane / 4;
        own[i].c = tile % across * UNIT + lane % 4 * 2;
#pragma unroll
        for (auto& sums : own[i].sum)
#pragma unroll
          for (float& sum : sums) sum = 0;
      });
      const auto add = [&](const auto& term) {
        for (int k = 0; k < term.depth; k += UNIT) {
          threads.each([&](int i) { own[i].load(term, i % WARP, k); });
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int which = 0; which < 3; ++which)  // the product of the two rests is too small to count
              threads.multiply([&](int i) { return own[i].a[which / 2]; },
                               [&](int i) { return own[i].b[which % 2][n]; },
                               [&](int i) -> float(&)[4] { return own[i].sum[n]; });
        }
      };
      (add(terms), ...);
      threads.each([&](int i) {
        const WarpTile& t = own[i];
        if (first + i / WARP >= tiles) return;
#pragma unroll
        for (int at = 0; at < 8; ++at) {
          const int r = t.r + at / 2 % 2 * 8, c = t.c + at / 4 * 8 + at % 2;
          if (r < rows && c < columns) write(r, c, t.sum[at / 4][at % 4]);
        }
      });
    }
  } else {
    const auto add = [](const auto& term, int r, int c, R& sum) {
      for (int k = 0; k < term.depth; ++k) sum = multiply_add(term.a(r, k), term.b(k, c), sum);
    };
    threads.each([&](int thread) {
      for (int at = thread; at < rows * columns; at += BLOCK) {
        R sum = 0;
        (add(terms, at / columns, at % columns, sum), ...);
        write(at / columns, at % columns, sum);
      }
    });
  }
}

// Calls write(r, sum) for r < count, each sum by PARTS neighbouring lanes: part(r, first) adds up every PARTS-th term from
// `first` on.
constexpr int PARTS = 4;
template <class R, int BLOCK, class Part, class Write>
LINPIX_INLINE void add_up(Threads<BLOCK>& threads, int count, Part part, Write write) {
  for (int first = 0; first < count; first += BLOCK / PARTS) {
    typename Threads<BLOCK>::template Own<R> sum;
    threads.each([&](int i) { sum[i] = first + i / PARTS < count ? part(first + i / PARTS, i % PARTS) : 0; });
    for (int stride = 1; stride < PARTS; stride *= 2)
      threads.add_across(stride, [&](int i) -> R& { return sum[i]; });
    threads.each([&](int i) {
      if (i % PARTS == 0 && first + i / PARTS < count) write(first + i / PARTS, sum[i]);
    });
  }
}

// What forward and backward have in common: a chunk's vectors, its scores, and the state.
template <class R, class E>
struct Causal {
  static constexpr int BLOCK = 128, PER_SM = sizeof(R) == 8 ? 4 : 5;
  using Team = Threads<BLOCK>;

  Shared<R, E> q, k, v, scores, S;  // S: (M, D)
  R* z;                             // (D)

  // Places all of this at `from`; returns where more may begin.
  LINPIX_HOST_DEVICE R* lay_out(R* from, int D, int M) {
    from = q.place(from, C, D);
    from = k.place(from, C, D);
    from = v.place(from, C, M);
    from = scores.place(from, C, C);
    from = S.place(from, M, D);
    z = from;
    return from + D;
  }

  LINPIX_INLINE static void clear(Team& threads, R* from, const R* end) {
    threads.each([&](int thread) {
      for (R* at = from + thread; at < end; at += BLOCK) *at = 0;
    });
    threads.barrier();
  }

  // A chunk's vectors of one kind; zero beyond its tokens.
  LINPIX_INLINE static void read(int thread, const Heads& from, const Place& p, int width, bool map,
                                 const Shared<R, E>& to) {
    constexpr int ROWS = C * WARP / BLOCK;  // of a warp; all of them are requested before the first is used
    for (int d = thread % WARP; d < width; d += WARP) {
      R x[ROWS];
      const int first = thread / WARP * ROWS;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) x[r] = first + r < p.count ? number(p.token<E>(from, first + r)[d]) : 0;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) to(first + r, d) = map && first + r < p.count ? mapped(x[r]) : x[r];
    }
  }

  // to(i, j), for j <= i: row i of a times row j of b, which have `width` columns, and down(i)
  template <class Down>
  LINPIX_INLINE static void score(Team& threads, int width, const Shared<R, E>& a, const Shared<R, E>& b, Down down,
                                  const Shared<R, E>& to) {
    product<R, E>(threads, C, C, [&](int i, int j, R sum) { to(i, j) = j <= i ? sum + down(i) : 0; },
                  term(width, [&](int i, int d) { return a(i, d); }, [&](int d, int j) { return b(j, d); }));
  }

  // S += sum over the chunk's tokens j of a_j b_j^T; z += sum of weight(j) b_j
  template <class Weight>
  LINPIX_INLINE void fold(Team& threads, const Sequences& s, const Shared<R, E>& a, const Shared<R, E>& b,
                          Weight weight) const {
    product<R, E>(threads, s.M, s.D, [&](int m, int d, R sum) { S(m, d) = S(m, d) + sum; },
                  term(C, [&](int m, int j) { return a(j, m); }, [&](int j, int d) { return b(j, d); }));
    add_up<R>(
        threads, s.D,
        [&](int d, int first) {
          R sum = 0;
#pragma unroll
          for (int j = first; j < C; j += PARTS) sum = multiply_add(weight(j), b(j, d), sum);
          return sum;
        },
        [&](int d, R sum) { z[d] = z[d] + sum; });
    threads.barrier();
  }
};

template <class R, class E>
struct CausalForward : Causal<R, E> {
  using typename Causal<R, E>::Team;
  using Causal<R, E>::q, Causal<R, E>::k, Causal<R, E>::v, Causal<R, E>::scores, Causal<R, E>::S, Causal<R, E>::z;
  R* normaliser;  // (C)

  LINPIX_HOST_DEVICE R* lay_out(R* from, int D, int M) {
    normaliser = Causal<R, E>::lay_out(from, D, M);
    return normaliser + C;
  }

  LINPIX_BODY run(Team& threads, const Sequences& s) {
    CausalForward x;
    const R* end = x.lay_out((R*)threads.shared, s.D, s.M);
    const int D = s.D, M = s.M;
    x.clear(threads, (R*)threads.shared, end);
    const Walk walk = walk_of(s, threads.x);
    for (int64_t t = walk.first; t < walk.end; t += C) {
      const Place p = walk.at(t);
      threads.each([&](int thread) {
        x.read(thread, s.q, p, D, true, x.q);
        x.read(thread, s.k, p, D, true, x.k);
        x.read(thread, s.v, p, M, false, x.v);
      });
      threads.barrier();
      x.score(threads, D, x.q, x.k, [](int) { return R(0); }, x.scores);
      threads.barrier();
      add_up<R>(
          threads, p.count,
          [&](int i, int first) {
            R sum = 0;
            for (int j = first; j <= i; j += PARTS) sum = sum + x.scores(i, j);
            for (int d = first; d < D; d += PARTS) sum = multiply_add(x.q(i, d), x.z[d], sum);
            return sum;
          },
          [&](int i, R sum) { *p.token<R>(s.normaliser, i) = x.normaliser[i] = sum + (R)s.eps; });
      threads.barrier();
      product<R, E>(  // one sum over tokens of the chunk and features
          threads, C, M,
          [&](int i, int m, R sum) {
            if (i < p.count) put(p.token<E>(s.y, i) + m, sum / x.normaliser[i]);
          },
          term(C, [&](int i, int j) { return x.scores(i, j); }, [&](int j, int m) { return x.v(j, m); }),
          term(D, [&](int i, int d) { return x.q(i, d); }, [&](int d, int m) { return x.S(m, d); }));
      threads.barrier();
      x.fold(threads, s, x.v, x.k, [](int) { return R(1); });
    }
  }
};

template <class R, class E>
struct CausalBackward : Causal<R, E> {
  using typename Causal<R, E>::Team;
  using Causal<R, E>::q, Causal<R, E>::k, Causal<R, E>::v, Causal<R, E>::scores, Causal<R, E>::S, Causal<R, E>::z;
  Shared<R, E> n, gradients;  // n: the gradient of the numerators
  R* down;                    // (C): that of the normalisers

  LINPIX_HOST_DEVICE R* lay_out(R* from, int D, int M) {
    from = n.place(Causal<R, E>::lay_out(from, D, M), C, M);
    down = gradients.place(from, C, C);
    return down + C;
  }

  LINPIX_BODY run(Team& threads, const Sequences& s) {
    CausalBackward x;
    const R* end = x.lay_out((R*)threads.shared, s.D, s.M);
    x.clear(threads, (R*)threads.shared, end);
    const Walk walk = walk_of(s, threads.x);
    for (int64_t t = walk.first; t < walk.end; t += C) x.queries(threads, s, walk.at(t));
    x.clear(threads, x.S.at, x.z + s.D);
    for (int64_t c = (walk.end - walk.first + C - 1) / C - 1; c >= 0; --c)
      x.keys_and_values(threads, s, walk.at(walk.first + c * C));
  }

 private:
  // Reads a chunk, and computes n and down from its results y and normaliser, and the gradients of its scores.
  LINPIX_INLINE void begin(Team& threads, const Sequences& s, const Place& p) const {
    threads.each([&](int thread) {
      this->read(thread, s.q, p, s.D, true, q);
      this->read(thread, s.k, p, s.D, true, k);
      this->read(thread, s.v, p, s.M, false, v);
      this->read(thread, s.g, p, s.M, false, n);
    });
    threads.barrier();
    add_up<R>(
        threads, C,
        [&](int i, int first) {
          R sum = 0;
          if (i >= p.count) return sum;
          const R normaliser = *p.token<R>(s.normaliser, i);
          const E* y = p.token<E>(s.y, i);
          for (int m = first; m < s.M; m += PARTS) {
            n(i, m) = n(i, m) / normaliser;
            sum = multiply_add(n(i, m), number(y[m]), sum);
          }
          return sum;
        },
        [&](int i, R sum) { down[i] = -sum; });
    threads.barrier();
    this->score(threads, s.M, n, v, [&](int i) { return down[i]; }, gradients);
  }

  // Applies the gradient of the feature map: phi'(x) is 1 where x > 0 (and phi(x) > 1), else phi(x).
  static LINPIX_INLINE void write(const Heads& to, const Place& p, int i, int d, R mapped, R gradient) {
    if (i < p.count) put(p.token<E>(to, i) + d, gradient * (mapped < 1 ? mapped : 1));
  }

  // Equation 13, from the first chunk to the last. S and z: the state before the chunk.
  LINPIX_INLINE void queries(Team& threads, const Sequences& s, const Place& p) const {
    begin(threads, s, p);
    threads.barrier();
    product<R, E>(
        threads, C, s.D,
        [&](int i, int d, R sum) { write(s.dq, p, i, d, q(i, d), multiply_add(down[i], z[d], sum)); },
        term(C, [&](int i, int j) { return gradients(i, j); }, [&](int j, int d) { return k(j, d); }),
        term(s.M, [&](int i, int m) { return n(i, m); }, [&](int m, int d) { return S(m, d); }));
    threads.barrier();
    this->fold(threads, s, v, k, [](int) { return R(1); });
  }

  // Equations 14 and 15, from the last chunk to the first. S (value dim, query dim) and z: sums over later chunks.
  LINPIX_INLINE void keys_and_values(Team& threads, const Sequences& s, const Place& p) const {
    begin(threads, s, p);
    this->score(threads, s.D, q, k, [](int) { return R(0); }, scores);
    threads.barrier();
    product<R, E>(
        threads, C, s.D, [&](int j, int d, R sum) { write(s.dk, p, j, d, k(j, d), sum + z[d]); },
        term(C, [&](int j, int i) { return gradients(i, j); }, [&](int i, int d) { return q(i, d); }),
        term(s.M, [&](int j, int m) { return v(j, m); }, [&](int m, int d) { return S(m, d); }));
    product<R, E>(
        threads, C, s.M,
        [&](int j, int m, R sum) {
          if (j < p.count) put(p.token<E>(s.dv, j) + m, sum);
        },
        term(C, [&](int j, int i) { return scores(i, j); }, [&](int i, int m) { return n(i, m); }),
        term(s.D, [&](int j, int d) { return k(j, d); }, [&](int d, int m) { return S(m, d); }));
    threads.barrier();
    this->fold(threads, s, n, q, [&](int i) { return down[i]; });
  }
};

}  // namespace linpix::LINPIX_ISA
