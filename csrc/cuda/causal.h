// Causal linear attention over whole sequences, and its gradient: a block for each head of each sequence.
//
// Goes chunk by chunk as csrc/causal.h does, with a chunk's vectors, its scores and the state in shared memory.
//
// Why it is fast: a thread computes four rows of a product at a time, in two columns, so it reads six numbers for eight
// products. Threads of a warp have neighbouring columns of the same rows, so the rows are read from shared memory once
// for all of them. While the threads of one block wait for one another, those of five others on the same multiprocessor
// go on.
#pragma once

#include "../functions.h"
#include "../sequence.h"
#include "threads.h"

namespace linpix::LINPIX_ISA {

LINPIX_INLINE float number(float x) { return x; }
LINPIX_INLINE double number(double x) { return x; }
LINPIX_INLINE float number(bfloat16 x) { return widened(x); }
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

// A matrix in shared memory. Rows have an odd length, so that numbers of one column lie in different banks.
template <class R>
struct Shared {
  R* at;
  int row;

  LINPIX_INLINE R& operator()(int r, int c) const { return at[r * row + c]; }
  // Places the matrix at `from`; returns where the next one may begin.
  LINPIX_HOST_DEVICE R* place(R* from, int rows, int columns) {
    at = from;
    row = columns | 1;
    return from + rows * row;
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

// The numbers of a product that a thread computes, in rows r[i] and columns c[j].
template <class R>
struct Tile {
  static constexpr int ROWS = 4, COLUMNS = 2;
  int r[ROWS], c[COLUMNS];
  R sum[ROWS][COLUMNS];

  template <class A, class B>
  LINPIX_INLINE void add(const Term<A, B>& term) {
#pragma unroll 4
    for (int k = 0; k < term.depth; ++k) {
      R left[ROWS], right[COLUMNS];
      for (int i = 0; i < ROWS; ++i) left[i] = term.a(r[i], k);
      for (int j = 0; j < COLUMNS; ++j) right[j] = term.b(k, c[j]);
      for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < COLUMNS; ++j) sum[i][j] = multiply_add(left[i], right[j], sum[i][j]);
    }
  }
};

// Calls write(r, c, sum of the terms) for all r and c, shared among the threads of a block.
template <int BLOCK, class R, class Write, class... Terms>
LINPIX_INLINE void product(int thread, int rows, int columns, Write write, Terms... terms) {
  using T = Tile<R>;
  const int across = (columns + T::COLUMNS - 1) / T::COLUMNS, down = (rows + T::ROWS - 1) / T::ROWS;
  for (int at = thread; at < down * across; at += BLOCK) {
    const int r = at / across * T::ROWS, c = at % across;
    T tile{};
    for (int i = 0; i < T::ROWS; ++i) tile.r[i] = r + i < rows ? r + i : rows - 1;
    for (int j = 0; j < T::COLUMNS; ++j) tile.c[j] = c + j * across < columns ? c + j * across : columns - 1;
    (tile.add(terms), ...);
    for (int i = 0; i < T::ROWS; ++i)
      for (int j = 0; j < T::COLUMNS; ++j)
        if (r + i < rows && c + j * across < columns) write(r + i, c + j * across, tile.sum[i][j]);
  }
}

template <class R, class E, int BLOCK>
LINPIX_INLINE void read(int thread, const Heads& from, const Place& p, int width, bool map, const Shared<R>& to) {
  for (int i = thread; i < C * width; i += BLOCK) {
    const int r = i / width, d = i % width;
    const R x = r < p.count ? number(p.token<E>(from, r)[d]) : 0;
    to(r, d) = map && r < p.count ? mapped(x) : x;
  }
}

template <class R, class E>
struct CausalForward {
  static constexpr int BLOCK = 128, PER_SM = sizeof(R) == 8 ? 4 : 6;

  Shared<R> q, k, v, scores, S;  // S: (D, M)
  R *z, *normaliser;

  LINPIX_HOST_DEVICE R* lay_out(R* from, int D, int M) {
    from = q.place(from, C, D);
    from = k.place(from, C, D);
    from = v.place(from, C, M);
    from = scores.place(from, C, C);
    from = S.place(from, D, M);
    z = from;
    normaliser = z + D;
    return normaliser + C;
  }
  static int bytes(const Sequences& s) {
    CausalForward pass;
    return (int)((pass.lay_out(nullptr, s.D, s.M) - (R*)nullptr) * sizeof(R));
  }

