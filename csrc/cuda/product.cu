// Chooses the tiles of a product. With few rows they are small, so that the columns are spread over many
// multiprocessors; with many rows they are large, so that each weight that is read serves 64 rows.
#include "product.h"

namespace linpix {
namespace {

using namespace linpix::LINPIX_ISA;

constexpr int FEW = 64;  // rows: up to so many, tiles are small

template <class Kernel>
int start(const ProductCall& call, void* stream) {
  const int tiles = call.weights.groups * call.weights.columns / WIDE;
  const Grid grid = {(call.rows + Kernel::ROWS - 1) / Kernel::ROWS, (tiles + Kernel::TILES - 1) / Kernel::TILES};
  return launch<Kernel>(grid, Kernel::shared_bytes(call.weights.depth), stream, true, call);
}

template <Product PRODUCT>
int start(const ProductCall& call, bool bf16, void* stream) {
  if (!bf16) return start<Multiply<float, PRODUCT, 1, 1, 1, 4, 8>>(call, stream);
  using Few = Multiply<bfloat16, PRODUCT, 1, 1, 1, PRODUCT == Product::add ? 2 : 4, 16>;  // d_model has few columns
  using Many = Multiply<bfloat16, PRODUCT, 2, 4, 2, 4, 3>;
  const bool fits = Many::shared_bytes(call.weights.depth) <= this_gpu().shared_bytes;
  return call.rows > FEW && fits ? start<Many>(call, stream) : start<Few>(call, stream);
}

}  // namespace

int multiply(Product product, const ProductCall& call, bool bf16, void* stream) {
  switch (product) {
    case Product::qkv: return start<Product::qkv>(call, bf16, stream);
    case Product::up: return start<Product::up>(call, bf16, stream);
    default: return start<Product::add>(call, bf16, stream);
  }
}

}  // namespace linpix
