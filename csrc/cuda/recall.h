// The state kernel on the matrix units, for a state in float16 and heads of 32: a warp for each row and head.
//
// Nothing is added to S before a group is complete. Until then
// y = (q S + sum over waiting tokens j of (q . k_j) v_j) / (q . z + eps), which takes a sixteenth of the work of adding
// the waiting tokens to a copy of S. Queries and the weights q . k_j enter matrix instructions as sums of two numbers
// of 16 bits, so the rounding of operands does not show: they are two rows of one instruction, or two columns. S lies
// in memory in the order in which an instruction takes it (pack_state in model/packing.py), so it goes from memory to
// the matrix unit without an instruction between.
//
// Why it is fast: a token takes a warp some 380 instructions (690 where a group is complete), which is less time than
// memory takes for the head. All that is read of the state is requested before any of it is used, and a multiprocessor
// holds 36 warps, which hide each other's waiting.
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
  static constexpr int BLOCK = 4 * WARP, PER_SM = ONE ? 9 : 6;
  static constexpr int D = HALF_HEAD, STATE_BYTES = D * D * 2, HEADS = BLOCK / WARP;
  // A warp's shared memory: keys and values of a group, then four parts of the query. Rows of keys are 80 bytes apart,
  // of which 64 are used, so that eight of them lie in different banks. Value m is number m % 4 * 8 + m / 4 of its row.
  static constexpr int ROW = 80, VALUES = GROUP * ROW, QUERIES = 2 * VALUES, WARP_BYTES = QUERIES + 4 * 2 * D;

  struct Lane {
    Chunk S[2][2];                        // parts of the value dims, steps of the key dims: see pack_state
    float z, q, normaliser, scale, unit;  // q: mapped, of key dim `lane`; unit: the power of two that q is divided by
    uint32_t largest, number;             // bits of the largest q; number of the next token
    uint32_t at;                          // index of the head's state
    int head, live, left;                 // live: tokens within the row's steps; left: those that are still to come
    int place;                            // of this token in its group; below 0 it is not folded in
    LINPIX_INLINE bool completes() const { return place == GROUP - 1; }
  };
  struct Operands {  // of the matrix instructions, for one token
    Chunk half, brain;  // the query in float16 or bfloat16, in lanes 0 to 3; in lanes 4 to 7 the rest
    uint32_t key[4], value[4], right[2][2];
    float score[2][4], weight[2], y[2][4];
  };

  LINPIX_BODY run(Threads<BLOCK>& threads, const AttendCall& call) {
    const Pass& p = call.pass;
    const Model& m = p.model;
    const uint32_t first = m.marginal ? 1 : 0;  // the first token that is folded in
    const bool* skipped = ONE ? nullptr : p.buffers.skipped;
    const int tokens = ONE ? 1 : p.tokens;
    const int64_t row = threads.x;
    typename Threads<BLOCK>::template Own<Lane> own;

    threads.each([&](int i) {  // what the kernel before this one does not write
      Lane& l = own[i];
      const int lane = i % WARP;
      const int64_t slot = p.rows.slots[row], begun = begun_of(p, row), live = p.rows.steps[row] - begun;
      const int64_t position = (p.rows.positions ? p.rows.positions[row] : 0) + begun;
      l.number = (uint32_t)(p.pools.tokens ? load_fresh(p.pools.tokens + slot) : position);
      l.live = (int)(live < tokens ? live : tokens);
      l.head = threads.y * HEADS + i / WARP;
      if (l.head >= m.heads) l.live = 0;
      if (ONE && p.buffers.skipped && load_fresh((const char*)p.buffers.skipped + row)) l.live = 0;
      l.at = ((uint32_t)slot * m.layers + call.layer) * m.heads + l.head;
      l.scale = l.live > 0 ? p.pools.scale[call.layer * m.heads + l.head] : 1;
      const uint32_t pair = lane / 4;  // four lanes for each pair that waits
      const uint32_t begin = l.number < GROUP ? first : 0, end = l.number % GROUP;
      const bool waits = l.live > 0 && begin <= pair && pair < end;
      const bool whole = l.live > 0 && l.number - end > first;  // else S has nothing of this image
      const char* const from = (const char*)(p.pools.pairs + ((size_t)l.at * GROUP + pair) * 2 * D) + lane % 4 * 16;
      const Chunk key = waits ? *(const Chunk*)from : Chunk{}, value = waits ? *(const Chunk*)(from + 2 * D) : Chunk{};
#pragma unroll
      for (int c = 0; c < 4; ++c)
        l.S[c / 2][c % 2] = whole ? load_streaming(state(p, l, lane) + c * WARP) : Chunk{};
      l.z = l.live > 0 && l.number > first ? p.pools.z[(size_t)l.at * D + lane] : 0;
      *(Chunk*)(memory(threads, i) + lane / 4 * ROW + lane % 4 * 16) = key;
      *(Chunk*)(memory(threads, i) + VALUES + lane / 4 * ROW + lane % 4 * 16) = value;
    });
    threads.follow();
    threads.warp_barrier();
    threads.each([&](int i) {
      Lane& l = own[i];
      l.left = l.live;
      if (!skipped) return;
      for (int j = 0; j < l.live; ++j) l.left -= skipped[row * tokens + j];
    });

    for (int j = 0; j < tokens; ++j) {
      const int64_t token = row * tokens + j;
      threads.each([&](int i) {  // the token's own key and value
        Lane& l = own[i];
        const int lane = i % WARP;
        l.place = -1;
        l.q = 0;
        l.normaliser = 0;
        if (j < l.live && !(skipped && skipped[token])) {
          const uint32_t n = l.number++;
          --l.left;
          if (n >= first) {
            const uint32_t at = (uint32_t)token * m.heads + l.head;
            const float* from = p.buffers.qkv + (size_t)at * (uint32_t)call.group + lane;
            const float q = from[0], k = from[D], v = from[2 * D];
            const bfloat16 key = rounded(phi(k).x);
            l.place = (int)(n % GROUP);
            ((bfloat16*)(memory(threads, i) + l.place * ROW))[lane] = key;
            ((bfloat16*)(memory(threads, i) + VALUES + l.place * ROW))[lane % 4 * 8 + lane / 4] = rounded(v);
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
        const int lane = i % WARP, word = lane / 16 + lane / 8 % 2 * 2, place = lane % 8 / 2 * 8 + word * 2 + lane % 2;
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
      threads.each([&](int i) {
        Operands& o = operands[i];
        const char* const query = memory(threads, i) + QUERIES + i % WARP * 16;
        o.half = o.brain = {};
        if (i % WARP < 8) o.half = *(const Chunk*)query, o.brain = *(const Chunk*)(query + 2 * 2 * D);
#pragma unroll
        for (int c = 0; c < 8; ++c) o.score[c / 4][c % 4] = o.y[c / 4][c % 4] = 0;
      });
      threads.template matrices<false>([&](int i) { return operands[i].key; }, [&](int i) {
        return memory(threads, i) + i % 8 * ROW + i % WARP / 8 * 16;
      });
      threads.template matrices<true>([&](int i) { return operands[i].value; }, [&](int i) {
        return memory(threads, i) + VALUES + i % 8 * ROW + i % WARP / 8 * 16;
      });
      // q . k_j: on the left, rows 0 and 1 are 16 key dims of the query and of its rest, rows 8 and 9 the other 16. So
      // rows 0 and 1 of the first product count, and rows 8 and 9 of the second.
#pragma unroll
      for (int step = 0; step < 2; ++step)
        threads.multiply([&](int i) { return operands[i].brain.word; },
                         [&](int i) { return operands[i].key + 2 * step; },
                         [&](int i) -> float(&)[4] { return operands[i].score[step]; });
      threads.each([&](int i) {
        Operands& o = operands[i];
        for (int c = 0; c < 2; ++c) o.weight[c] = o.score[0][c] + o.score[1][2 + c];
      });
#pragma unroll
      for (int c = 0; c < 2; ++c) threads.add_across(4, [&](int i) -> float& { return operands[i].weight[c]; });
      threads.each([&](int i) {
        Operands& o = operands[i];
        const float inverse = inverse_of(own[i].scale);
        uint32_t pair, rest;
        split_pair(o.weight[0] * inverse, o.weight[1] * inverse, pair, rest);
        o.right[0][0] = o.right[1][1] = i % WARP < 4 ? pair : rest;  // lanes beyond the eighth have zeros
        o.right[0][1] = o.right[1][0] = 0;
      });
      // y: on the right, column 0 is the query or the weights, column 1 their rests. On the left are 16 value dims, but
      // of waiting tokens all 32, as if the other 16 were of eight further tokens, whose weights are zero.
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const auto y = [&](int i) -> float(&)[4] { return operands[i].y[part]; };
        threads.multiply([&](int i) { return operands[i].value; }, [&](int i) { return operands[i].right[part]; }, y);
#pragma unroll
        for (int step = 0; step < 2; ++step)
          threads.template multiply<float16>([&](int i) { return own[i].S[part][step].word; },
                                             [&](int i) { return operands[i].half.word + 2 * step; }, y);
      }
      threads.each([&](int i) {
        const Lane& l = own[i];
        const int lane = i % WARP;
        if (j >= l.live || lane % 4) return;
        const float factor = l.place < 0 ? 0 : l.scale * l.unit / (l.normaliser + m.eps);
        T* to = (T*)p.buffers.y + (size_t)(uint32_t)token * (uint32_t)call.depth + l.head * D + lane;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const float(&y)[4] = operands[i].y[part];
          put_pair(to + 2 * part, (y[0] + y[1]) * factor, (y[2] + y[3]) * factor);
        }
      });
      threads.each([&](int i) {  // the pair waits, unless it completes its group
        const Lane& l = own[i];
        const int lane = i % WARP;
        if (l.place < 0 || l.completes() || lane >= 8) return;
        const char* from = memory(threads, i) + (lane < 4 ? 0 : VALUES) + l.place * ROW + lane % 4 * 16;
        *(Chunk*)((char*)(p.pools.pairs + ((size_t)l.at * GROUP + l.place) * 2 * D) + lane * 16) = *(const Chunk*)from;
      });
      if (threads.some_warp([&](int i) { return own[i].completes(); })) add_group(threads, call, own, operands);
      threads.warp_barrier();
    }
    threads.each([&](int i) {
      const Lane& l = own[i];
      if (l.live > 0) p.pools.z[(size_t)l.at * D + i % WARP] = l.z;
    });
  }

 private:
  static LINPIX_INLINE char* memory(Threads<BLOCK>& threads, int i) { return threads.shared + i / WARP * WARP_BYTES; }
  static LINPIX_INLINE bool clamp(float& x) {  // to what float16 can hold; returns whether it had to
    const bool beyond = magnitude(x).x > 65504;
    if (beyond) x = x < 0 ? -65504.0f : 65504.0f;
    return beyond;
  }
  static LINPIX_INLINE Chunk* state(const Pass& p, const Lane& l, int lane) {
    return (Chunk*)((char*)p.pools.S + (size_t)l.at * STATE_BYTES) + lane;
  }
  // By the exponent: a division is ten instructions.
  static LINPIX_INLINE float inverse_of(float power_of_two) { return float_of((254u << 23) - bits_of(power_of_two)); }

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
    for (int part = 0; part < 2; ++part)
#pragma unroll
      for (int d = 0; d < D / WIDE; ++d) {
        threads.each([&](int i) {  // eight tokens are half of what an instruction multiplies: as for y
          Operands& o = operands[i];
#pragma unroll
          for (float& sum : o.score[0]) sum = 0;
          o.right[0][part] = o.key[d], o.right[0][1 - part] = 0;
        });
        threads.multiply([&](int i) { return operands[i].value; }, [&](int i) { return operands[i].right[0]; },
                         [&](int i) -> float(&)[4] { return operands[i].score[0]; });
        threads.each([&](int i) {
          Lane& l = own[i];
          if (!l.completes()) return;
          const float inverse = inverse_of(l.scale);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t& word = l.S[part][d % 2].word[d / 2 * 2 + half];
            const float* change = operands[i].score[0] + 2 * half;
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
      if (!l.completes()) return;
      if (clamped[i]) count(p.pools.saturated, clamped[i]);
      if (l.left < GROUP)  // no later token of this pass completes a group
#pragma unroll
        for (int c = 0; c < 4; ++c) store_streaming(state(p, l, lane) + c * WARP, l.S[c / 2][c % 2]);
      if (ONE) return;
      *(Chunk*)(memory(threads, i) + lane / 4 * ROW + lane % 4 * 16) = Chunk{};
      *(Chunk*)(memory(threads, i) + VALUES + lane / 4 * ROW + lane % 4 * 16) = Chunk{};
    });
  }
};

}  // namespace linpix::LINPIX_ISA
