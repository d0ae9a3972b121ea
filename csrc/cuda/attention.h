// The state kernel: linear attention on the state of a slot, one token after the other, a warp for each row and head.
//
// Why it is fast: reading and writing the state is most of its work, in float32. A warp requests eight 16-byte chunks a
// lane of S (D x M) before it uses the first, and uses every sector that is fetched; on Hopper and later, while the qkv
// product is still running. S stays in registers for all tokens of the pass, and is written back once, if a group of
// tokens has become complete. With float16 and deferred tokens, it waits for the pairs first, then for S, then for the
// other pairs, and each step adds all waiting pairs again: recall.h does better.
//
// A lane has one chunk in each of its rows of S. Lanes of a group share their rows (key dims); lanes with the same
// place in their groups share their columns (value dims).
#pragma once

#include "../functions.h"
#include "kernels.h"
#include "threads.h"

namespace linpix::LINPIX_ISA {

// The fold schedule. Token number n is number waiting_at of its group, and finds tokens folded .. n-1 in pairs. It
// completes its group if the next token begins another.
LINPIX_INLINE int waiting_at(int64_t n, int defer) { return (int)((uint32_t)n % (uint32_t)defer); }
LINPIX_INLINE int64_t folded(int64_t n, int defer) { return n - waiting_at(n, defer); }
LINPIX_INLINE bool completes(int64_t n, int defer) { return waiting_at(n, defer) == defer - 1; }

// N neighbours, in as few loads as possible. Stores are one for each element, as the machine code shows.
template <class V, int N>
struct alignas(N * sizeof(V) < 16 ? N * sizeof(V) : 16) Run {
  V x[N];
  static LINPIX_INLINE Run& at(const V* place) { return *(Run*)place; }
};

template <class Element>
struct Stored;  // how elements of S are stored
template <>
struct Stored<float> {
  static LINPIX_INLINE void read(const Chunk& from, float (&to)[4], float) {
    for (int e = 0; e < 4; ++e) to[e] = float_of(from.word[e]);
  }
  static LINPIX_INLINE int round(float (&)[4], float) { return 0; }
  static LINPIX_INLINE Chunk write(const float (&from)[4], float) {
    return {{bits_of(from[0]), bits_of(from[1]), bits_of(from[2]), bits_of(from[3])}};
  }
};
template <>
struct Stored<float16> {
  static constexpr float MAX_HALF = 65504;
  static LINPIX_INLINE void read(const Chunk& from, float (&to)[8], float scale) {
    for (int e = 0; e < 8; ++e) to[e] = widened(float16{(uint16_t)(from.word[e / 2] >> e % 2 * 16)}) * scale;
  }
  static LINPIX_INLINE bool clamp(float& x) {  // returns whether it had to
    const bool beyond = magnitude(x).x > MAX_HALF;
    if (beyond) x = x < 0 ? -MAX_HALF : MAX_HALF;
    return beyond;
  }
  // Rounds to what read would return; returns how many elements had to be clamped.
  static LINPIX_INLINE int round(float (&x)[8], float scale) {
    int clamped = 0;
    for (int e = 0; e < 8; ++e) {
      float y = x[e] * (1 / scale);  // exact: a power of two
      clamped += clamp(y);
      x[e] = widened(halved(y)) * scale;
    }
    return clamped;
  }
  static LINPIX_INLINE Chunk write(const float (&from)[8], float scale) {
    Chunk c;
    for (int w = 0; w < 4; ++w)
      c.word[w] = halved(from[2 * w] * (1 / scale)).bits | (uint32_t)halved(from[2 * w + 1] * (1 / scale)).bits << 16;
    return c;
  }
};

// T: type of y. Element: type in which S is stored.
template <class T, class Element, int D, int M>
struct Attend {
  static constexpr int BLOCK = 4 * WARP, PER_SM = 4;
  static constexpr int E = 16 / (int)sizeof(Element);  // elements of a chunk
  static constexpr int LANES_A_ROW = M / E;             // a group: lanes that share their rows
  static constexpr int GROUPS = WARP / LANES_A_ROW < D ? WARP / LANES_A_ROW : D;
  static constexpr int R = D / GROUPS;                  // rows of S in a lane
  static_assert(LANES_A_ROW >= 1 && LANES_A_ROW * GROUPS <= WARP && R * GROUPS == D, "heads that a warp can share out");

