// causal_attention and its gradient on the GPU.
#include "../causal_ops.h"

#include "device.h"

namespace linpix {
namespace {

void check_fits(const char* op, const Sequences& s) {
  STD_TORCH_CHECK(s.D <= MAX_SEQUENCE_HEAD && s.M <= MAX_SEQUENCE_HEAD, op, ": heads must be of size ",
                  MAX_SEQUENCE_HEAD, " at most on a GPU, got ", s.D, " and ", s.M);
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, double eps) {
  return causal_attention(q, k, v, eps, [&](const char* op, const Sequences& s) {
    check_fits(op, s);
    const Device device(v);
    check(op, causal(s, device.stream));
  });
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& y, const Tensor& normaliser) {
  return causal_attention_backward(g, q, k, v, y, normaliser, [&](const char* op, const Sequences& s) {
    check_fits(op, s);
    const Device device(v);
    check(op, causal_backward(s, device.stream));
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
