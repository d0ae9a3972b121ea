// The kernels for sub-pixels that skip the layers, because the model has read them, or because they lie amid background
// (see model/background.py). Such a sub-pixel costs at most one hidden layer, instead of a pass.
#pragma once

#include "ends.h"

namespace linpix::LINPIX_ISA {

// A warp for each row, between two passes of decode: takes the row through sub-pixels that are not tokens, up to the
// next token, and embeds that.
//
// A lane has each of the next 32 tokens. While what is drawn is background, a sub-pixel's distribution does not depend
// on those before it, so each lane draws its own as if they were background. What lies after the first one that is not
// is forgotten, and drawn again. So images are those of one sub-pixel after the other, bit for bit. In a model with a
// background, a token is one sub-pixel.
//
// Among more than FEW rows, a row that has found no token in its 32 skips the next pass, so that all the others need
// not wait for it. A row that is alone goes on: a pass costs more than 32 sub-pixels.
struct RunAhead {
  static constexpr int BLOCK = WARP, PER_SM = 16;
  static constexpr int COLUMNS = 32;  // parameters that a lane computes at once
  struct Lane {
    uint32_t stop, end;  // see `first_of`: this is a token, or beyond the last step; what was drawn is not background
    int64_t following;   // values that are known background that follows
    float value[COLUMNS];
    bool read;           // by the model, so it is not drawn
  };
  struct Drawn {  // what a lane draws, until it is known to count
    float log_prob;
    uint8_t pixel;
    bool finite;
  };

  // In shared memory, for each lane: parameters, as many floats of scratch as mixtures, Drawn. An odd number, so that
  // lanes use different banks.
  static LINPIX_HOST_DEVICE int floats_of_lane(const Model& m) {
    return ((m.head.groups + 1) * m.mixtures + (int)(sizeof(Drawn) / sizeof(float))) | 1;
  }
  static LINPIX_HOST_DEVICE int lanes(const Model& m) {  // fewer than 32 if there are very many parameters
    const int fit = (48 << 10) / (int)sizeof(float) / floats_of_lane(m);
    return fit < WARP ? fit : WARP;
  }
  static LINPIX_HOST_DEVICE int floats(const Model& m) {
    return m.background < 0 ? 0 : lanes(m) * floats_of_lane(m);
  }

