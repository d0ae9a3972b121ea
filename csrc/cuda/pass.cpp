// The order of the kernels in a pass of decode, and in a chunk of prefill or read.
//
// Why it is fast: kernels are few, since they run one after the other. A layer has five, or seven with many rows. A step
// has one more, finish, or two if sub-pixels can skip the layers (run_ahead). Nothing here waits for the GPU.
#include <algorithm>

#include "kernels.h"

namespace linpix {
namespace {

// All layers. Without `predict`, the last layer only updates its state.
int run_layers(const Pass& p, bool predict, void* stream) {
  const Model& m = p.model;
  const Buffers& b = p.buffers;
  const int rows = p.rows.count * p.tokens;
  const auto product = [&](Product kind, const Matrix& weights, const void* a, Norm post, Norm pre, void* out) {
    ProductCall call{a, weights, rows, b.sum, {}, {}, m.d_model, b.x, out, m.gelu, b.normalised};
    (m.pre_norm ? call.pre : call.post) = m.pre_norm ? pre : post;
    return multiply(kind, call, m.bf16, stream);
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

// The norm after the last layer of a post-norm model.
Norm last_norm(const Model& m) { return m.pre_norm ? Norm{} : m.layer[m.layers - 1].norm2; }

}  // namespace

int decode(Pass p, int passes, void* stream) {
  const Norm post = last_norm(p.model);
  const bool skips = p.pools.tokens;
  p.tokens = 1;
  int error = !passes ? 0 : skips ? run_ahead(p, stream, false) : embed(p, stream);
  for (int pass = 0; pass < passes && !error; ++pass) {
    error = run_layers(p, true, stream);
    if (!error) error = finish({p, post, !skips && pass + 1 < passes}, stream);
    if (!error && skips) error = run_ahead(p, stream, true);
  }
  return error;
}

int prefill(Pass p, int64_t longest, void* stream) {
  int error = 0;
  for (p.step = 0; p.step < longest && !error; p.step += CHUNK) {  // attend leaves out token 0 without a start token
    p.tokens = (int)std::min<int64_t>(CHUNK, longest - p.step);
    error = embed(p, stream);
    if (!error) error = run_layers(p, p.model.background >= 0 || p.rows.features, stream);
    if (!error && (p.pools.tokens || p.rows.features)) error = keep_last({p, last_norm(p.model)}, stream);
  }
  return error;
}

}  // namespace linpix
