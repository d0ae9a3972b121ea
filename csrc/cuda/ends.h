// Where a step begins and ends: look-ups of the next token; final norm, head and draw.
#pragma once

#include "../drawing.h"
#include "../functions.h"
#include "kernels.h"
#include "norm.h"
#include "threads.h"

namespace linpix::LINPIX_ISA {

// The sum of table rows that a token at t of a row is embedded as, written by a warp's lane.
LINPIX_INLINE void look_up(const Pass& p, int row, int64_t t, int lane, float* to) {
  const Model& m = p.model;
  const uint8_t* image = p.rows.canvas + p.rows.slots[row] * m.subpixels;
  const int32_t *source = m.source + t * m.values, *place = m.place + t * m.places;
  for (int c = lane; c < m.d_model; c += WARP) {
    float x = 0;
    for (int i = 0; i < m.values + m.places; ++i) {
      int64_t from;
      if (i >= m.values)
        from = place[i - m.values];
      else if (source[i] >= 0)
        from = m.base[i] + image[source[i]];
      else
        from = m.base[i] + (i == 0 ? p.rows.start[row] : 256);
      const float value = m.table[from * m.d_model + c];
      x = i ? x + value : value;
    }
    to[c] = x;
  }
}

// A warp for each token of the pass.
struct Embed {
  static constexpr int BLOCK = 4 * WARP, PER_SM = 8;

  LINPIX_BODY run(Threads<BLOCK>& threads, const EndCall& call) {
    const Pass& p = call.pass;
    threads.follow();
    threads.each([&](int i) {
      const int64_t token = threads.x * (BLOCK / WARP) + i / WARP;
      const int row = (int)(token / p.tokens);
      const int64_t j = p.step + token % p.tokens;
      if (row >= p.rows.count || j >= p.rows.steps[row]) return;
      const int64_t t = (p.rows.positions ? p.rows.positions[row] : 0) + j;
      look_up(p, row, t, i % WARP, p.buffers.sum + token * p.model.d_model);
    });
  }
};

// A warp for each row of a pass with one token a row: its sub-pixel, and the look-ups of the one after it.
struct Finish {
  static constexpr int BLOCK = 4 * WARP, PER_SM = 8;

  static LINPIX_HOST_DEVICE int floats(const Model& m) { return m.d_model + 4 * m.mixtures; }  // of a row, in shared memory

  LINPIX_BODY run(Threads<BLOCK>& threads, const EndCall& call) {
    const Pass& p = call.pass;
    const Model& m = p.model;
    const int n = m.d_model, width = 3 * m.mixtures;
    const auto row_of = [&](int i) { return threads.x * (BLOCK / WARP) + i / WARP; };
    const auto live = [&](int i) { return row_of(i) < p.rows.count && p.step < p.rows.steps[row_of(i)]; };
    const int head = call.keep_head ? n * width : 0;  // floats of its weights in shared memory, a multiple of four
    const auto own_floats = [&](int i) { return (float*)threads.shared + head + i / WARP * floats(m); };
    typename Threads<BLOCK>::template Own<RowPart> own;
    threads.each([&](int i) {  // weights: nobody writes them
      for (int c = i * 4; c < head; c += BLOCK * 4)
        threads.copy((float*)threads.shared + c, (const float*)m.head.weights + c);
      threads.end_group();
    });
    threads.follow();
    threads.each([&](int i) {
      if (live(i)) each_column(own[i], i % WARP, n, [&](float& x, int c) { x = p.buffers.sum[row_of(i) * n + c]; });
    });
    if (call.post.weight) normalise(threads, own, call.post, n);
    normalise(threads, own, m.norm, n);
    threads.each([&](int i) {
      float* features = own_floats(i);
      each_column(own[i], i % WARP, n, [&](float& x, int c) { features[c] = x; });
      threads.template wait<0>();
    });
    threads.barrier();
    threads.each([&](int i) {
      const float *features = own_floats(i), *weights = head ? (float*)threads.shared : (const float*)m.head.weights;
      for (int j = i % WARP; j < width; j += WARP) {
        float sum = 0;
#pragma unroll 8
        for (int k = 0; k < n; ++k) sum = multiply_add(features[k], weights[k * width + j], sum);
        own_floats(i)[n + j] = sum + m.head.bias[j];
      }
    });
    threads.barrier();
    threads.each([&](int i) {
      const float* parameters = own_floats(i) + n;
      if (i % WARP == 0 && live(i))
        finish_subpixel(m, p.rows, (int)row_of(i), p.step, parameters, own_floats(i) + n + width);
    });
    threads.barrier();
    threads.each([&](int i) {
      const int64_t row = row_of(i);
      if (!call.embed_next || row >= p.rows.count || p.step + 1 >= p.rows.steps[row]) return;
      look_up(p, (int)row, p.rows.positions[row] + p.step + 1, i % WARP, p.buffers.sum + row * n);
    });
  }
};

}  // namespace linpix::LINPIX_ISA