  static constexpr int PART = R < 8 ? R : 8;           // chunks that are requested before the first is used
  static constexpr int AT_ONCE = E == 8 ? 4 : 2;       // pairs likewise

  struct Waiting {
    Run<uint16_t, R> keys[AT_ONCE];
    Run<uint16_t, E> value[AT_ONCE];
  };
  struct Lane {
    float S[R][E], z[R], y[E], normaliser;
    int64_t row, head, at, number;  // at: index of the head's state; number: of the next token
    int live, left;                 // tokens within the row's steps; those of them that take part and are to come
    int group, place;               // the lane's group, and its place there
    bool folds;                     // whether this token is folded in
    float scale;
  };

  LINPIX_BODY run(Threads<BLOCK>& threads, const AttendCall& call) {
    const Pass& p = call.pass;
    const Model& m = p.model;
    const int64_t first = m.marginal ? 1 : 0;  // the first token that is folded in
    const int C = p.pools.defer;
    typename Threads<BLOCK>::template Own<Lane> own;

    threads.each([&](int i) {  // what the kernel before this one does not write: the state, and how far the row is
      Lane& l = own[i];
      const int64_t number = threads.x * (BLOCK / WARP) + i / WARP;
      l.row = number / m.heads;
      l.head = number % m.heads;
      l.place = i % WARP % LANES_A_ROW;
      l.group = i % WARP / LANES_A_ROW;
      l.live = 0;
      l.number = 0;
      if (l.row >= p.rows.count || l.group >= GROUPS) return;
      const int64_t slot = p.rows.slots[l.row], begun = p.begun(l.row), live = p.rows.steps[l.row] - begun;
      l.number = p.pools.tokens ? p.pools.tokens[slot] : (p.rows.positions ? p.rows.positions[l.row] : 0) + begun;
      l.live = (int)(live < p.tokens ? live : p.tokens);
      l.at = (slot * m.layers + call.layer) * m.heads + l.head;
      l.scale = p.pools.scale ? p.pools.scale[call.layer * m.heads + l.head] : 1.0f;
      if (l.live <= 0) return;
      const int end = waiting_at(l.number, C);  // this group's pairs, without a first token that is not folded in
      const int begin = folded(l.number, C) < first && end ? (int)first : 0;
      // Written so that all that is read is requested before any of it is used. The compiler keeps to that for S in
      // float32; it unpacks pairs right behind their loads. If nothing has been folded into S yet, its contents are
      // those of another image, and are not read.
      Waiting waiting;
      if (begin < end) ask(waiting, p, l, begin, end);
      const bool filled = folded(l.number, C) > first;
#pragma unroll
      for (int part = 0; part < R; part += PART) {
        Chunk chunk[PART];
#pragma unroll
        for (int r = 0; r < PART; ++r) chunk[r] = {};
        if (filled) {
#pragma unroll
          for (int r = 0; r < PART; ++r) chunk[r] = load_streaming(state(p, l, part + r));
        }
#pragma unroll
        for (int r = 0; r < PART; ++r) Stored<Element>::read(chunk[r], l.S[part + r], l.scale);
      }
#pragma unroll
      for (int r = 0; r < R; ++r) l.z[r] = 0;
      if (l.number > first) {
        const Run<float, R> z = Run<float, R>::at(p.pools.z + l.at * D + l.group * R);
#pragma unroll
        for (int r = 0; r < R; ++r) l.z[r] = z.x[r];
      }
      for (int i = begin; i < end;) {
        fold(waiting, l, end - i);
        if ((i += AT_ONCE) < end) ask(waiting, p, l, i, end);
      }
    });

    threads.follow();
    threads.each([&](int i) {
      Lane& l = own[i];
      l.left = l.live;
      if (!p.buffers.skipped) return;
      for (int j = 0; j < l.live; ++j) l.left -= p.buffers.skipped[l.row * p.tokens + j];
    });
    for (int j = 0; j < p.tokens; ++j) {
      threads.each([&](int i) {
        Lane& l = own[i];
        for (int e = 0; e < E; ++e) l.y[e] = 0;
        l.normaliser = 0;
        l.folds = false;
        if (j >= l.live || (p.buffers.skipped && p.buffers.skipped[l.row * p.tokens + j])) return;
        const int64_t n = l.number++;
        --l.left;
        l.folds = n >= first;
        if (!l.folds) return;
        const float* q = p.buffers.qkv + (l.row * p.tokens + j) * m.heads * call.group + l.head * call.group;
        const Run<float, R> queries = Run<float, R>::at(q + l.group * R), keys = Run<float, R>::at(q + D + l.group * R);
        Run<float, E> value = Run<float, E>::at(q + 2 * D + l.place * E);
        Run<uint16_t, R> rounded_keys;
        Run<uint16_t, E> rounded_value;
#pragma unroll
        for (int e = 0; e < E; ++e) {
          rounded_value.x[e] = rounded(value.x[e]).bits;
          if (C > 1) value.x[e] = widened(bfloat16{rounded_value.x[e]});  // rounded as later steps will find it
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const float mapped_q = phi(queries.x[r]).x, mapped_k = phi(keys.x[r]).x;
          rounded_keys.x[r] = rounded(mapped_k).bits;
          const float key = C > 1 ? widened(bfloat16{rounded_keys.x[r]}) : mapped_k;
          l.z[r] = l.z[r] + key;
          l.normaliser = multiply_add(mapped_q, l.z[r], l.normaliser);
          for (int e = 0; e < E; ++e) {
            l.S[r][e] = multiply_add(key, value.x[e], l.S[r][e]);
            l.y[e] = multiply_add(mapped_q, l.S[r][e], l.y[e]);
          }
        }
        if (!completes(n, C)) {
          uint16_t* to = pair(p, l, waiting_at(n, C));
          if (l.place == 0) Run<uint16_t, R>::at(to + l.group * R) = rounded_keys;
          if (l.group == 0) Run<uint16_t, E>::at(to + D + l.place * E) = rounded_value;
        } else {
          int clamped = 0;
#pragma unroll
          for (int r = 0; r < R; ++r) {
            clamped += Stored<Element>::round(l.S[r], l.scale);
            if (l.left < C)  // no later token of this pass completes a group
              store_streaming(state(p, l, r), Stored<Element>::write(l.S[r], l.scale));
          }
          if (clamped) count(p.pools.saturated, clamped);
        }
      });
#pragma unroll
      for (int stride = LANES_A_ROW; stride < LANES_A_ROW * GROUPS; stride *= 2) {
        threads.add_across(stride, [&](int i) -> float& { return own[i].normaliser; });
#pragma unroll
        for (int e = 0; e < E; ++e) threads.add_across(stride, [&](int i) -> float& { return own[i].y[e]; });
      }
      threads.each([&](int i) {
        const Lane& l = own[i];
        if (j >= l.live || l.group) return;
        Run<T, E> y;
#pragma unroll
        for (int e = 0; e < E; ++e) store(y.x + e, l.folds ? l.y[e] / (l.normaliser + m.eps) : 0);
        Run<T, E>::at((T*)p.buffers.y + (l.row * p.tokens + j) * call.depth + l.head * M + l.place * E) = y;
      });
    }
    threads.each([&](int i) {
      const Lane& l = own[i];
      if (l.live <= 0 || l.place) return;
      Run<float, R>& z = Run<float, R>::at(p.pools.z + l.at * D + l.group * R);
#pragma unroll
      for (int r = 0; r < R; ++r) z.x[r] = l.z[r];
    });
  }

