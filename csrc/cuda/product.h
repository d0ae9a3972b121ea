// The matrix product: some rows times a packed weight, with what comes before it (residual and norm) and after it. For
// few rows, and in float32; many rows in bfloat16 have many_rows.h.
//
// Each output has one accumulator, which takes k in order, and tiles of all shapes use the same instruction; k is never
// split. So an output does not depend, bit for bit, on how many rows there are.
//
// Why it is fast for few rows: it needs no kernel for the norm, whose weights are requested before the rows are there,
// and of which a warp computes four rows at once; and tiles are small, so the columns are spread over many
// multiprocessors. A block keeps its rows in shared memory for all of k, while weights stream past them in stages:
// several are on their way as asynchronous copies while one is multiplied. On Hopper and later, the first stages are
// requested before the preceding kernel has ended. In bfloat16, matrix instructions multiply, and weights are packed as
// their fragments: a lane loads those of a tile at once, as 16 bytes.
#pragma once

#include "../functions.h"
#include "kernels.h"
#include "norm.h"
#include "threads.h"

namespace linpix::LINPIX_ISA {

constexpr int STEP = 32;  // values of k in a stage; packed weights hold whole stages
constexpr int WIDE = 8;   // columns of a tile of weights

LINPIX_INLINE void put_pair(float* to, float x, float y) { to[0] = x, to[1] = y; }
LINPIX_INLINE void put_pair(bfloat16* to, float x, float y) { *(uint32_t*)to = rounded_pair(x, y); }
LINPIX_INLINE float activate(float x, bool as_gelu) { return as_gelu ? gelu(x).x : at_least(x, 0).x; }

// What a warp multiplies in one stage: 16 rows of a by a tile of weights. Packed weights are tile after tile, and in a
// tile stage after stage (model/packing.py). Sums are laid out as by mma.m16n8k16: lane i has the rows i / 4 and
// i / 4 + 8, columns i % 4 * 2 and the next.
template <class T>
struct Stage;

template <>
struct Stage<bfloat16> {
  static constexpr int PAD = 8;  // unused elements after a row of a, so that rows begin in different banks
  static constexpr int TILE_BYTES = STEP * WIDE * 2;
  uint32_t a[2][4], b[4];

  // from: the first row of a, at this stage's first column; weights: this stage of the warp's tile
  LINPIX_INLINE void load(int lane, const bfloat16* from, int stride, const char* weights) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        a[half][r] = *(const uint32_t*)(from + (lane / 4 + r % 2 * 8) * stride + half * 16 + r / 2 * 8 + lane % 4 * 2);
    const Chunk c = *(const Chunk*)(weights + lane * 16);  // the fragments of both halves
#pragma unroll
    for (int w = 0; w < 4; ++w) b[w] = c.word[w];
  }

  template <class Threads, class Stages, class Sums>
  static LINPIX_INLINE void multiply(Threads& threads, Stages& stage, Sums& sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      threads.multiply([&](int i) { return stage[i].a[half]; },
                       [&](int i) { return stage[i].b + 2 * half; },
                       [&](int i) -> float(&)[4] { return sums[i].value; });
  }
};

// In float32, without matrix instructions: for checks, and for full precision.
template <>
struct Stage<float> {
  static constexpr int PAD = 4;
  static constexpr int TILE_BYTES = STEP * WIDE * 4;
  const float *a, *weights;  // in shared memory
  int stride;

  LINPIX_INLINE void load(int lane, const float* from, int stride_, const char* tile) {
    a = from + lane / 4 * stride_;
    weights = (const float*)tile + lane % 4 * 2;
    stride = stride_;
  }
  template <class Threads, class Stages, class Sums>
  static LINPIX_INLINE void multiply(Threads& threads, Stages& stage, Sums& sums) {
    threads.each([&](int i) {
      const Stage s = stage[i];
#pragma unroll 4
      for (int k = 0; k < STEP; ++k)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          sums[i].value[c] = multiply_add(s.a[c / 2 * 8 * s.stride + k], s.weights[k * WIDE + c % 2], sums[i].value[c]);
    });
  }
};

