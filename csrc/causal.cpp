// causal_attention and its gradient on the processor: torch's threads, each with its share of the images' heads.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "causal_ops.h"
#include "decode.h"

namespace linpix {
namespace {

void run(const char* op, const SequenceKernel<Sequences>& kernel, const Sequences& s) {
  const size_t bytes = (kernel.scratch_bytes(s) + 63) / 64 * 64;
  torch::stable::parallel_for(0, s.images * s.heads, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<void, decltype(&std::free)> scratch(std::aligned_alloc(64, bytes), std::free);
    STD_TORCH_CHECK(scratch, op, ": no memory for ", bytes, " bytes of scratch");
    for (int64_t i = begin; i < end; ++i) {
      std::memset(scratch.get(), 0, bytes);
      kernel.run(s, i / s.heads, i % s.heads, scratch.get());
    }
  });
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, double eps) {
  return causal_attention(q, k, v, eps,
                          [](const char* op, const Sequences& s) { run(op, chosen_kernels().causal, s); });
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& y, const Tensor& normaliser) {
  return causal_attention_backward(
      g, q, k, v, y, normaliser,
      [](const char* op, const Sequences& s) { run(op, chosen_kernels().causal_backward, s); });
}

}  // namespace
}  // namespace linpix

STABLE_TORCH_LIBRARY_IMPL(linpix, CPU, library) {
  library.impl("causal_attention", TORCH_BOX(&linpix::forward));
  library.impl("causal_attention_backward", TORCH_BOX(&linpix::backward));
}
