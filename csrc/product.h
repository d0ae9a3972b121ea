// The matrix product: some rows times a packed weight (see Matrix in decode.h), with an epilogue for the sums.
//
// Each output has one accumulator, which takes k in order. So it does not depend, bit for bit, on how many rows a tile
// has. Bytes are summed as integers, and each row of bytes has its own range.
//
// Why it is fast: the accumulators of a tile stay in registers, so a weight is loaded once for all rows of a tile, and
// a value of a once for all of its columns. A panel serves all rows of the call before the next one is read. Weights
// are prefetched where loading them is the limit.
#pragma once

#include "decode.h"
#include "vec.h"

namespace linpix::LINPIX_ISA {
namespace {

// A tile has up to TILE_ROWS rows, and as many blocks as leave its accumulators in the registers, beside the weights of
// one k and one value of a. Many rows serve a weight best, and blocks keep the multipliers busy where rows are few.
// BLOCK_ROWS are the rows of some full tiles.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_BLOCKS = 4, TILE_SUMS = 24, BLOCK_ROWS = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int TILE_ROWS = 5, TILE_BLOCKS = 4, TILE_SUMS = 5, BLOCK_ROWS = 20;
#else
constexpr int TILE_ROWS = 3, TILE_BLOCKS = 1, TILE_SUMS = 3, BLOCK_ROWS = 12;
#endif
constexpr int FEW_ROWS = 2, AHEAD = 2048;  // with so few rows, loading weights is the limit: bytes to prefetch ahead

constexpr int least(int a, int b) { return a < b ? a : b; }
inline int greatest(int a, int b) { return a < b ? b : a; }
constexpr int blocks_of(int rows) { return least(TILE_BLOCKS, TILE_SUMS / rows); }

using Tile = float[TILE_ROWS][TILE_BLOCKS * LANES];

// ROWS rows of a times BLOCKS blocks of a panel that is `width` blocks wide. ASK: prefetch weights `ahead` bytes ahead.
template <int ROWS, int BLOCKS, bool ASK, class T, class W>
void tile(const T* a, int stride, const W* w, int width, int depth, Tile& result, int ahead) {
  using Op = Operand<T, W>;
  typename Op::Sum sums[ROWS][BLOCKS];  // in registers, since all loops over it are unrolled
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) sums[r][b] = {};
  for (int k = 0; k < depth; k += Op::K, w += width * LANES * Op::K) {
#pragma GCC unroll 2
    for (int turn = 0; turn < Op::TURNS; ++turn) {
      Op weights[BLOCKS];
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; ++b) {
        weights[b] = Op::load(w + b * LANES * Op::K, turn);
        if (ASK && !turn)
          __builtin_prefetch((const char*)(w + b * LANES * Op::K) + ahead, 0, ROWS <= FEW_ROWS ? 3 : 2);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const Op value = Op::broadcast(a + r * stride + k + turn);
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) sums[r][b] = value.times(weights[b], sums[r][b]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) store(&result[r][b * LANES], as_floats(sums[r][b]));
}

// The tile of `rows` rows and `blocks` blocks, which are at most ROWS and BLOCKS.
template <int ROWS, bool ASK, int BLOCKS = blocks_of(ROWS), class T, class W>
void tile_of_blocks(int blocks, const T* a, int stride, const W* w, int width, int depth, Tile& result, int ahead) {
  if constexpr (BLOCKS > 1)
    if (blocks < BLOCKS)
      return tile_of_blocks<ROWS, ASK, BLOCKS - 1>(blocks, a, stride, w, width, depth, result, ahead);
  tile<ROWS, BLOCKS, ASK>(a, stride, w, width, depth, result, ahead);
}
template <bool ASK, int ROWS = TILE_ROWS, class T, class W>
void tile_of(int rows, int blocks, const T* a, int stride, const W* w, int width, int depth, Tile& result, int ahead) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return tile_of<ASK, ROWS - 1>(rows, blocks, a, stride, w, width, depth, result, ahead);
  tile_of_blocks<ROWS, ASK>(blocks, a, stride, w, width, depth, result, ahead);
}

// What follows the bias of an int8 matrix, for each column: its scale (a weight is scale * int8) and its sum of
// weights.
struct Factors {
  const float *scales, *sums;
  explicit Factors(const Matrix& m) : scales(m.bias + m.groups * m.columns), sums(scales + m.groups * m.columns) {}
};

int panels_of(int columns) {
  const int blocks = columns / LANES;
  return (blocks + Matrix::PANEL - 1) / Matrix::PANEL;
}

// Panels first .. last-1 of m (counted through all its groups) for `rows` rows of a. epilogue(row, column, sums) gets
// sixteen columns at a time, while they are in the nearest cache. column counts through the padded groups. affine: the
// range of each row, if a is bytes. W: the type of the weights.
template <class T, class W = T, class Epilogue>
void product(const T* a, int stride, int rows, const Matrix& m, int first, int last, Epilogue epilogue,
             [[maybe_unused]] const Affine* affine = nullptr) {
  const int panels = panels_of(m.columns), blocks = m.columns / LANES;
  const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int panel = first; panel < last; ++panel) {
    // blocks of a group are divided as evenly as possible, the wider panels first: as in model/packing.py
    const int group = panel / panels, at = panel % panels;
    const int begin = at * (blocks / panels) + least(at, blocks % panels);
    const int width = blocks / panels + (at < blocks % panels);
    const int column = group * m.columns + begin * LANES;
    const W* w = (const W*)m.weights + (size_t)column * m.depth;
    for (int i = 0; i < tiles; ++i) {
      const int row = i * rows / tiles, count = (i + 1) * rows / tiles - row;
      const int most = blocks_of(count);
      for (int b = 0; b < width; b += most) {
        alignas(64) Tile sums;
        const int wide = least(most, width - b);
        const T* from = a + row * stride;
        const W* block = w + b * LANES * Operand<T, W>::K;
        const int panel_bytes = width * LANES * m.depth * (int)sizeof(W);
        if (rows <= FEW_ROWS)
          tile_of<true>(count, wide, from, stride, block, width, m.depth, sums, AHEAD);
        else if ((m.exceeds_cache || m.int8 || m.narrow) && tiles > 1 && i == tiles - 1)
          // this panel is in a near cache by now, so there is time to fetch the next one; bytes are done with a panel
          // in half of the time, so they need this even if the weights stay in the cache, and narrow weights gain by it
          tile_of<true>(count, wide, from, stride, block, width, m.depth, sums, panel_bytes);
        else
          tile_of<false>(count, wide, from, stride, block, width, m.depth, sums, 0);
        for (int r = 0; r < count; ++r)
          for (int c = 0; c < wide * LANES; c += LANES) {
            const int to = column + b * LANES + c;
            Floats sum = load(&sums[r][c]);
            if constexpr (sizeof(T) == 1) {
              const Factors by(m);
              const Affine& row_s = affine[row + r];
              sum = multiply_add(sum * load(by.scales + to), row_s.step, row_s.low * load(by.sums + to));
            }
            epilogue(row + r, to, sum + load(m.bias + to));
          }
      }
    }
  }
}

}  // namespace
}  // namespace linpix::LINPIX_ISA