  LINPIX_BODY run(Threads<BLOCK>& threads, const Pass& p) {
    const Model& m = p.model;
    const int64_t row = threads.x;
    const int hidden = m.background < 0 ? 0 : m.project.columns, width = m.head.groups * m.mixtures;
    const int together = lanes(m);
    const auto parameters = [&](int i) { return (float*)threads.shared + i * floats_of_lane(m); };
    const auto drawn = [&](int i) { return (Drawn*)(parameters(i) + width + m.mixtures); };
    threads.follow();
    const int64_t steps = p.rows.steps[row], position = p.rows.positions[row];
    int64_t taken = p.rows.taken[row];
    if (taken >= steps) return;
    const bool begun = !begins(p.rows, row, position + taken);
    const int64_t slot = p.rows.slots[row];
    const float* last = begun && p.pools.tokens[slot] > 0 ? p.rows.last + slot * hidden : nullptr;
    uint8_t* const image = p.rows.canvas + slot * m.subpixels;
    const bool* const known = p.rows.known + slot * m.subpixels;
    bool found = false;  // the next token; the same for all threads, as is `taken`
    do {
      typename Threads<BLOCK>::template Own<Lane> own;
      threads.each([&](int i) {
        Lane& l = own[i];
        l.stop = l.end = 0;
        l.following = 0;
        l.read = false;
        if (i >= together || taken + i >= steps) {
          l.stop = at(i);
          return;
        }
        const Token k = token_at(m, p.rows, row, position + taken + i);
        l.read = was_read(m, k);
        if (l.read) return;
        bool token = m.background < 0;
        for (int v = 0; v < m.values && !token; ++v) {
          const int32_t source = m.source[k.t * m.values + v];
          const bool follows = v >= m.values - m.following;
          const bool assumed = !follows && source >= position + taken && !known[source];
          const int64_t value = assumed ? m.background : value_of(m, k, image, v);
          token = value != m.background && value < UNKNOWN;
          l.following += follows && value == m.background;
        }
        if (token) l.stop = at(i) | 1;
      });
      threads.max_across([&](int i) -> uint32_t& { return own[i].stop; });
      threads.each([&](int i) {
        Lane& l = own[i];
        if (i >= first_of(l.stop) || l.read) return;
        const Token k = token_at(m, p.rows, row, position + taken + i);
        const auto compute = [&](int first, int end) {
          const float* weights = (const float*)m.skipped_head.weights;
          for (; first < end; first += COLUMNS) {
#pragma unroll
            for (float& x : l.value) x = 0;
#pragma unroll 4
            for (int c = 0; c < hidden; ++c) {
              const float feature = skipped_feature(m, k, l.following, last, c).x;
#pragma unroll
              for (int j = 0; j < COLUMNS; ++j)
                if (first + j < width) l.value[j] = multiply_add(feature, weights[c * width + first + j], l.value[j]);
            }
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
              if (first + j < width) parameters(i)[first + j] = l.value[j] + m.skipped_head.bias[first + j];
          }
        };
        const int ground = m.categorical ? m.background / COLUMNS * COLUMNS : 0;  // the others are seldom needed
        compute(ground, m.categorical ? ground + COLUMNS : width);
        Drawn& d = *drawn(i);
        d.finite = true;
        d.pixel = image[k.t];
        Rows rows = p.rows;
        rows.finite = &d.finite - row;  // so that what is forgotten does not count
        draw_token(m, rows, (int)row, k.t, &d.pixel, rows.log_probs ? &d.log_prob : nullptr, parameters(i),
                   parameters(i) + width, true, [&] { compute(0, width); });
        if (!known[k.t] && d.pixel != m.background) l.end = at(i);
      });
      threads.max_across([&](int i) -> uint32_t& { return own[i].end; });
      const int stop = first_of(own[0].stop), end = first_of(own[0].end) + 1, count = end < stop ? end : stop;
      threads.each([&](int i) {
        if (i >= count || own[i].read) return;
        const Drawn& d = *drawn(i);
        image[position + taken + i] = d.pixel;
        if (!d.finite) p.rows.finite[row] = false;
        if (p.rows.log_probs) p.rows.log_probs[row * p.rows.most_steps + taken + i] = d.log_prob;
      });
      threads.barrier();  // the next sub-pixels may look up what was drawn
      taken += count;
      found = count == stop && own[0].stop & 1;
    } while (!found && taken < steps && p.rows.count <= FEW);
    threads.each([&](int i) {
      if (found) {
        const Token k = token_at(m, p.rows, row, position + taken);
        look_up(m, k, image, i, p.buffers.sum + row * m.d_model);
      }
      if (i) return;
      p.rows.taken[row] = taken;
      p.buffers.skipped[row] = !found;
      if (!begun) p.pools.tokens[slot] = 0;
    });
  }

 private:
  // Numbers whose largest one is that of the first lane; their lowest bit is free. 0: of no lane.
  static LINPIX_INLINE uint32_t at(int lane) { return (uint32_t)(WARP - lane) << 1; }
  static LINPIX_INLINE int first_of(uint32_t largest) { return WARP - (int)(largest >> 1); }
};

// A warp for each row, after a pass of prefill or read: keeps what is needed of the row's last token, and counts its
// tokens.
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
        if (!p.buffers.skipped || !p.buffers.skipped[at]) tokens[i] = {at, tokens[i].count + 1};
    });
    if (p.model.background >= 0 || p.rows.features) {
      final_features(threads, own, call, [&](int i) { return tokens[i].last; }, features);
      threads.barrier();
    }
    threads.each([&](int i) {
      if (tokens[i].last < 0) return;
      if (p.model.background >= 0) keep(p, row_of(i), features(i), i % WARP);
      for (int c = i % WARP; p.rows.features && c < p.model.d_model; c += WARP)
        p.rows.features[row_of(i) * p.model.d_model + c] = features(i)[c];
      if (p.pools.tokens && i % WARP == 0) p.pools.tokens[p.rows.slots[row_of(i)]] += tokens[i].count;
    });
  }
};

}  // namespace linpix::LINPIX_ISA
