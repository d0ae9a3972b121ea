// The state kernel on the matrix units, for a state in float16 and heads of 32: a warp for each row and head.
//
// Nothing is added to S before a group is complete. Until then
// y = (q S + sum over waiting tokens j of (q . k_j) v_j) / (q . z + eps), which takes a sixteenth of the work of adding
// the waiting tokens to a copy of S. Queries and the weights q . k_j enter matrix instructions as sums of two numbers
// of 16 bits, so the rounding of operands does not show. S lies in memory in the order in which an instruction takes it
// (pack_state in model/packing.py), so it goes from memory to the matrix unit without an instruction between.
//
// Why it is fast: a token takes a warp some 560 instructions (880 where a group is complete), about as long as memory
// takes for the head. All that is read of the state is requested before any of it is used, and a multiprocessor holds
// 24 warps, which hide each other's waiting.
#pragma once

#include "../functions.h"
#include "attention.h"
#include "kernels.h"
#include "product.h"
#include "threads.h"

namespace linpix::LINPIX_ISA {

// T: type of y. ONE: a pass of one token, as in decode.
template <class T, bool ONE>
struct Recall {
  static constexpr int BLOCK = 4 * WARP, PER_SM = ONE ? 6 : 5;
  static constexpr int D = HALF_HEAD, TILES = D / WIDE;
  // A warp's shared memory: keys and values of a group, then four parts of the query. Rows of keys are 80 bytes apart,
  // of which 64 are used, so that eight of them lie in different banks.
  static constexpr int ROW = 80, VALUES = GROUP * ROW, QUERIES = 2 * VALUES, WARP_BYTES = QUERIES + 4 * 2 * D;

  struct Lane {
    Chunk S[TILES];
    float z, q, normaliser, scale, unit;  // q: mapped, of key dim `lane`; unit: the power of two that q is divided by
    uint32_t largest, number;             // bits of the largest q; number of the next token
    int64_t at;                           // index of the head's state
    int row, head, live, left;            // live: tokens within the row's steps; left: those that are still to come
    bool folds, completes;                // whether this token is folded in; whether it completes its group
  };
  struct Operands {  // of the matrix instructions, for one token
    uint32_t query[4][2][4];  // float16 and the rest, bfloat16 and the rest; in two steps of 16 key dims
    uint32_t key[4], value[4], weight[4], twice[2];
    float score[4], y[TILES][4];
  };

