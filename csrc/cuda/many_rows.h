// The product of many rows in bfloat16. Each row is normalised once, by a kernel of its own before it (norm.h), and not
// by each block of columns as in product.h.
//
// An output takes k in the order of product.h, with the same instruction, so the bits are the same there and here,
// whatever the tile.
//
// Why it is fast: rows and weights stream through shared memory several stages ahead of their use, so a multiprocessor
// holds two blocks whatever the depth. What is added to the sums is requested for a whole row of tiles before the first
// result is stored, since the compiler must assume that a store changes it. Buffers are padded, so no row is checked.
#pragma once

#include "../functions.h"
#include "kernels.h"
#include "product.h"
#include "threads.h"

namespace linpix::LINPIX_ISA {

// A block: WM x WN warps, each with MT x NT tiles of sums. STAGES: of rows and weights in shared memory.
template <Product PRODUCT, bool GELU, int MT, int NT, int WM, int WN, int STAGES>
struct MultiplyMany {
  static constexpr int BLOCK = WM * WN * WARP, PER_SM = 512 / BLOCK;
  static constexpr int ROWS = 16 * MT * WM, TILES = NT * WN, K = 2 * STEP;  // K: values of k in a stage
  static constexpr int ROW_BYTES = K * 2 + 16;  // 16 unused, so that eight rows lie in different banks
  static constexpr int TILE_BYTES = STEP * WIDE * 2, A_BYTES = ROWS * ROW_BYTES;
  static constexpr int STAGE_BYTES = A_BYTES + TILES * 2 * TILE_BYTES, SHARED_BYTES = STAGES * STAGE_BYTES;
  static constexpr int A_ROWS = BLOCK / 8, B_TILES = BLOCK / 64;  // that all threads copy at once, 16 bytes each
  static_assert(ROWS % A_ROWS == 0 && TILES % B_TILES == 0 && BLOCK % 64 == 0 && TILE_ROWS % ROWS == 0);
  struct Sums {
    float value[MT][NT][4];
  };
  struct Part {
    uint32_t a[MT][4], b[NT][4];
  };
  struct From {  // where this thread copies from
    const char *a, *b;
  };
  struct alignas(8) Pair {
    float x, y;
  };

  LINPIX_BODY run(Threads<BLOCK>& threads, const ProductCall& call) {
    const int depth = call.weights.depth, steps = depth / STEP, stages = (steps + 1) / 2;
    const int columns = call.weights.groups * call.weights.columns, tiles = columns / WIDE;
    const int64_t first_row = threads.x * ROWS;
    const int first_tile = threads.y * TILES;
    typename Threads<BLOCK>::template Own<From> from;
    threads.each([&](int i) {
      from[i].a = (const char*)((const bfloat16*)call.a + (first_row + i / 8) * depth) + i % 8 * 16;
      from[i].b = (const char*)call.weights.weights + (size_t)(first_tile + i / 64) * steps * TILE_BYTES + i % 64 * 16;
    });
    const auto load_weights = [&](int stage) {
      char* const at = threads.shared + stage % STAGES * STAGE_BYTES + A_BYTES;
      threads.each([&](int i) {
#pragma unroll
        for (int j = 0; j < TILES; j += B_TILES)
          if (stage * 2 + i % 64 / 32 < steps && first_tile + i / 64 + j < tiles)
            threads.copy(at + j * 2 * TILE_BYTES + i * 16, from[i].b + ((size_t)j * steps + stage * 2) * TILE_BYTES);
      });
    };
    const auto load_rows = [&](int stage) {  // ends a group of copies, even if empty: wait counts groups
      char* const at = threads.shared + stage % STAGES * STAGE_BYTES;
      threads.each([&](int i) {
#pragma unroll
        for (int j = 0; j < ROWS; j += A_ROWS)
          if (stage * 2 + i % 8 / 4 < steps)
            threads.copy(at + (i / 8 + j) * ROW_BYTES + i % 8 * 16, from[i].a + (size_t)j * depth * 2 + stage * K * 2);
        threads.end_group();
      });
    };
    for (int stage = 0; stage < STAGES - 1; ++stage) load_weights(stage);  // before follow: no kernel writes weights
    threads.follow();
    for (int stage = 0; stage < STAGES - 1; ++stage) load_rows(stage);

    typename Threads<BLOCK>::template Own<Sums> sums;
    threads.each([&](int i) {
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[i].value[m][n][c] = 0;
    });
    for (int stage = 0; stage < stages; ++stage) {
      threads.each([&](int) { threads.template wait<STAGES - 2>(); });  // this stage has arrived,
      threads.barrier();                                               // and no warp still uses the one before it
      if (stage + STAGES - 1 < stages) load_weights(stage + STAGES - 1);
      load_rows(stage + STAGES - 1);
      const char* const at = threads.shared + stage % STAGES * STAGE_BYTES;
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        if (stage * 2 + step >= steps) continue;
        typename Threads<BLOCK>::template Own<Part> part;
        threads.each([&](int i) {
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            const int tile = i / WARP % WN * NT + n;
            const Chunk c = *(const Chunk*)(at + A_BYTES + (tile * 2 + step) * TILE_BYTES + i % WARP * 16);
#pragma unroll
            for (int w = 0; w < 4; ++w) part[i].b[n][w] = c.word[w];
          }
        });
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int m = 0; m < MT; ++m)
            threads.template matrices<false>([&](int i) { return part[i].a[m]; }, [&](int i) {
              const int lane = i % WARP, row = (i / WARP / WN * MT + m) * 16 + lane % 16;
              return at + row * ROW_BYTES + (step * STEP + half * 16 + lane / 16 * 8) * 2;
            });
#pragma unroll
          for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int m = 0; m < MT; ++m)
              threads.multiply([&](int i) { return part[i].a[m]; },
                               [&](int i) { return part[i].b[n] + 2 * half; },
                               [&](int i) -> float(&)[4] { return sums[i].value[m][n]; });
        }
      }
    }

    threads.each([&](int i) {
      const int warp = i / WARP, lane = i % WARP;
      const int column = (first_tile + warp % WN * NT) * WIDE + lane % 4 * 2;
      const int end = PRODUCT == Product::add ? call.d_model : columns;  // of out
      const auto inside = [&](int n) { return column + n * WIDE < end; };
      Pair bias[NT], before[NT][2];
#pragma unroll
      for (int n = 0; n < NT; ++n) bias[n] = inside(n) ? *(const Pair*)(call.weights.bias + column + n * WIDE) : Pair{};
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const int64_t at = (first_row + (warp / WN * MT + m) * 16 + lane / 4) * end + column;
        if constexpr (PRODUCT == Product::add) {
#pragma unroll
          for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              if (inside(n)) before[n][half] = *(const Pair*)(call.x + at + half * 8 * end + n * WIDE);
        }
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (!inside(n)) continue;
            const float(&sum)[4] = sums[i].value[m][n];
            const float x = sum[2 * half] + bias[n].x, y = sum[2 * half + 1] + bias[n].y;
            const int64_t to = at + half * 8 * end + n * WIDE;
            if constexpr (PRODUCT == Product::qkv)
              *(Pair*)((float*)call.out + to) = {x, y};
            else if constexpr (PRODUCT == Product::up)
              put_pair((bfloat16*)call.out + to, activate(x, GELU), activate(y, GELU));
            else
              *(Pair*)((float*)call.out + to) = {before[n][half].x + x, before[n][half].y + y};
          }
      }
    });
  }
};

}  // namespace linpix::LINPIX_ISA
