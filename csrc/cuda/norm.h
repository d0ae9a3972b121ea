// A row of the residual stream in a warp's registers, LayerNorm of it, and a kernel that does nothing else.
#pragma once

#include "kernels.h"
#include "threads.h"

namespace linpix::LINPIX_ISA {

template <int COLUMNS>
struct RowOf {  // column c of the row is value[c / 32] of lane c % 32; norms do not touch columns beyond the row's
  float value[COLUMNS], total;
};
using RowPart = RowOf<MAX_D_MODEL / WARP>;

// f(value, column) for this lane's columns of a row of n.
template <int COLUMNS, class F>
LINPIX_INLINE void each_column(RowOf<COLUMNS>& row, int lane, int n, F f) {
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c)
    if (c * WARP + lane < n) f(row.value[c], c * WARP + lane);
}

template <class Threads, class Own>
LINPIX_INLINE void add_lanes(Threads& threads, Own& own) {
#pragma unroll
  for (int stride = WARP / 2; stride >= 1; stride /= 2)
    threads.add_across(stride, [&](int i) -> float& { return own[i].total; });
}

// LayerNorm of every warp's row of n columns, in place.
template <class Threads, class Own>
LINPIX_INLINE void normalise(Threads& threads, Own& own, const Norm& norm, int n) {
  threads.each([&](int i) {
    own[i].total = 0;
    each_column(own[i], i % WARP, n, [&](float& x, int) { own[i].total = own[i].total + x; });
  });
  add_lanes(threads, own);
  threads.each([&](int i) {
    const float mean = own[i].total / (float)n;
    own[i].total = 0;
    each_column(own[i], i % WARP, n, [&](float& x, int) {
      x = x - mean;
      own[i].total = multiply_add(x, x, own[i].total);
    });
  });
  add_lanes(threads, own);
  threads.each([&](int i) {
    const float scale = 1.0f / square_root(own[i].total / (float)n + 1e-5f);
    each_column(own[i], i % WARP, n,
                [&](float& x, int c) { x = multiply_add(x * scale, norm.weight[c], norm.bias[c]); });
  });
}

// A warp for each row: the residual stream x, and what is multiplied, a; see ProductCall. COLUMNS: of a lane, at least;
// a row of few columns needs few registers, so many warps run at once.
template <int COLUMNS>
struct NormaliseRows {
  static constexpr int BLOCK = 4 * WARP, PER_SM = COLUMNS > 8 ? 4 : 8;

  LINPIX_BODY run(Threads<BLOCK>& threads, const ProductCall& call) {
    const int n = call.d_model, depth = call.weights.depth;
    const auto row_of = [&](int i) { return threads.x * (BLOCK / WARP) + i / WARP; };
    typename Threads<BLOCK>::template Own<RowOf<COLUMNS>> own;
    threads.follow();
    threads.each([&](int i) {
#pragma unroll
      for (float& x : own[i].value) x = 0;
      each_column(own[i], i % WARP, n, [&](float& x, int c) { x = call.sum[row_of(i) * n + c]; });
    });
    if (call.post.weight) normalise(threads, own, call.post, n);
    threads.each([&](int i) {
      each_column(own[i], i % WARP, n, [&](float& x, int c) { call.x[row_of(i) * n + c] = x; });
    });
    if (call.pre.weight) normalise(threads, own, call.pre, n);
    threads.each([&](int i) {
      each_column(own[i], i % WARP, depth,
                  [&](float& x, int c) { store((bfloat16*)call.normalised + row_of(i) * depth + c, x); });
    });
  }
};

}  // namespace linpix::LINPIX_ISA