// A block: 16 rows, and a tile of weights for each warp. STAGES: of weights in shared memory, on their way or in use.
// COLUMNS: of a row in a lane, at least, where rows are normalised.
template <class T, Product PRODUCT, int WARPS, int STAGES, int COLUMNS>
struct Multiply {
  using Part = Stage<T>;
  static constexpr int BLOCK = WARPS * WARP, PER_SM = 512 / BLOCK;
  static constexpr int ROWS = 16, TILES = WARPS, STAGE_BYTES = TILES * Part::TILE_BYTES;
  static constexpr int AT_ONCE = COLUMNS > 8 ? 2 : 4;  // rows that a warp normalises together
  struct Sums {
    float value[4];
  };
  struct Added {  // to the sums of a lane, at two columns of two rows
    float bias[2], residual[2][2];
  };

  static int shared_bytes(int depth) { return STAGES * STAGE_BYTES + ROWS * (depth + Part::PAD) * (int)sizeof(T); }

  LINPIX_BODY run(Threads<BLOCK>& threads, const ProductCall& call) {
    const int depth = call.weights.depth, stages = depth / STEP, stride = depth + Part::PAD;
    const int columns = call.weights.groups * call.weights.columns, tiles = columns / WIDE;
    const int64_t first_row = threads.x * ROWS;
    const int first_tile = threads.y * TILES, rows = (int)(call.rows - first_row < ROWS ? call.rows - first_row : ROWS);
    char* const weights = threads.shared;
    T* const a = (T*)(threads.shared + STAGES * STAGE_BYTES);

    // A warp copies the tile that it multiplies, so it need not wait for the others. One group of copies, even if it is
    // empty: wait counts groups.
    const auto load = [&](int stage) {
      threads.each([&](int i) {
        const int tile = first_tile + i / WARP;
        char* const to = weights + stage % STAGES * STAGE_BYTES + i / WARP * Part::TILE_BYTES;
        const char* const from =
            (const char*)call.weights.weights + ((size_t)tile * stages + stage) * Part::TILE_BYTES;
        if (stage < stages && tile < tiles)
#pragma unroll
          for (int byte = i % WARP * 16; byte < Part::TILE_BYTES; byte += WARP * 16)
            threads.copy(to + byte, from + byte);
        threads.end_group();
      });
    };
    for (int stage = 0; stage < STAGES - 1; ++stage) load(stage);  // before follow: no kernel writes weights
    // What is added in the end is asked for now, so that it is there when the products are.
    const auto column_of = [&](int i) { return (first_tile + i / WARP) * WIDE + i % 4 * 2; };
    const auto row_of = [&](int i, int half) { return i % WARP / 4 + half * 8; };
    typename Threads<BLOCK>::template Own<Added> added;
    threads.each([&](int i) {
#pragma unroll
      for (int c = 0; c < 2; ++c)
        added[i].bias[c] = column_of(i) < columns ? call.weights.bias[column_of(i) + c] : 0;
    });
    const Norm& norm = norm_of(call);
    typename Threads<BLOCK>::template Own<RowsOf<COLUMNS, AT_ONCE>> own;
    if (PRODUCT != Product::add && norm.weight) request(threads, own, norm, call.d_model);
    threads.follow();
    if constexpr (PRODUCT == Product::add) {
      threads.each([&](int i) {  // a warp copies whole rows
        for (int row = i / WARP; row < rows; row += WARPS) {
          const char* const from = (const char*)((const T*)call.a + (first_row + row) * depth);
          for (int byte = i % WARP * 16; byte < depth * (int)sizeof(T); byte += WARP * 16)
            threads.copy((char*)(a + row * stride) + byte, from + byte);
        }
        threads.end_group();
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const bool there = row_of(i, half) < rows && column_of(i) < call.d_model;
            const int64_t at = (first_row + row_of(i, half)) * call.d_model + column_of(i) + c;
            added[i].residual[half][c] = there ? call.x[at] : 0;
          }
      });
    } else if (rows <= WARPS) {
      residual_norm<1>(threads, call, own, a, stride, first_row, rows);
    } else {
      residual_norm<AT_ONCE>(threads, call, own, a, stride, first_row, rows);
    }
    threads.each([&](int) { threads.template wait<0>(); });
    threads.barrier();  // all rows are there

