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

// As many accumulators as fit in the registers, beside the weights of one k and one value of a.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_BLOCKS = 4;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 3, TILE_BLOCKS = 2;
#elif defined(__aarch64__)
constexpr int TILE_ROWS = 6, TILE_BLOCKS = 1;
#else
constexpr int TILE_ROWS = 3, TILE_BLOCKS = 1;
#endif
constexpr int FEW_ROWS = 2, AHEAD = 2048;  // with so few rows, loading weights is the limit: bytes to prefetch ahead

using Tile = float[TILE_ROWS][TILE_BLOCKS * LANES];

// ROWS rows of a times BLOCKS blocks of a panel that is `width` blocks wide. ASK: prefetch weights `ahead` bytes ahead.
template <int ROWS, int BLOCKS, bool ASK, class T>
void tile(const T* a, int stride, const T* w, int width, int depth, Tile& result, int ahead) {
  using Op = Operand<T>;
  typename Op::Sum sums[ROWS][BLOCKS];  // in registers, since all loops over it are unrolled
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) sums[r][b] = {};
  for (int k = 0; k < depth; k += Op::K, w += width * LANES * Op::K) {
    Op weights[BLOCKS];
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) {
      weights[b] = Op::load(w + b * LANES * Op::K);
      if (ASK) __builtin_prefetch((const char*)(w + b * LANES * Op::K) + ahead, 0, ROWS <= FEW_ROWS ? 3 : 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Op value = Op::broadcast(a + r * stride + k);
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; ++b) sums[r][b] = value.times(weights[b], sums[r][b]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) store(&result[r][b * LANES], as_floats(sums[r][b]));
}

template <int ROWS, bool ASK, class T>
void tile_of(int blocks, const T* a, int stride, const T* w, int width, int depth, Tile& result, int ahead) {
  if (blocks == 1) return tile<ROWS, 1, ASK>(a, stride, w, width, depth, result, ahead);
  if constexpr (TILE_BLOCKS >= 2)
    if (blocks == 2) return tile<ROWS, 2, ASK>(a, stride, w, width, depth, result, ahead);
  if constexpr (TILE_BLOCKS >= 3)
    if (blocks == 3) return tile<ROWS, 3, ASK>(a, stride, w, width, depth, result, ahead);
  if constexpr (TILE_BLOCKS >= 4) return tile<ROWS, 4, ASK>(a, stride, w, width, depth, result, ahead);
}

template <bool ASK, class T>
void tile_of(int rows, int blocks, const T* a, int stride, const T* w, int width, int depth, Tile& result, int ahead) {
  switch (rows) {
    case 1: return tile_of<1, ASK>(blocks, a, stride, w, width, depth, result, ahead);
    case 2: return tile_of<2, ASK>(blocks, a, stride, w, width, depth, result, ahead);
    case 3: return tile_of<3, ASK>(blocks, a, stride, w, width, depth, result, ahead);
#if defined(__AVX512F__) || defined(__aarch64__)
    case 4: return tile_of<4, ASK>(blocks, a, stride, w, width, depth, result, ahead);
    case 5: return tile_of<5, ASK>(blocks, a, stride, w, width, depth, result, ahead);
    case 6: return tile_of<6, ASK>(blocks, a, stride, w, width, depth, result, ahead);
#endif
  }
}

// What follows the bias of an int8 matrix, for each column: its scale (a weight is scale * int8) and its sum of
// weights.
struct Factors {
  const float *scales, *sums;
  explicit Factors(const Matrix& m) : scales(m.bias + m.groups * m.columns), sums(scales + m.groups * m.columns) {}
};

int least(int a, int b) { return a < b ? a : b; }
inline int greatest(int a, int b) { return a < b ? b : a; }

int panels_of(int columns) {
  const int blocks = columns / LANES;
  return (blocks + Matrix::PANEL - 1) / Matrix::PANEL;
}

// Panels first .. last-1 of m (counted through all its groups) for `rows` rows of a. epilogue(row, column, sums) gets
// sixteen columns at a time, while they are in the nearest cache. column counts through the padded groups. affine: the
// range of each row, if a is bytes.
template <class T, class Epilogue>
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
    const T* w = (const T*)m.weights + (size_t)column * m.depth;
    for (int i = 0; i < tiles; ++i) {
      const int row = i * rows / tiles, count = (i + 1) * rows / tiles - row;
      for (int b = 0; b < width; b += TILE_BLOCKS) {
        alignas(64) Tile sums;
        const int wide = least(TILE_BLOCKS, width - b);
        const T *from = a + row * stride, *block = w + b * LANES * Operand<T>::K;
        const int panel_bytes = width * LANES * m.depth * (int)sizeof(T);
        if (rows <= FEW_ROWS)
          tile_of<true>(count, wide, from, stride, block, width, m.depth, sums, AHEAD);
        else if ((m.exceeds_cache || m.int8) && tiles > 1 && i == tiles - 1)
          // this panel is in a near cache by now, so there is time to fetch the next one; bytes are done with a panel
          // in half of the time, so they need this even if the weights stay in the cache
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
