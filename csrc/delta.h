// The gated delta rule over whole sequences, and its gradient, one head of one sequence at a time.
//
// A token: S <- e^g S, u = beta (v - k S), S <- S + k^T u, o = q S. Here 32 tokens at once, from the state S before them.
// With Gamma_ij = e^(g_{j+1} + ... + g_i) for j <= i, what token j wrote has faded so much until token i:
//   E_i = v_i - Gamma_i k_i S - sum_{j<i} Gamma_ij (k_i . k_j) u_j,  u_i = beta_i E_i       solved row by row
//   o_i = Gamma_i q_i S + sum_{j<=i} Gamma_ij (q_i . k_j) u_j
// where Gamma_i is from the chunk's beginning. All of Gamma are products of factors that are at most 1, so nothing
// overflows, and a factor of 0 is no trouble. All is computed in float, or in double.
#pragma once

#include "chunk.h"

namespace linpix::LINPIX_ISA {
namespace {

// row i of x times sign by[i]
template <class R>
void scale_rows(Block<R> x, const R* by, R sign = 1) {
  using W = typename Vector<R>::Type;
  for (int i = 0; i < C; ++i)
    for (R* at = x.at + i * x.row; at < x.at + (i + 1) * x.row; at += Vector<R>::SIZE)
      store(at, load(at) * W(sign * by[i]));
}

template <class R>
void scale(Block<R> x, int rows, R by) {
  using W = typename Vector<R>::Type;
  for (int i = 0; i < rows * x.row; i += Vector<R>::SIZE) store(x.at + i, load(x.at + i) * W(by));
}

// ROWS rows of a triangular system, V vectors of columns: x_i += sum_j n_ij u_j over the rows before i, u_i = beta_i x_i.
// n's element (i, j) stands at n[i * n_row + j * n_column]; before is above, or below where DOWN is false.
template <bool DOWN, int V, class R>
LINPIX_INLINE void solve_tile(const R* n, int n_row, int n_column, const R* beta, R* x, R* u, int row) {
  using W = typename Vector<R>::Type;
  constexpr int SIZE = Vector<R>::SIZE;
  W total[ROWS][V];
  for (int i = 0; i < ROWS; ++i)
    for (int m = 0; m < V; ++m) total[i][m] = load(x + i * row + m * SIZE);
#pragma GCC unroll 8
  for (int step = 0; step < ROWS; ++step) {
    const int j = DOWN ? step : ROWS - 1 - step;
    W written[V];
    for (int m = 0; m < V; ++m) {
      written[m] = total[j][m] * W(beta[j]);
      store(u + j * row + m * SIZE, written[m]);
    }
#pragma GCC unroll 8
    for (int i = DOWN ? j + 1 : 0; i < (DOWN ? ROWS : j); ++i)
      for (int m = 0; m < V; ++m) total[i][m] = multiply_add(W(n[i * n_row + j * n_column]), written[m], total[i][m]);
  }
  for (int i = 0; i < ROWS; ++i)
    for (int m = 0; m < V; ++m) store(x + i * row + m * SIZE, total[i][m]);
}

// x_i += sum_{j<i} n_ij u_j, u_i = beta_i x_i: n is a strictly lower triangle. DOWN false: the same with n's transpose,
// from the last row up.
template <bool DOWN, class R>
void solve(Block<R> n, const R* beta, Block<R> x, Block<R> u) {
  constexpr int SIZE = Vector<R>::SIZE;
  const int n_row = DOWN ? n.row : 1, n_column = DOWN ? 1 : n.row;
  for (int step = 0; step < C; step += ROWS) {
    const int r = DOWN ? step : C - ROWS - step;
    const R *rows = n.at + r * n_row, *diagonal = rows + r * n_column;
    if (step > 0)
      tiles<ROWS>(rows, n_row, n_column, u.at, u.row, x.at + r * x.row, x.row,
                  DOWN ? Range{0, r} : Range{r + ROWS, C}, {0, x.row}, true);
    R *from = x.at + r * x.row, *to = u.at + r * u.row;
    int m = 0;
    for (; m + 2 * SIZE <= x.row; m += 2 * SIZE)
      solve_tile<DOWN, 2>(diagonal, n_row, n_column, beta + r, from + m, to + m, x.row);
    for (; m < x.row; m += SIZE)
      solve_tile<DOWN, 1>(diagonal, n_row, n_column, beta + r, from + m, to + m, x.row);
  }
}

// What both passes need of a chunk.
template <class R>
struct DeltaChunk {
  using W = typename Vector<R>::Type;
  static constexpr int SIZE = Vector<R>::SIZE;

  Scratch<R> scratch;
  Block<R> q, k, v, e, u, S;      // S: (D, M), before the chunk; rows are padded to a multiple of 4
  Block<R> n, p, identity;        // (C, C): -Gamma (k . k) below the diagonal, and Gamma (q . k) up to it
  Block<R> across;                // a transpose: (D or M, C)
  R *beta, *decay, *since, *until;  // decay: e^g; since, until: Gamma from the chunk's beginning, and to its end

