// The kernels that begin and end a pass. Embed looks up a token's input, or copies one that is given. Finish does the
// final norm, the head and the draw. It can look up the next token's input as well, so that most steps of decode need no
// Embed.
#pragma once

#include "../drawing.h"
#include "../functions.h"
#include "../token.h"
#include "kernels.h"
#include "norm.h"
#include "threads.h"

namespace linpix::LINPIX_ISA {

// Writes a token's input, a sum of table rows; each lane of a warp writes its columns.
LINPIX_INLINE void look_up(const Model& m, const Token& k, const uint8_t* image, int lane, float* to) {
  for (int c = lane; c < m.d_model; c += WARP) {
    float x = 0;
    for (int i = 0; i < look_ups(m); ++i) {
      const float value = m.table[row_of(m, k, image, i) * m.d_model + c];
      x = i ? x + value : value;
    }
    to[c] = x;
  }
}

LINPIX_INLINE const uint8_t* image_of(const Pass& p, const Token& k) { return p.rows.canvas + k.slot * p.model.subpixels; }

// Whether nothing has been folded into a row's slot yet: position 0, unless inputs were read before.
LINPIX_INLINE bool begins(const Rows& rows, int64_t row, int64_t t) {
  return t == 0 && !(rows.conditioned && rows.conditioned[row]);
}

// A warp for each token of the pass.
struct Embed {
  static constexpr int BLOCK = 4 * WARP, PER_SM = 8;

  LINPIX_BODY run(Threads<BLOCK>& threads, const Pass& p) {
    threads.follow();
    threads.each([&](int i) {
      const int64_t token = threads.x * (BLOCK / WARP) + i / WARP, row = token / p.tokens;
      if (row >= p.rows.count) return;
      const int64_t j = p.begun(row) + token % p.tokens;
      if (j >= p.rows.steps[row]) return;
      float* const to = p.buffers.sum + token * p.model.d_model;
      if (p.rows.inputs) {
        const float* input = p.rows.inputs + (p.rows.offsets[row] + j) * p.model.d_model;
        for (int c = i % WARP; c < p.model.d_model; c += WARP) to[c] = input[c];
        return;
      }
      const int64_t t = p.rows.positions[row] + j;
      const Token k = token_at(p.model, p.rows, row, t);
      look_up(p.model, k, image_of(p, k), i % WARP, to);
      if (!p.buffers.skipped || i % WARP) return;
      p.buffers.skipped[token] = was_read(p.model, k) || amid_background(p.model, k, image_of(p, k));
      if (begins(p.rows, row, t)) p.pools.tokens[k.slot] = 0;
    });
  }
};

// Writes the final features of each warp's token to to(thread), in shared memory. place(thread): the token's place in
// the pass; below 0 the warp has none, and what it writes means nothing.
template <class Threads, class Own, class Place, class To>
LINPIX_INLINE void final_features(Threads& threads, Own& own, const EndCall& call, Place place, To to) {
  const int n = call.pass.model.d_model;
  threads.each([&](int i) {
    if (const int64_t at = place(i); at >= 0)
      each_column(own[i].value[0], i % WARP, n, [&](float& x, int c) { x = call.pass.buffers.sum[at * n + c]; });
  });
  if (call.post.weight) normalise(threads, own, call.post, n);
  normalise(threads, own, call.pass.model.norm, n);
  threads.each([&](int i) {
    float* features = to(i);
    each_column(own[i].value[0], i % WARP, n, [&](float& x, int c) { features[c] = x; });
  });
}

// Keeps what later sub-pixels need of a row's final features, see model/background.py; each lane does its columns.
LINPIX_INLINE void keep(const Pass& p, int64_t row, const float* features, int lane) {
  const Matrix& project = p.model.project;
  const float* weights = (const float*)project.weights;
  for (int c = lane; c < project.columns; c += WARP) {
    float sum = 0;
#pragma unroll 8
    for (int k = 0; k < p.model.d_model; ++k) sum = multiply_add(features[k], weights[k * project.columns + c], sum);
    p.rows.last[p.rows.slots[row] * project.columns + c] = sum;
  }
}

// A warp for each row, after a pass with one token a row: draws the token's sub-pixels, and embeds the next token.
struct Finish {
  static constexpr int BLOCK = 4 * WARP, PER_SM = 8;

  static LINPIX_HOST_DEVICE int floats(const Model& m) {  // in shared memory, for each row
    return m.d_model + (m.head.groups + 1) * m.mixtures;
  }

  LINPIX_BODY run(Threads<BLOCK>& threads, const EndCall& call) {
    const Pass& p = call.pass;
    const Model& m = p.model;
    const int n = m.d_model, width = m.head.groups * m.mixtures;
    const auto row_of = [&](int i) { return threads.x * (BLOCK / WARP) + i / WARP; };
    const auto live = [&](int i) {
      const int64_t row = row_of(i);
      if (row >= p.rows.count || p.rows.taken[row] >= p.rows.steps[row]) return false;
      return !(p.buffers.skipped && p.buffers.skipped[row]);
    };
    const int head = call.keep_head ? n * width : 0;  // floats of its weights in shared memory, a multiple of four
    const auto own_floats = [&](int i) { return (float*)threads.shared + head + i / WARP * floats(m); };
    typename Threads<BLOCK>::template Own<RowPart> own;
    threads.each([&](int i) {  // before follow: no kernel writes weights
      for (int c = i * 4; c < head; c += BLOCK * 4)
        threads.copy((float*)threads.shared + c, (const float*)m.head.weights + c);
      threads.end_group();
    });
    threads.follow();
    final_features(threads, own, call, [&](int i) { return live(i) ? row_of(i) : -1; }, own_floats);
    threads.each([&](int) { threads.template wait<0>(); });
    threads.barrier();
    threads.each([&](int i) {
      const float *features = own_floats(i), *weights = head ? (float*)threads.shared : (const float*)m.head.weights;
      for (int j = i % WARP; j < width; j += WARP) {
        float sum = 0;
#pragma unroll 8
        for (int k = 0; k < n; ++k) sum = multiply_add(features[k], weights[k * width + j], sum);
        own_floats(i)[n + j] = sum + m.head.bias[j];
      }
      if (m.background >= 0 && live(i)) keep(p, row_of(i), features, i % WARP);
    });
    threads.barrier();
    threads.each([&](int i) {
      float* parameters = own_floats(i) + n;
      if (i % WARP || !live(i)) return;
      const int64_t row = row_of(i);
      finish_token(m, p.rows, (int)row, p.rows.taken[row], parameters, own_floats(i) + n + width, false, [] {});
      ++p.rows.taken[row];
      ++p.rows.passes[row];
      if (p.pools.tokens) ++p.pools.tokens[p.rows.slots[row]];
    });
    threads.barrier();
    threads.each([&](int i) {
      if (!call.embed_next || !live(i)) return;
      const Token k = token_at(m, p.rows, row_of(i), p.rows.positions[row_of(i)] + p.rows.taken[row_of(i)]);
      look_up(m, k, image_of(p, k), i % WARP, p.buffers.sum + row_of(i) * n);
    });
  }
};

}  // namespace linpix::LINPIX_ISA