    typename Threads<BLOCK>::template Own<Sums> sums;
    threads.each([&](int i) {
#pragma unroll
      for (float& sum : sums[i].value) sum = 0;
    });
#pragma unroll 4
    for (int stage = 0; stage < stages; ++stage) {
      threads.each([&](int) { threads.template wait<STAGES - 2>(); });  // this stage has arrived,
      threads.warp_barrier();                                          // and no lane still uses the one before it
      load(stage + STAGES - 1);
      typename Threads<BLOCK>::template Own<Part> part;
      threads.each([&](int i) {
        part[i].load(i % WARP, a + stage * STEP, stride,
                     weights + stage % STAGES * STAGE_BYTES + i / WARP * Part::TILE_BYTES);
      });
      Part::multiply(threads, part, sums);
    }

    threads.each([&](int i) {
      const int column = column_of(i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row_of(i, half) >= rows || column >= columns) continue;
        const float x = sums[i].value[2 * half] + added[i].bias[0];
        const float y = sums[i].value[2 * half + 1] + added[i].bias[1];
        const int64_t at = first_row + row_of(i, half);
        if constexpr (PRODUCT == Product::qkv) {
          put_pair((float*)call.out + at * columns + column, x, y);
        } else if constexpr (PRODUCT == Product::up) {
          put_pair((T*)call.out + at * columns + column, activate(x, call.gelu), activate(y, call.gelu));
        } else if (column < call.d_model) {
          const float* residual = added[i].residual[half];
          put_pair((float*)call.out + at * call.d_model + column, residual[0] + x, residual[1] + y);
        }
      }
    });
  }

 private:
  // Makes the residual stream of what the last sub-layer left, and of it the rows to be multiplied: see ProductCall. A
  // warp has COUNT rows at once, so that one does not wait for the memory and sums of another.
  template <int COUNT, class Own>
  LINPIX_BODY residual_norm(Threads<BLOCK>& threads, const ProductCall& call, Own& own, T* a, int stride,
                            int64_t first_row, int rows) {
    const int n = call.d_model, depth = call.weights.depth;
    const Norm& norm = norm_of(call);
    for (int first = 0; first < rows; first += COUNT * WARPS) {
      const auto each_row = [&](auto f) {  // f(thread, row, its columns)
        threads.each([&](int i) {
#pragma unroll
          for (int r = 0; r < COUNT; ++r)
            if (const int row = first + r * WARPS + i / WARP; row < rows) f(i, row, own[i].value[r]);
        });
      };
      threads.each([&](int i) {
#pragma unroll
        for (auto& row : own[i].value)
#pragma unroll
          for (float& x : row) x = 0;
      });
      each_row([&](int i, int row, auto& columns) {
        each_column(columns, i % WARP, n, [&](float& x, int c) { x = call.sum[(first_row + row) * n + c]; });
      });
      const auto keep = [&] {
        each_row([&](int i, int row, auto& columns) {
          each_column(columns, i % WARP, n, [&](float& x, int c) { call.x[(first_row + row) * n + c] = x; });
        });
      };
      if (call.pre.weight && threads.y == 0) keep();
      if (norm.weight) normalise<COUNT>(threads, own, n);
      if (!call.pre.weight && threads.y == 0) keep();
      each_row([&](int i, int row, auto& columns) {
        each_column(columns, i % WARP, depth, [&](float& x, int c) { store(a + row * stride + c, x); });
      });
    }
  }
};

}  // namespace linpix::LINPIX_ISA
