// The state kernel in float32: linear attention on the state of a slot, one token after the other, a warp for each row
// and head. recall.h has that of a state in float16.
//
// Why it is fast: reading and writing the state is most of its work. A warp requests all of S (D x M) in 16-byte chunks
// before it uses the first, and uses every sector that is fetched; on Hopper and later, while the qkv product is still
// running. S stays in registers for all tokens of the pass, and is written back once.
//
// A lane has one chunk in each of its rows of S. Lanes of a group share their rows (key dims); lanes with the same
// place in their groups share their columns (value dims).
#pragma once

#include "../functions.h"
#include "kernels.h"
#include "threads.h"

namespace linpix::LINPIX_ISA {

// N neighbours, in as few loads as possible. Stores are one for each element, as the machine code shows.
template <class V, int N>
struct alignas(N * sizeof(V) < 16 ? N * sizeof(V) : 16) Run {
  V x[N];
  static LINPIX_INLINE Run& at(const V* place) { return *(Run*)place; }
};

// Pass::begun, for what is read before `follow`.
LINPIX_INLINE int64_t begun_of(const Pass& p, int64_t row) {
  return p.rows.taken ? load_fresh(p.rows.taken + row) : p.step;
}

// T: type of y. D: key dim and value dim.
template <class T, int D>
struct Attend {
  static constexpr int BLOCK = 4 * WARP, PER_SM = 5;
  static constexpr int E = 4;                // numbers of a chunk
  static constexpr int LANES_A_ROW = D / E;  // a group: lanes that share their rows
  static constexpr int GROUPS = WARP / LANES_A_ROW < D ? WARP / LANES_A_ROW : D;
  static constexpr int R = D / GROUPS;       // rows of S in a lane
  static_assert(LANES_A_ROW >= 1 && LANES_A_ROW * GROUPS <= WARP && R * GROUPS == D, "heads that a warp can share out");

  struct Lane {
    float S[R][E], z[R], y[E], normaliser;
    int64_t at, number;             // at: index of the head's state; number: of the next token
    int head, live;                 // live: tokens within the row's steps
    int group, place;               // the lane's group, and its place there
    bool folds, changed;            // whether this token is folded in; whether any is
  };

  LINPIX_BODY run(Threads<BLOCK>& threads, const AttendCall& call) {
    const Pass& p = call.pass;
    const Model& m = p.model;
    const int64_t first = m.marginal ? 1 : 0;  // the first token that is folded in
    const int64_t row = threads.x;
    typename Threads<BLOCK>::template Own<Lane> own;

    threads.each([&](int i) {  // what the kernel before this one does not write: the state, and how far the row is
      Lane& l = own[i];
      l.head = threads.y * (BLOCK / WARP) + i / WARP;
      l.place = i % WARP % LANES_A_ROW;
      l.group = i % WARP / LANES_A_ROW;
      l.live = 0;
      l.changed = false;
      if (l.head >= m.heads || l.group >= GROUPS) return;
      const int64_t slot = p.rows.slots[row], begun = begun_of(p, row), live = p.rows.steps[row] - begun;
      l.number = p.pools.tokens ? load_fresh(p.pools.tokens + slot) : (p.rows.positions ? p.rows.positions[row] : 0) + begun;
      l.live = (int)(live < p.tokens ? live : p.tokens);
      l.at = (slot * m.layers + call.layer) * m.heads + l.head;
      const bool filled = l.live > 0 && l.number > first;  // else what lies there is of another image
      Chunk chunk[R];
#pragma unroll
      for (int r = 0; r < R; ++r) chunk[r] = filled ? load_streaming(state(p, l, r)) : Chunk{};
      const Run<float, R> z = filled ? Run<float, R>::at(p.pools.z + l.at * D + l.group * R) : Run<float, R>{};
#pragma unroll
      for (int r = 0; r < R; ++r) {
        for (int e = 0; e < E; ++e) l.S[r][e] = float_of(chunk[r].word[e]);
        l.z[r] = z.x[r];
      }
    });

    threads.follow();
    for (int j = 0; j < p.tokens; ++j) {
      threads.each([&](int i) {
        Lane& l = own[i];
        for (int e = 0; e < E; ++e) l.y[e] = 0;
        l.normaliser = 0;
        l.folds = false;
        if (j >= l.live || (p.buffers.skipped && p.buffers.skipped[row * p.tokens + j])) return;
        if (l.number++ < first) return;
        l.folds = l.changed = true;
        const float* q = p.buffers.qkv + (row * p.tokens + j) * m.heads * call.group + l.head * call.group;
        const Run<float, R> queries = Run<float, R>::at(q + l.group * R), keys = Run<float, R>::at(q + D + l.group * R);
        const Run<float, E> value = Run<float, E>::at(q + 2 * D + l.place * E);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const float query = phi(queries.x[r]).x, key = phi(keys.x[r]).x;
          l.z[r] = l.z[r] + key;
          l.normaliser = multiply_add(query, l.z[r], l.normaliser);
          for (int e = 0; e < E; ++e) {
            l.S[r][e] = multiply_add(key, value.x[e], l.S[r][e]);
            l.y[e] = multiply_add(query, l.S[r][e], l.y[e]);
          }
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
        Run<T, E>::at((T*)p.buffers.y + (row * p.tokens + j) * call.depth + l.head * D + l.place * E) = y;
      });
    }
    threads.each([&](int i) {
      const Lane& l = own[i];
      if (!l.changed) return;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float(&S)[E] = l.S[r];
        store_streaming(state(p, l, r), {{bits_of(S[0]), bits_of(S[1]), bits_of(S[2]), bits_of(S[3])}});
        if (l.place == 0) p.pools.z[l.at * D + l.group * R + r] = l.z[r];
      }
    });
  }

 private:
  static LINPIX_INLINE float* state(const Pass& p, const Lane& l, int r) {
    return (float*)p.pools.S + l.at * D * D + (l.group * R + r) * D + l.place * E;
  }
};

}  // namespace linpix::LINPIX_ISA