  LINPIX_BODY run(Threads<BLOCK>& threads, const Sequences& s) {
    CausalForward x;
    x.lay_out((R*)threads.shared, s.D, s.M);
    const int D = s.D, M = s.M;
    threads.follow();
    threads.each([&](int thread) {
      for (int i = thread; i < D * x.S.row; i += BLOCK) x.S.at[i] = 0;
      for (int d = thread; d < D; d += BLOCK) x.z[d] = 0;
    });
    threads.barrier();
    const Walk walk = walk_of(s, threads.x);
    for (int64_t t = walk.first; t < walk.end; t += C) {
      const Place p = walk.at(t);
      threads.each([&](int thread) {
        read<R, E, BLOCK>(thread, s.q, p, D, true, x.q);
        read<R, E, BLOCK>(thread, s.k, p, D, true, x.k);
        read<R, E, BLOCK>(thread, s.v, p, M, false, x.v);
      });
      threads.barrier();
      threads.each([&](int thread) {
        product<BLOCK, R>(thread, C, C, [&](int i, int j, R sum) { x.scores(i, j) = j <= i ? sum : 0; },
                          term(D, [&](int i, int d) { return x.q(i, d); }, [&](int d, int j) { return x.k(j, d); }));
      });
      threads.barrier();
      threads.each([&](int i) {
        if (i >= p.count) return;
        R sum = 0;
        for (int j = 0; j <= i; ++j) sum = sum + x.scores(i, j);
        for (int d = 0; d < D; ++d) sum = multiply_add(x.q(i, d), x.z[d], sum);
        x.normaliser[i] = sum + (R)s.eps;
        *p.token<R>(s.normaliser, i) = x.normaliser[i];
      });
      threads.barrier();
      threads.each([&](int thread) {  // one sum over tokens of the chunk and features
        product<BLOCK, R>(
            thread, C, M,
            [&](int i, int m, R sum) {
              if (i < p.count) put(p.token<E>(s.y, i) + m, sum / x.normaliser[i]);
            },
            term(C, [&](int i, int j) { return x.scores(i, j); }, [&](int j, int m) { return x.v(j, m); }),
            term(D, [&](int i, int d) { return x.q(i, d); }, [&](int d, int m) { return x.S(d, m); }));
      });
      threads.barrier();
      threads.each([&](int thread) {
        product<BLOCK, R>(thread, D, M, [&](int d, int m, R sum) { x.S(d, m) = x.S(d, m) + sum; },
                          term(C, [&](int d, int j) { return x.k(j, d); }, [&](int j, int m) { return x.v(j, m); }));
        for (int d = thread; d < D; d += BLOCK)
          for (int j = 0; j < C; ++j) x.z[d] = x.z[d] + x.k(j, d);
      });
      threads.barrier();
    }
  }
};

template <class R, class E>
struct CausalBackward {
  static constexpr int BLOCK = 128, PER_SM = sizeof(R) == 8 ? 4 : 6;

  // n: the gradient of the numerators, with that of the normaliser as column M; v: column M is 1; as in csrc/causal.h
  Shared<R> q, k, v, n, scores, gradients, S;  // S: (M + 1, D)

  LINPIX_HOST_DEVICE R* lay_out(R* from, int D, int M) {
    from = q.place(from, C, D);
    from = k.place(from, C, D);
    from = v.place(from, C, M + 1);
    from = n.place(from, C, M + 1);
    from = scores.place(from, C, C);
    from = gradients.place(from, C, C);
    return S.place(from, M + 1, D);
  }
  static int bytes(const Sequences& s) {
    CausalBackward pass;
    return (int)((pass.lay_out(nullptr, s.D, s.M) - (R*)nullptr) * sizeof(R));
  }

  LINPIX_BODY run(Threads<BLOCK>& threads, const Sequences& s) {
    CausalBackward x;
    x.lay_out((R*)threads.shared, s.D, s.M);
    threads.follow();
    x.clear(threads, s);
    const Walk walk = walk_of(s, threads.x);
    for (int64_t t = walk.first; t < walk.end; t += C) x.queries(threads, s, walk.at(t));
    x.clear(threads, s);
    for (int64_t c = (walk.end - walk.first + C - 1) / C - 1; c >= 0; --c)
      x.keys_and_values(threads, s, walk.at(walk.first + c * C));
  }

 private:
  LINPIX_INLINE void clear(Threads<BLOCK>& threads, const Sequences& s) const {
    threads.each([&](int thread) {
      for (int i = thread; i < (s.M + 1) * S.row; i += BLOCK) S.at[i] = 0;
    });
    threads.barrier();
  }

