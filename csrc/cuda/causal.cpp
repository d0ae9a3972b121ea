// The operators causal_attention and its gradient on the GPU.
#include "../sequence_ops.h"

#include "device.h"

namespace linpix {
namespace {

// kernel: causal or causal_backward. The values of s.offsets are not checked, since they are in the GPU's memory.
void run(const char* op, int (*kernel)(const Sequences&, void*), const Sequences& s, const Tensor& v) {
  STD_TORCH_CHECK(s.D <= MAX_SEQUENCE_HEAD && s.M <= MAX_SEQUENCE_HEAD, op, ": heads must be of size ",
                  MAX_SEQUENCE_HEAD, " at most on a GPU, got ", s.D, " and ", s.M);
  if (v.size(0) * s.heads == 0) return;
  const Device device(v);
  check(op, kernel(s, device.stream));
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets,
                                   double eps) {
  return causal_attention(q, k, v, offsets, eps, [](const char* op, const Sequences& s, const Tensor& like) {
    run(op, causal, s, like);
  });
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& offsets, const Tensor& y, const Tensor& normaliser) {
  return causal_attention_backward(
      g, q, k, v, offsets, y, normaliser, [](const char* op, const Sequences& s, const Tensor& like) {
        run(op, causal_backward, s, like);
      });
}

}  // namespace
}  // namespace linpix

#if defined(USE_CUDA)
STABLE_TORCH_LIBRARY_IMPL(linpix, CUDA, library) {
#else
STABLE_TORCH_LIBRARY_IMPL(linpix_emulated, CPU, library) {
#endif
  library.impl("causal_attention", TORCH_BOX(&linpix::forward));
  library.impl("causal_attention_backward", TORCH_BOX(&linpix::backward));
}