  DeltaChunk(void* memory, int D, int M)
      : scratch{(R*)memory}, q(scratch.block(C, D)), k(scratch.block(C, D)), v(scratch.block(C, M)),
        e(scratch.block(C, D > M ? D : M)), u(scratch.block(C, M)), S(scratch.block(round_up(D, 4), M)),
        n(scratch.block(C, C)), p(scratch.block(C, C)), identity(scratch.block(C, C)),
        across(scratch.block(q.row > v.row ? q.row : v.row, C)), beta(scratch.take(C)), decay(scratch.take(C)),
        since(scratch.take(C)), until(scratch.take(C)) {
    e.row = v.row;
  }

  void begin() {
    for (int i = 0; i < C; ++i) identity.at[i * C + i] = 1;
  }

  // strict = -Gamma strict below the diagonal, whole = Gamma whole up to it, element by element; else both are 0.
  // A row of Gamma is the one before times the decay.
  void fade(Block<R> strict, Block<R> whole) {
    W row[C / SIZE];
    for (int j = 0; j < C / SIZE; ++j) row[j] = 0;
    for (int i = 0; i < C; ++i)
      for (int j = 0; j * SIZE <= i; ++j) {
        const int at = i * C + j * SIZE;
        const W before = row[j] * W(decay[i]);
        row[j] = before + load(identity.at + at);
        store(strict.at + at, (W(0) - before) * load(strict.at + at));
        store(whole.at + at, row[j] * load(whole.at + at));
      }
  }

  // Tokens that a chunk lacks have decay 1 and write nothing.
  template <class E>
  void open(const DeltaSequences& s, const Place& place) {
    read<R, E>(s.q, place, s.D, q);
    read<R, E>(s.k, place, s.D, k);
    read<R, E>(s.v, place, s.M, v);
    for (int i = 0; i < C; ++i) {
      beta[i] = i < place.count ? *place.template token<R>(s.beta, i) : 0;
      decay[i] = i < place.count ? *place.template token<R>(s.g, i) : 0;
    }
    for (int i = 0; i < C; i += SIZE) store(decay + i, exp(load(decay + i)));
    since[0] = decay[0];
    for (int i = 1; i < C; ++i) since[i] = since[i - 1] * decay[i];
    until[C - 1] = 1;
    for (int i = C - 1; i > 0; --i) until[i - 1] = until[i] * decay[i];
    transpose(k, C, k.row, across);
    score(LOWER, k, s.D, across, n);
    score(LOWER, q, s.D, across, p);
    fade(n, p);
  }

  // e and u; first: S is 0.
  void find_writes(int D, bool first) {
    if (first) {
      memcpy(e.at, v.at, (size_t)C * v.row * sizeof(R));
    } else {
      multiply(k, D, S, e, false);
      for (int i = 0; i < C; ++i)
        for (int m = 0; m < v.row; m += SIZE) {
          const int at = i * v.row + m;
          store(e.at + at, load(v.at + at) - W(since[i]) * load(e.at + at));
        }
    }
    solve<true>(n, beta, e, u);
  }

  static R* state(const DeltaSequences& s, int64_t chunk, int64_t head, int d) {
    return (R*)s.states + ((chunk * s.heads + head) * s.D + d) * s.M;
  }
};

template <class R>
struct DeltaForward : DeltaChunk<R> {
  using Base = DeltaChunk<R>;
  using Base::q, Base::k, Base::e, Base::u, Base::S, Base::p, Base::since, Base::until;

  using Base::Base;

  template <class E>
  void run(const DeltaSequences& s, int64_t sequence, int64_t head) {
    const int64_t first = s.offsets[sequence], end = s.offsets[sequence + 1];
    Base::begin();
    int64_t chunk = first / C;
    for (int64_t t = first; t < end; t += C, ++chunk) {
      const Place place = place_of(head, t, end);
      Base::template open<E>(s, place);
      Base::find_writes(s.D, t == first);
      const Block<R> o = e;  // e has served
      if (t > first) {
        multiply(q, s.D, S, o, false);
        scale_rows(o, since);
      }
      apply(LOWER, p, u, o, t > first);
      for (int i = 0; i < place.count; ++i) write(place.template token<E>(s.o, i), o.at + i * o.row, s.M);
      if (chunk < end / C) {  // so for all but the last chunk, and sometimes for it
        scale_rows(u, until);
        scale(S, s.D, since[C - 1]);
        fold(k, s.D, u, S);
        for (int d = 0; d < s.D; ++d) write(Base::state(s, chunk, head, d), S.at + d * S.row, s.M);
      }
    }
  }
};

// From the last chunk to the first. dS is the gradient with respect to the state after a chunk; X that with respect to
// e, so that beta X is what v gets, and what k S gets with the other sign.
template <class R>
struct DeltaBackward : DeltaChunk<R> {
  using Base = DeltaChunk<R>;
  using Base::q, Base::k, Base::v, Base::e, Base::u, Base::S, Base::n, Base::p, Base::across, Base::beta, Base::since,
      Base::until, Base::scratch;
  using W = typename Base::W;
  static constexpr int SIZE = Base::SIZE;