  // Reads a chunk, and computes n from its results y and normaliser; ends with a barrier.
  LINPIX_INLINE void begin(Threads<BLOCK>& threads, const Sequences& s, const Place& p) const {
    threads.each([&](int thread) {
      read<R, E, BLOCK>(thread, s.q, p, s.D, true, q);
      read<R, E, BLOCK>(thread, s.k, p, s.D, true, k);
      read<R, E, BLOCK>(thread, s.v, p, s.M, false, v);
      read<R, E, BLOCK>(thread, s.g, p, s.M, false, n);
    });
    threads.barrier();
    threads.each([&](int i) {
      if (i >= C) return;
      v(i, s.M) = i < p.count ? 1 : 0;
      n(i, s.M) = 0;
      if (i >= p.count) return;
      const R normaliser = *p.token<R>(s.normaliser, i);
      const E* y = p.token<E>(s.y, i);
      R down = 0;
      for (int m = 0; m < s.M; ++m) {
        down = multiply_add(n(i, m), number(y[m]), down);
        n(i, m) = n(i, m) / normaliser;
      }
      n(i, s.M) = -down / normaliser;
    });
    threads.barrier();
  }

  // gradients(i, j), for j <= i: row i of n times row j of v
  LINPIX_INLINE void fill_gradients(int thread, const Sequences& s) const {
    product<BLOCK, R>(thread, C, C, [&](int i, int j, R sum) { gradients(i, j) = j <= i ? sum : 0; },
                      term(s.M + 1, [&](int i, int m) { return n(i, m); }, [&](int m, int j) { return v(j, m); }));
  }

  // Applies the gradient of the feature map: phi'(x) is 1 where x > 0 (and phi(x) > 1), else phi(x).
  static LINPIX_INLINE void write(const Heads& to, const Place& p, int i, int d, R mapped, R gradient) {
    if (i < p.count) put(p.token<E>(to, i) + d, gradient * (mapped < 1 ? mapped : 1));
  }

  // Equation 13, from the first chunk to the last. S (column of v, key dim): the state before the chunk.
  LINPIX_INLINE void queries(Threads<BLOCK>& threads, const Sequences& s, const Place& p) const {
    const int D = s.D, M = s.M;
    begin(threads, s, p);
    threads.each([&](int thread) { fill_gradients(thread, s); });
    threads.barrier();
    threads.each([&](int thread) {
      product<BLOCK, R>(
          thread, C, D, [&](int i, int d, R sum) { write(s.dq, p, i, d, q(i, d), sum); },
          term(C, [&](int i, int j) { return gradients(i, j); }, [&](int j, int d) { return k(j, d); }),
          term(M + 1, [&](int i, int m) { return n(i, m); }, [&](int m, int d) { return S(m, d); }));
    });
    threads.barrier();
    threads.each([&](int thread) {
      product<BLOCK, R>(thread, M + 1, D, [&](int m, int d, R sum) { S(m, d) = S(m, d) + sum; },
                        term(C, [&](int m, int j) { return v(j, m); }, [&](int j, int d) { return k(j, d); }));
    });
    threads.barrier();
  }

  // Equations 14 and 15, from the last chunk to the first. S (column of n, query dim): sums over later chunks.
  LINPIX_INLINE void keys_and_values(Threads<BLOCK>& threads, const Sequences& s, const Place& p) const {
    const int D = s.D, M = s.M;
    begin(threads, s, p);
    threads.each([&](int thread) {
      fill_gradients(thread, s);
      product<BLOCK, R>(thread, C, C, [&](int i, int j, R sum) { scores(i, j) = j <= i ? sum : 0; },
                        term(D, [&](int i, int d) { return q(i, d); }, [&](int d, int j) { return k(j, d); }));
    });
    threads.barrier();
    threads.each([&](int thread) {
      product<BLOCK, R>(
          thread, C, D, [&](int j, int d, R sum) { write(s.dk, p, j, d, k(j, d), sum); },
          term(C, [&](int j, int i) { return gradients(i, j); }, [&](int i, int d) { return q(i, d); }),
          term(M + 1, [&](int j, int m) { return v(j, m); }, [&](int m, int d) { return S(m, d); }));
      product<BLOCK, R>(
          thread, C, M,
          [&](int j, int m, R sum) {
            if (j < p.count) put(p.token<E>(s.dv, j) + m, sum);
          },
          term(C, [&](int j, int i) { return scores(i, j); }, [&](int i, int m) { return n(i, m); }),
          term(D, [&](int j, int d) { return k(j, d); }, [&](int d, int m) { return S(m, d); }));
    });
    threads.barrier();
    threads.each([&](int thread) {
      product<BLOCK, R>(thread, M + 1, D, [&](int m, int d, R sum) { S(m, d) = S(m, d) + sum; },
                        term(C, [&](int m, int i) { return n(i, m); }, [&](int i, int d) { return q(i, d); }));
    });
    threads.barrier();
  }
};

}  // namespace linpix::LINPIX_ISA
