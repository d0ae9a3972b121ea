// Chooses the tiles of a product. With few rows they are small, so that the columns are spread over many
// multiprocessors; with many rows they are large, so that each weight that is read serves 64 or 128 rows.
#include "many_rows.h"
#include "product.h"

namespace linpix {
namespace {

using namespace linpix::LINPIX_ISA;

template <class Kernel>
Grid grid_of(const ProductCall& call) {
  const int tiles = call.weights.groups * call.weights.columns / WIDE;
  return {(call.rows + Kernel::ROWS - 1) / Kernel::ROWS, (tiles + Kernel::TILES - 1) / Kernel::TILES};
}

template <class Kernel>
int start(const ProductCall& call, void* stream) {
  return launch<Kernel>(grid_of<Kernel>(call), Kernel::shared_bytes(call.weights.depth), stream, true, call);
}

template <Product PRODUCT, bool GELU = false>
int start_many(const ProductCall& call, Tiles tiles, void* stream) {
  constexpr bool ADD = PRODUCT == Product::add;  // d_model has few columns, so smaller tiles spread better
  using Large = MultiplyMany<PRODUCT, GELU, ADD ? 2 : 4, 4, ADD ? 4 : 2, ADD ? 2 : 4, 3>;
  using Medium = MultiplyMany<PRODUCT, GELU, ADD ? 1 : 2, 2, 2, ADD ? 2 : 4, 4>;
  if (tiles == Tiles::large && Large::SHARED_BYTES <= this_gpu().shared_bytes)
    return launch<Large>(grid_of<Large>(call), Large::SHARED_BYTES, stream, true, call);
  return launch<Medium>(grid_of<Medium>(call), Medium::SHARED_BYTES, stream, true, call);
}

template <Product PRODUCT>
int start(const ProductCall& call, bool bf16, Tiles tiles, void* stream) {
  constexpr int WARPS = PRODUCT == Product::add ? 2 : 4;
  if (!bf16) return start<Multiply<float, PRODUCT, 4, 8, 16>>(call, stream);
  if (tiles != Tiles::few) {
    if (PRODUCT == Product::up && call.gelu) return start_many<Product::up, true>(call, tiles, stream);
    return start_many<PRODUCT>(call, tiles, stream);
  }
  if constexpr (PRODUCT != Product::add)
    if (call.weights.depth > 8 * WARP) return start<Multiply<bfloat16, PRODUCT, WARPS, 16, 16>>(call, stream);
  return start<Multiply<bfloat16, PRODUCT, WARPS, 16, 8>>(call, stream);
}

int normalise_rows(const ProductCall& call, void* stream) {
  const Grid grid = {(call.rows + TILE_ROWS - 1) / TILE_ROWS * (TILE_ROWS / 4)};  // rows beyond the last are padding
  if (call.weights.depth <= 4 * WARP) return launch<NormaliseRows<4>>(grid, 0, stream, true, call);
  if (call.weights.depth <= 8 * WARP) return launch<NormaliseRows<8>>(grid, 0, stream, true, call);
  return launch<NormaliseRows<16>>(grid, 0, stream, true, call);
}

}  // namespace

int multiply(Product product, ProductCall call, bool bf16, void* stream) {
  const Tiles tiles = tiles_for(call.rows);
  if (bf16 && !call.a && tiles != Tiles::few) {
    if (const int failed = normalise_rows(call, stream)) return failed;
    call.a = call.normalised;
  }
  switch (product) {
    case Product::qkv: return start<Product::qkv>(call, bf16, tiles, stream);
    case Product::up: return start<Product::up>(call, bf16, tiles, stream);
    default: return start<Product::add>(call, bf16, tiles, stream);
  }
}

}  // namespace linpix