  LINPIX_BODY run(Threads<BLOCK>& threads, const AttendCall& call) {
    const Pass& p = call.pass;
    const Model& m = p.model;
    const uint32_t first = m.marginal ? 1 : 0;  // the first token that is folded in
    const bool* skipped = ONE ? nullptr : p.buffers.skipped;
    typename Threads<BLOCK>::template Own<Lane> own;

    threads.each([&](int i) {  // what the kernel before this one does not write
      Lane& l = own[i];
      const uint32_t number = (uint32_t)threads.x * (BLOCK / WARP) + i / WARP;
      const int lane = i % WARP;
      l.row = (int)(number / (uint32_t)m.heads);
      l.head = (int)(number % (uint32_t)m.heads);
      l.live = 0;
      l.number = 0;
      l.z = 0;
      l.at = 0;
      l.scale = 1;
      Chunk key{}, value{};
#pragma unroll
      for (Chunk& tile : l.S) tile = {};
      if (l.row < p.rows.count) {
        const int64_t slot = p.rows.slots[l.row], begun = begun_of(p, l.row), live = p.rows.steps[l.row] - begun;
        const int64_t position = (p.rows.positions ? p.rows.positions[l.row] : 0) + begun;
        l.number = (uint32_t)(p.pools.tokens ? load_fresh(p.pools.tokens + slot) : position);
        l.live = (int)(live < p.tokens ? live : p.tokens);
        if (ONE && p.buffers.skipped && load_fresh((const char*)p.buffers.skipped + l.row)) l.live = 0;
        l.at = (slot * m.layers + call.layer) * m.heads + l.head;
        l.scale = p.pools.scale[call.layer * m.heads + l.head];
        if (l.live > 0) {
          const int end = (int)(l.number % GROUP), pair = lane / 4;  // four lanes for each pair that waits
          const int begin = l.number - end < first && end ? (int)first : 0;
          if (begin <= pair && pair < end) {
            const char* from = (const char*)(p.pools.pairs + (l.at * GROUP + pair) * 2 * D) + lane % 4 * 16;
            key = *(const Chunk*)from;
            value = *(const Chunk*)(from + 2 * D);
          }
          if (l.number - end > first)  // else S has nothing of this image
#pragma unroll
            for (int t = 0; t < TILES; ++t) l.S[t] = load_streaming(state(p, l, lane) + t * WIDE * D);
          if (l.number > first) l.z = p.pools.z[l.at * D + lane];
        }
      }
      *(Chunk*)(memory(threads, i) + lane / 4 * ROW + lane % 4 * 16) = key;
      *(Chunk*)(memory(threads, i) + VALUES + lane / 4 * ROW + lane % 4 * 16) = value;
    });
    threads.follow();
    threads.warp_barrier();
    threads.each([&](int i) {
      Lane& l = own[i];
      l.left = l.live;
      if (!skipped) return;
      for (int j = 0; j < l.live; ++j) l.left -= skipped[(int64_t)l.row * p.tokens + j];
    });

    for (int j = 0; j < (ONE ? 1 : p.tokens); ++j) {
      threads.each([&](int i) {  // the token's own key and value
        Lane& l = own[i];
        const int lane = i % WARP;
        const int64_t token = (int64_t)l.row * p.tokens + j;
        l.folds = l.completes = false;
        l.q = 0;
        l.normaliser = 0;
        if (j < l.live && !(skipped && skipped[token])) {
          const uint32_t n = l.number++;
          --l.left;
          l.folds = n >= first;
          if (l.folds) {
            const float* from = p.buffers.qkv + (token * m.heads + l.head) * call.group + lane;
            const float q = from[0], k = from[D], v = from[2 * D];
            const bfloat16 key = rounded(phi(k).x);
            const int place = (int)(n % GROUP);
            l.completes = place == GROUP - 1;
            ((bfloat16*)(memory(threads, i) + place * ROW))[lane] = key;
            ((bfloat16*)(memory(threads, i) + VALUES + place * ROW))[lane] = rounded(v);
            l.z = l.z + to_float(key);
            l.q = phi(q).x;
            l.normaliser = l.q * l.z;
          }
        }
        l.largest = bits_of(l.q);
      });
      threads.max_across([&](int i) -> uint32_t& { return own[i].largest; });
#pragma unroll
      for (int stride = WARP / 2; stride >= 1; stride /= 2)
        threads.add_across(stride, [&](int i) -> float& { return own[i].normaliser; });
      threads.each([&](int i) {  // the query, divided so that the largest number is in 1 .. 2
        Lane& l = own[i];
        const int lane = i % WARP, place = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
        const uint32_t exponent = l.largest >> 23;
        l.unit = float_of(exponent << 23);
        const float x = l.q * float_of((254 - exponent) << 23);
        const float16 half = to_float16(x);
        const bfloat16 brain = rounded(x);
        uint16_t* to = (uint16_t*)(memory(threads, i) + QUERIES) + place;
        to[0] = half.bits;
        to[D] = to_float16(x - to_float(half)).bits;
        to[2 * D] = brain.bits;
        to[3 * D] = rounded(x - to_float(brain)).bits;
      });
      threads.warp_barrier();

      typename Threads<BLOCK>::template Own<Operands> operands;
      threads.each([&](int i) {  // the query is the first row of a matrix whose other rows are zero
        Operands& o = operands[i];
        const int lane = i % WARP;
#pragma unroll
        for (int which = 0; which < 4; ++which) {
          Chunk c{};
          if (lane < 4) c = *(const Chunk*)(memory(threads, i) + QUERIES + which * 2 * D + lane * 16);
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            uint32_t(&to)[4] = o.query[which][step];
            to[0] = c.word[2 * step], to[1] = 0, to[2] = c.word[2 * step + 1], to[3] = 0;
          }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          o.score[c] = 0;
#pragma unroll
          for (int t = 0; t < TILES; ++t) o.y[t][c] = 0;
        }
      });
      threads.template matrices<false>([&](int i) { return operands[i].key; }, [&](int i) {
        return memory(threads, i) + i % 8 * ROW + i % WARP / 8 * 16;
      });
      threads.template matrices<true>([&](int i) { return operands[i].value; }, [&](int i) {
        return memory(threads, i) + VALUES + i % 8 * ROW + i % WARP / 8 * 16;
      });
#pragma unroll
      for (int which = 2; which < 4; ++which)
#pragma unroll
        for (int step = 0; step < 2; ++step)
          threads.multiply([&](int i) { return operands[i].query[which][step]; },
                           [&](int i) { return operands[i].key + 2 * step; },
                           [&](int i) -> float(&)[4] { return operands[i].score; });
      threads.each([&](int i) {
        Operands& o = operands[i];
        const float inverse = 1 / own[i].scale, x = o.score[0] * inverse, y = o.score[1] * inverse;
        split_pair(x, y, o.weight[0], o.weight[2]);
        o.weight[1] = o.weight[3] = 0;
      });
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        threads.each([&](int i) { operands[i].twice[0] = operands[i].twice[1] = operands[i].value[t]; });
        threads.multiply([&](int i) { return operands[i].weight; },
                         [&](int i) { return operands[i].twice; },
                         [&](int i) -> float(&)[4] { return operands[i].y[t]; });
#pragma unroll
        for (int which = 0; which < 2; ++which)
#pragma unroll
          for (int step = 0; step < 2; ++step)
            threads.template multiply<float16>([&](int i) { return operands[i].query[which][step]; },
                                               [&](int i) { return own[i].S[t].word + 2 * step; },
                                               [&](int i) -> float(&)[4] { return operands[i].y[t]; });
      }
      threads.each([&](int i) {
        const Lane& l = own[i];
        const int lane = i % WARP;
        if (j >= l.live || lane >= 4) return;
        const float factor = l.scale * l.unit / (l.normaliser + m.eps);
        T* to = (T*)p.buffers.y + ((int64_t)l.row * p.tokens + j) * call.depth + l.head * D + lane * 2;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          const float(&y)[4] = operands[i].y[t];
          put_pair(to + t * WIDE, l.folds ? y[0] * factor : 0, l.folds ? y[1] * factor : 0);
        }
      });
      threads.each([&](int i) {  // the pair waits, unless it completes its group
        const Lane& l = own[i];
        const int lane = i % WARP, place = (int)((l.number - 1) % GROUP);
        if (!l.folds || l.completes || lane >= 8) return;
        const char* from = memory(threads, i) + (lane < 4 ? 0 : VALUES) + place * ROW + lane % 4 * 16;
        *(Chunk*)((char*)(p.pools.pairs + (l.at * GROUP + place) * 2 * D) + lane * 16) = *(const Chunk*)from;
      });
      if (threads.some_warp([&](int i) { return own[i].completes; })) add_group(threads, call, own, operands);
      threads.warp_barrier();
    }
    threads.each([&](int i) {
      const Lane& l = own[i];
      if (l.live > 0) p.pools.z[l.at * D + i % WARP] = l.z;
    });
  }

 private:
  static LINPIX_INLINE char* memory(Threads<BLOCK>& threads, int i) { return threads.shared + i / WARP * WARP_BYTES; }
  static LINPIX_INLINE bool clamp(float& x) {  // to what float16 can hold; returns whether it had to
    const bool beyond = magnitude(x).x > 65504;
    if (beyond) x = x < 0 ? -65504.0f : 65504.0f;
    return beyond;
  }
  static LINPIX_INLINE uint16_t* state(const Pass& p, const Lane& l, int lane) {
    return (uint16_t*)p.pools.S + l.at * D * D + lane * 8;
  }

  // S += sum of k v^T over the eight tokens of a complete group; as sums of v k^T, which lie as S does.
  template <class Own, class OwnOperands>
  LINPIX_BODY add_group(Threads<BLOCK>& threads, const AttendCall& call, Own& own, OwnOperands& operands) {
    const Pass& p = call.pass;
    threads.template matrices<true>([&](int i) { return operands[i].key; }, [&](int i) {
      return memory(threads, i) + i % 8 * ROW + i % WARP / 8 * 16;
    });
    typename Threads<BLOCK>::template Own<int> clamped;
    threads.each([&](int i) { clamped[i] = 0; });
#pragma unroll
    for (int pair = 0; pair < TILES / 2; ++pair)
#pragma unroll
      for (int d = 0; d < TILES; ++d) {
        threads.each([&](int i) {  // eight tokens are half of what an instruction multiplies
          Operands& o = operands[i];
#pragma unroll
          for (int c = 0; c < 4; ++c) o.score[c] = 0, o.weight[c] = c < 2 ? o.value[2 * pair + c] : 0;
          o.twice[0] = o.key[d], o.twice[1] = 0;
        });
        threads.multiply([&](int i) { return operands[i].weight; }, [&](int i) { return operands[i].twice; },
                         [&](int i) -> float(&)[4] { return operands[i].score; });
        threads.each([&](int i) {
          Lane& l = own[i];
          if (!l.completes) return;
          const float inverse = 1 / l.scale;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t& word = l.S[2 * pair + half].word[d];
            const float* change = operands[i].score + 2 * half;
            float x = multiply_add(change[0], inverse, to_float(float16{(uint16_t)word}));
            float y = multiply_add(change[1], inverse, to_float(float16{(uint16_t)(word >> 16)}));
            clamped[i] += clamp(x) + clamp(y);
            word = to_float16(x).bits | (uint32_t)to_float16(y).bits << 16;
          }
        });
      }
    threads.warp_barrier();  // other lanes read what is cleared below
    threads.each([&](int i) {
      Lane& l = own[i];
      const int lane = i % WARP;
      if (!l.completes) return;
      if (clamped[i]) count(p.pools.saturated, clamped[i]);
      if (l.left < GROUP)  // no later token of this pass completes a group
#pragma unroll
        for (int t = 0; t < TILES; ++t) store_streaming(state(p, l, lane) + t * WIDE * D, l.S[t]);
      if (ONE) return;
      *(Chunk*)(memory(threads, i) + lane / 4 * ROW + lane % 4 * 16) = Chunk{};
      *(Chunk*)(memory(threads, i) + VALUES + lane / 4 * ROW + lane % 4 * 16) = Chunk{};
    });
  }
};

}  // namespace linpix::LINPIX_ISA
