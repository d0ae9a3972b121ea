// The order of the kernels: what a step of decode and a chunk of prefill are made of.
#include <algorithm>

#include "kernels.h"

namespace linpix {
namespace {

// All layers; the last one only as far as its state if nothing is to be predicted. Five kernels each.
int run_layers(const Pass& p, bool predict, void* stream) {
  const Model& m = p.model;
  const Buffers& b = p.buffers;
  const int rows = p.rows.count * p.tokens;
  const auto product = [&](Product kind, const Matrix& weights, const void* a, Norm post, Norm pre, void* out) {
    ProductCall call{a, weights, rows, b.sum, {}, {}, m.d_model, b.x, out, m.gelu};
    (m.pre_norm ? call.pre : call.post) = m.pre_norm ? pre : post;
    return multiply(kind, call, m.bf16, stream, true);
  };
  int error = 0;
  for (int l = 0; l < m.layers && !error; ++l) {
    const Layer& layer = m.layer[l];
    error = product(Product::qkv, layer.qkv, nullptr, l ? m.layer[l - 1].norm2 : Norm{}, layer.norm1, b.qkv);
    if (!error) error = attend({p, l, layer.qkv.columns, layer.out.depth}, stream, true);
    if (l == m.layers - 1 && !predict) break;
    if (!error) error = product(Product::add, layer.out, b.y, {}, {}, b.sum);
    if (!error) error = product(Product::up, layer.up, nullptr, layer.norm1, layer.norm2, b.hidden);
    if (!error) error = product(Product::add, layer.down, b.hidden, {}, {}, b.sum);
  }
  return error;
}

}  // namespace

int decode(Pass p, int steps, void* stream) {
  p.tokens = 1;
  const Norm post = p.model.pre_norm ? Norm{} : p.model.layer[p.model.layers - 1].norm2;
  p.step = 0;
  int error = steps ? embed({p, post, false, false}, stream) : 0;
  for (; p.step < steps && !error; ++p.step) {
    error = run_layers(p, true, stream);
    if (!error) error = finish({p, post, p.step + 1 < steps, false}, stream, true);
  }
  return error;
}

int prefill(Pass p, int64_t longest, void* stream) {
  int error = 0;
  for (p.step = 0; p.step < longest && !error; p.step += CHUNK) {  // token 0 without a start token is left out by attend
    p.tokens = (int)std::min<int64_t>(CHUNK, longest - p.step);
    error = embed({p, {}, false, false}, stream);
    if (!error) error = run_layers(p, false, stream);
  }
  return error;
}

}  // namespace linpix