 private:
  static LINPIX_INLINE Element* state(const Pass& p, const Lane& l, int r) {
    return (Element*)p.pools.S + l.at * D * M + (l.group * R + r) * M + l.place * E;
  }
  static LINPIX_INLINE uint16_t* pair(const Pass& p, const Lane& l, int waiting) {
    return p.pools.pairs + (l.at * p.pools.defer + waiting) * (D + M);
  }
  // Requests AT_ONCE pairs from number `begin` on. If there are fewer, the last one is read repeatedly, so that no load
  // depends on a branch.
  static LINPIX_INLINE void ask(Waiting& w, const Pass& p, const Lane& l, int begin, int end) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const uint16_t* from = pair(p, l, begin + i < end ? begin + i : end - 1);
      w.keys[i] = Run<uint16_t, R>::at(from + l.group * R);
      w.value[i] = Run<uint16_t, E>::at(from + D + l.place * E);
    }
  }
  // Folds the first `count` of them into S, AT_ONCE at most.
  static LINPIX_INLINE void fold(const Waiting& w, Lane& l, int count) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (i < count)
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int e = 0; e < E; ++e)
            l.S[r][e] = multiply_add(widened(bfloat16{w.keys[i].x[r]}), widened(bfloat16{w.value[i].x[e]}), l.S[r][e]);
  }
};

}  // namespace linpix::LINPIX_ISA
