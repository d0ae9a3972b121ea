// A row of the residual stream in a warp's registers, and LayerNorm of it.
#pragma once

#include "kernels.h"
#include "threads.h"

namespace linpix::LINPIX_ISA {

struct RowPart {  // column c of the row is value[c / 32] of lane c % 32; norms do not touch columns beyond the row's
  static constexpr int MAX_COLUMNS = MAX_D_MODEL / WARP;
  float value[MAX_COLUMNS], total;
};

// f(value, column) for this lane's columns of a row of n.
template <class F>
LINPIX_INLINE void each_column(RowPart& row, int lane, int n, F f) {
#pragma unroll
  for (int c = 0; c < RowPart::MAX_COLUMNS; ++c)
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

}  // namespace linpix::LINPIX_ISA
