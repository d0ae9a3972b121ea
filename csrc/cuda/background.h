// The kernels for sub-pixels that skip the layers, because the model has read them, or because they lie amid background
// (see model/background.py). Such a sub-pixel costs at most one hidden layer, instead of a pass.
#pragma once

#include "ends.h"

namespace linpix::LINPIX_ISA {

// A warp for each row, between two passes of decode: takes the row through sub-pixels that are not tokens, up to the
// next token, and embeds that.
struct RunAhead {
  static constexpr int BLOCK = WARP, PER_SM = 16;
  struct Counts {
    float ink, following;  // how many of a token's values are ink; are known background that follows
  };

  static LINPIX_HOST_DEVICE int floats(const Model& m) {  // in shared memory
    return (m.background < 0 ? 0 : m.project.columns) + (m.head.groups + 1) * m.mixtures;
  }

  LINPIX_BODY run(Threads<BLOCK>& threads, const Pass& p) {
    const Model& m = p.model;
    const int64_t row = threads.x;
    const int hidden = m.background < 0 ? 0 : m.project.columns, width = m.head.groups * m.mixtures;
    float *const features = (float*)threads.shared, *const parameters = features + hidden;
    threads.follow();
    const int64_t steps = p.rows.steps[row], position = p.rows.positions[row];
    int64_t taken = p.rows.taken[row];
    if (taken >= steps) return;
    const bool begun = !begins(p.rows, row, position + taken);
    const int64_t slot = p.rows.slots[row];
    const float* last = begun && p.pools.tokens[slot] > 0 ? p.rows.last + slot * hidden : nullptr;
    Token k{};
    for (; taken < steps; ++taken) {  // the same for all threads
      k = token_at(m, p.rows, row, position + taken);
      if (was_read(m, k)) continue;
      if (m.background < 0) break;
      const uint8_t* image = image_of(p, k);
      typename Threads<BLOCK>::template Own<Counts> own;
      threads.each([&](int i) {
        own[i] = {};
        for (int v = i; v < m.values; v += WARP) {
          own[i].ink += is_ink(m, k, image, v);
          own[i].following += is_known_background(m, k, image, v);
        }
      });
#pragma unroll
      for (int stride = WARP / 2; stride >= 1; stride /= 2) {
        threads.add_across(stride, [&](int i) -> float& { return own[i].ink; });
        threads.add_across(stride, [&](int i) -> float& { return own[i].following; });
      }
      if (own[0].ink > 0) break;  // every lane has the same sum
      threads.each([&](int i) {
        for (int c = i; c < hidden; c += WARP)
          store(features + c, skipped_feature(m, k, (int64_t)own[i].following, last, c));
      });
      threads.barrier();
      threads.each([&](int i) {
        const float* weights = (const float*)m.skipped_head.weights;
        for (int j = i; j < width; j += WARP) {
          float sum = 0;
#pragma unroll 8
          for (int c = 0; c < hidden; ++c) sum = multiply_add(features[c], weights[c * width + j], sum);
          parameters[j] = sum + m.skipped_head.bias[j];
        }
      });
      threads.barrier();
      threads.each([&](int i) {
        if (i == 0) finish_token(m, p.rows, (int)row, taken, parameters, parameters + width, true, [] {});
      });
      threads.barrier();  // the next token may look up what was drawn
    }
    threads.barrier();
    threads.each([&](int i) {
      if (taken < steps) look_up(m, k, image_of(p, k), i, p.buffers.sum + row * m.d_model);
      if (i) return;
      p.rows.taken[row] = taken;
      if (!begun) p.pools.tokens[slot] = 0;
    });
  }
};

// A warp for each row, after a pass of prefill: keeps what is needed of the row's last token, and counts its tokens.
struct KeepLast {
  static constexpr int BLOCK = 4 * WARP, PER_SM = 8;
  struct Tokens {
    int64_t last, count;  // place of the row's last token, below 0 if it has none; how many tokens
  };

  LINPIX_BODY run(Threads<BLOCK>& threads, const EndCall& call) {
    const Pass& p = call.pass;
    const auto row_of = [&](int i) { return threads.x * (BLOCK / WARP) + i / WARP; };
    const auto features = [&](int i) { return (float*)threads.shared + i / WARP * p.model.d_model; };
    typename Threads<BLOCK>::template Own<RowPart> own;
    typename Threads<BLOCK>::template Own<Tokens> tokens;
    threads.follow();
    threads.each([&](int i) {
      tokens[i] = {-1, 0};
      if (row_of(i) >= p.rows.count) return;
      const int64_t begin = row_of(i) * p.tokens, left = p.rows.steps[row_of(i)] - p.step;
      for (int64_t at = begin; at < begin + (left < p.tokens ? left : p.tokens); ++at)
        if (!p.buffers.skipped[at]) tokens[i] = {at, tokens[i].count + 1};
    });
    if (p.model.background >= 0) {
      final_features(threads, own, call, [&](int i) { return tokens[i].last; }, features);
      threads.barrier();
    }
    threads.each([&](int i) {
      if (tokens[i].last < 0) return;
      if (p.model.background >= 0) keep(p, row_of(i), features(i), i % WARP);
      if (i % WARP == 0) p.pools.tokens[p.rows.slots[row_of(i)]] += tokens[i].count;
    });
  }
};

}  // namespace linpix::LINPIX_ISA
