// Causal linear attention over whole sequences, and its gradient, one head of one sequence at a time.
//
// Both go through the tokens chunk by chunk (algorithm 1 of "Transformers are RNNs", with many tokens a step). Tokens
// before a chunk contribute through the state, tokens inside it through a masked C x C matrix of scores. So memory is
// that of one chunk and one state, whatever T, and nearly all work is small matrix products in cache (chunk.h). Numbers
// are float, or double for tests of gradients.
#pragma once

#include "chunk.h"

namespace linpix::LINPIX_ISA {
namespace {

// A chunk after the feature map. Whole vectors are mapped, so what lies beyond a token's features is set to 0 again.
template <class R, class E>
void read_mapped(const Heads& from, const Place& place, int width, Block<R> to) {
  read<R, E>(from, place, width, to);
  for (int i = 0; i < place.count; ++i) {
    R* row = to.at + i * to.row;
    for (int d = 0; d < width; d += Vector<R>::SIZE) store(row + d, phi(load(row + d)));
    for (int d = width; d < to.row; ++d) row[d] = 0;
  }
}

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
  void run(const Sequences& s, int64_t sequence, int64_t head) {
    using W = typename Vector<R>::Type;
    constexpr int SIZE = Vector<R>::SIZE;
    const int64_t end = s.offsets[sequence + 1];
    for (int64_t t = s.offsets[sequence]; t < end; t += C) {
      const Place place = place_of(head, t, end);
      read_mapped<R, E>(s.q, place, s.D, q);
      read_mapped<R, E>(s.k, place, s.D, k);
      read<R, E>(s.v, place, s.M, v);
      transpose(k, k_across);
      score(LOWER, q, s.D, k_across, scores);
      apply(LOWER, scores, v, y);
      multiply(q, s.D, S, y);
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
        copy(place.token<E>(s.y, i), row, s.M);
      }
      if (t + C < end) fold(k, s.D, v, S);
    }
  }
};

// --- its gradient: equations 13 to 15; a column of ones beside v makes the normaliser one more numerator -------------

template <class R>
struct Backward {
  Scratch<R> scratch;
  // n: the gradient of the numerators, with that of the normaliser as column M; v: column M is 1
  Block<R> q, k, v, n, scores, gradients, result, S, n_q, q_n;
  R* across;

  Backward(void* memory, int D, int M)
      : scratch{(R*)memory}, q(scratch.block(C, D)), k(scratch.block(C, D)), v(scratch.block(C, M + 1)),
        n(scratch.block(C, M + 1)), scores(scratch.block(C, C)), gradients(scratch.block(C, C)),
        result(scratch.block(C, D > M ? D : M + 1)), S(scratch.block(M + 1, D)), n_q(scratch.block(M + 1, D)),
        q_n(scratch.block(D, M + 1)), across(scratch.take((size_t)(q.row > v.row ? q.row : v.row) * C)) {}

  template <class E>
  void run(const Sequences& s, int64_t sequence, int64_t head) {
    const int64_t first = s.offsets[sequence], end = s.offsets[sequence + 1];
    for (int64_t t = first; t < end; t += C) queries<E>(s, place_of(head, t, end), t + C >= end);
    for (int64_t c = (end - first + C - 1) / C - 1; c >= 0; --c)
      keys_and_values<E>(s, place_of(head, first + c * C, end), c == 0);
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

  // Equation 13, from the first chunk to the last. S (M + 1, D): the state before the chunk.
  template <class E>
  void queries(const Sequences& s, const Place& place, bool last) {
    read_all<E>(s, place);
    transpose(v, across);
    score(LOWER, n, s.M + 1, across, gradients);
    const Block<R> dq = {result.at, q.row};
    apply(LOWER, gradients, k, dq);
    multiply(n, s.M + 1, S, dq);
    if (!last) fold(v, s.M + 1, k, S);
    write_mapped<E>(q, dq, s.dq, place, s.D);
  }

  // Equations 14 and 15, from the last chunk to the first. n_q and q_n: sums over the tokens after the chunk.
  template <class E>
  void keys_and_values(const Sequences& s, const Place& place, bool first) {
    read_all<E>(s, place);
    transpose(q, across);
    score(UPPER, k, s.D, across, scores);
    transpose(n, across);
    score(UPPER, v, s.M + 1, across, gradients);
    const Block<R> dv = {result.at, n.row}, dk = {result.at, q.row};  // in the same memory, one after the other
    apply(UPPER, scores, n, dv);
    multiply(k, s.D, q_n, dv);
    for (int i = 0; i < place.count; ++i) copy(place.token<E>(s.dv, i), dv.at + i * dv.row, s.M);
    apply(UPPER, gradients, q, dk);
    multiply(v, s.M + 1, n_q, dk);
    if (!first) {
      fold(n, s.M + 1, q, n_q);
      fold(q, s.D, n, q_n);
    }
    write_mapped<E>(k, dk, s.dk, place, s.D);
  }

  // Applies the gradient of the feature map: phi'(x) is 1 where x > 0 (and phi(x) > 1), else phi(x).
  template <class E>
  static void write_mapped(Block<R> mapped, Block<R> gradient, const Heads& to, const Place& place, int width) {
    for (int i = 0; i < place.count; ++i) {
      R* row = gradient.at + i * gradient.row;
      for (int d = 0; d < gradient.row; d += Vector<R>::SIZE)
        store(row + d, load(row + d) * at_most(load(mapped.at + i * mapped.row + d), 1));
      copy(place.token<E>(to, i), row, width);
    }
  }
};

}  // namespace
}  // namespace linpix::LINPIX_ISA
