// A row of the residual stream in a warp's registers, LayerNorm of it, and a kernel that does nothing else.
#pragma once

#include "kernels.h"
#include "threads.h"

namespace linpix::LINPIX_ISA {

// Some rows, and the weights of a norm: column c is number c / 32 of lane c % 32. Norms do not touch columns beyond n.
template <int COLUMNS, int ROWS = 1>
struct RowsOf {
  float value[ROWS][COLUMNS], total[ROWS], weight[COLUMNS], bias[COLUMNS];
};
using RowPart = RowsOf<MAX_D_MODEL / WARP>;

// f(value, column) for this lane's columns of a row of n.
template <int COLUMNS, class F>
LINPIX_INLINE void each_column(float (&row)[COLUMNS], int lane, int n, F f) {
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c)
    if (c * WARP + lane < n) f(row[c], c * WARP + lane);
}

// Requests the weights of a norm of n columns. No kernel writes them, so they can be requested before follow.
template <class Threads, class Own>
LINPIX_INLINE void request(Threads& threads, Own& own, const Norm& norm, int n) {
  threads.each([&](int i) {
    each_column(own[i].weight, i % WARP, n, [&](float& x, int c) { x = norm.weight[c]; });
    each_column(own[i].bias, i % WARP, n, [&](float& x, int c) { x = norm.bias[c]; });
  });
}

template <int ROWS, class Threads, class Own>
LINPIX_INLINE void add_lanes(Threads& threads, Own& own) {
#pragma unroll
  for (int stride = WARP / 2; stride >= 1; stride /= 2)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) threads.add_across(stride, [&](int i) -> float& { return own[i].total[r]; });
}

// LayerNorm of the first ROWS rows of every warp, in place. Rows do not wait for each other's sums. weights(thread, c): of
// the lane's column c.
struct Weights {
  float weight, bias;
};
template <int ROWS, class Threads, class Own, class Of>
LINPIX_INLINE void normalise(Threads& threads, Own& own, int n, Of weights) {
  threads.each([&](int i) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      own[i].total[r] = 0;
      each_column(own[i].value[r], i % WARP, n, [&](float& x, int) { own[i].total[r] = own[i].total[r] + x; });
    }
  });
  add_lanes<ROWS>(threads, own);
  threads.each([&](int i) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float mean = own[i].total[r] / (float)n;
      own[i].total[r] = 0;
      each_column(own[i].value[r], i % WARP, n, [&](float& x, int) {
        x = x - mean;
        own[i].total[r] = multiply_add(x, x, own[i].total[r]);
      });
    }
  });
  add_lanes<ROWS>(threads, own);
  threads.each([&](int i) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float scale = 1.0f / square_root(own[i].total[r] / (float)n + 1e-5f);
#pragma unroll
      for (int c = 0; c < (int)(sizeof own[i].weight / sizeof(float)); ++c)
        if (c * WARP + i % WARP < n) {
          const Weights w = weights(i, c);
          own[i].value[r][c] = multiply_add(own[i].value[r][c] * scale, w.weight, w.bias);
        }
    }
  });
}
// With weights that have been requested; and of one row, with weights that need no registers meanwhile.
template <int ROWS, class Threads, class Own>
LINPIX_INLINE void normalise(Threads& threads, Own& own, int n) {
  normalise<ROWS>(threads, own, n, [&](int i, int c) { return Weights{own[i].weight[c], own[i].bias[c]}; });
}
template <class Threads, class Own>
LINPIX_INLINE void normalise(Threads& threads, Own& own, const Norm& norm, int n) {
  normalise<1>(threads, own, n, [&](int i, int c) {
    return Weights{norm.weight[c * WARP + i % WARP], norm.bias[c * WARP + i % WARP]};
  });
}

// The norm before a product: there is at most one, of post and pre (pass.cpp).
LINPIX_INLINE const Norm& norm_of(const ProductCall& call) { return call.post.weight ? call.post : call.pre; }

// A warp for each row: the residual stream x, and what is multiplied, a; see ProductCall. COLUMNS: of a lane, at least;
// a row of few columns needs few registers, so many warps run at once.
template <int COLUMNS>
struct NormaliseRows {
  static constexpr int BLOCK = 4 * WARP, PER_SM = COLUMNS > 8 ? 4 : 8;

  LINPIX_BODY run(Threads<BLOCK>& threads, const ProductCall& call) {
    const int n = call.d_model, depth = call.weights.depth;
    const auto row_of = [&](int i) { return threads.x * (BLOCK / WARP) + i / WARP; };
    const Norm& norm = norm_of(call);
    const auto keep = [&](auto& own) {
      threads.each([&](int i) {
        each_column(own[i].value[0], i % WARP, n, [&](float& x, int c) { call.x[row_of(i) * n + c] = x; });
      });
    };
    typename Threads<BLOCK>::template Own<RowsOf<COLUMNS>> own;
    if (norm.weight) request(threads, own, norm, n);
    threads.follow();
    threads.each([&](int i) {
#pragma unroll
      for (float& x : own[i].value[0]) x = 0;
      each_column(own[i].value[0], i % WARP, n, [&](float& x, int c) { x = call.sum[row_of(i) * n + c]; });
    });
    if (call.pre.weight) keep(own);
    if (norm.weight) normalise<1>(threads, own, n);
    if (!call.pre.weight) keep(own);
    threads.each([&](int i) {
      each_column(own[i].value[0], i % WARP, depth,
                  [&](float& x, int c) { store((bfloat16*)call.normalised + row_of(i) * depth + c, x); });
    });
  }
};

}  // namespace linpix::LINPIX_ISA