  Block<R> d_o, x, r, dS, turned;  // r: beta x; turned: the transpose of S or dS
  Block<R> parts;                  // (C, 16): of sums over a token's features, as many parts as a vector has
  R* totals;

  DeltaBackward(void* memory, int D, int M)
      : Base(memory, D, M), d_o(scratch.block(C, M)), x(scratch.block(C, D > M ? D : M)), r(scratch.block(C, M)),
        dS(scratch.block(round_up(D, 4), M)), turned(scratch.block(v.row, D)), parts(scratch.block(C, 16)),
        totals(scratch.take(C)) {
    x.row = v.row;
  }

  template <class E>
  void run(const DeltaSequences& s, int64_t sequence, int64_t head) {
    const int64_t first = s.offsets[sequence], end = s.offsets[sequence + 1];
    if (first == end) return;
    Base::begin();
    double gate = 0;
    for (int64_t c = (end - 1 - first) / C; c >= 0; --c) {
      const Place place = place_of(head, first + c * C, end);
      for (int d = 0; d < s.D; ++d)
        if (c > 0)
          memcpy(S.at + d * S.row, Base::state(s, first / C + c - 1, head, d), s.M * sizeof(R));
      run_chunk<E>(s, place, c == 0, place.t + C >= end, gate);
    }
  }

  // parts = sign a b, or parts += sign a b, element by element
  void add_products(Block<R> a, Block<R> b, R sign, Block<R> parts, bool add) {
    for (int i = 0; i < C; ++i) {
      W total = add ? load(parts.at + i * 16) : W(0);
      for (int m = 0; m < a.row; m += SIZE)
        total = multiply_add(W(sign) * load(a.at + i * a.row + m), load(b.at + i * b.row + m), total);
      store(parts.at + i * 16, total);
    }
  }

  // totals = the sums of the rows of parts
  void add_up(Block<R> parts) {
    transpose(parts, C, 16, across);
    for (int i = 0; i < C; i += SIZE) {
      W total = load(across.at + i);
      for (int j = 1; j < 16; ++j) total = total + load(across.at + j * C + i);
      store(totals + i, total);
    }
  }

  template <class E>
  void run_chunk(const DeltaSequences& s, const Place& place, bool first, bool last, double& gate) {
    Base::template open<E>(s, place);
    read<R, E>(s.d_o, place, s.M, d_o);
    Base::find_writes(s.D, first);

    if (!last) {
      multiply(k, s.D, dS, x, false);
      scale_rows(x, until);
    }
    apply_transposed(p, d_o, x, !last);
    solve<false>(n, beta, x, r);
    add_products(x, e, 1, parts, false);
    add_up(parts);
    for (int i = 0; i < place.count; ++i) *place.template token<R>(s.dbeta, i) = totals[i];
    add_products(v, r, -1, parts, false);
    for (int i = 0; i < place.count; ++i) write(place.template token<E>(s.dv, i), r.at + i * r.row, s.M);

    transpose(u, C, u.row, across);
    const Block<R> a = n, h = p;  // n and p have served
    score(LOWER, r, s.M, across, a);
    score(LOWER, d_o, s.M, across, h);
    Base::fade(a, h);
    const Block<R> dq = {x.at, q.row}, dk = {e.at, q.row};  // x and e too
    apply(LOWER, h, k, dq);
    apply(LOWER, a, k, dk);
    apply_transposed(a, k, dk, true);
    apply_transposed(h, q, dk, true);
    if (!last) {
      transpose(dS, round_up(s.D, 4), dS.row, turned);
      scale_rows(u, until);
      multiply(u, s.M, turned, dk, true);
    }
    if (!first) {
      scale_rows(d_o, since);
      scale_rows(r, since, R(-1));
      transpose(S, round_up(s.D, 4), S.row, turned);
      multiply(d_o, s.M, turned, dq, true);
      multiply(r, s.M, turned, dk, true);
      scale(dS, s.D, since[C - 1]);
      fold(q, s.D, d_o, dS);
      fold(k, s.D, r, dS);
    }
    for (int i = 0; i < place.count; ++i) {
      write(place.template token<E>(s.dq, i), dq.at + i * dq.row, s.D);
      write(place.template token<E>(s.dk, i), dk.at + i * dk.row, s.D);
    }
    // dg_t is the sum of q . dq - v . dv over the tokens from t on.
    add_products(q, dq, 1, parts, true);
    add_up(parts);
    for (int i = place.count - 1; i >= 0; --i) *place.template token<R>(s.dg, i) = (R)(gate += totals[i]);
  }
};

}  // namespace
}  // namespace linpix::LINPIX_ISA
