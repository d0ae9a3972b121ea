// causal_attention and its gradient on the processor. torch's threads share the heads of the sequences.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "decode.h"
#include "sequence_ops.h"

namespace linpix {
namespace {

// Threads get equal shares of all heads' tokens. A head of a sequence belongs to the thread that has its first token.
void run(const char* op, const SequenceKernel& kernel, const Sequences& s, int64_t tokens) {
  STD_TORCH_CHECK(s.offsets[0] == 0 && s.offsets[s.count] == tokens, op, ": offsets must go from 0 to ", tokens,
                  ", the number of tokens, got ", s.offsets[0], " to ", s.offsets[s.count]);
  for (int64_t i = 0; i < s.count; ++i)
    STD_TORCH_CHECK(s.offsets[i] <= s.offsets[i + 1], op, ": offsets must ascend, got ", s.offsets[i + 1], " after ",
                    s.offsets[i]);
  const size_t bytes = (kernel.scratch_bytes(s) + 63) / 64 * 64;
  torch::stable::parallel_for(0, tokens * s.heads, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<void, decltype(&std::free)> scratch(std::aligned_alloc(64, bytes), std::free);
    STD_TORCH_CHECK(scratch, op, ": cannot allocate ", bytes, " bytes of scratch memory");
    for (int64_t i = 0; i < s.count; ++i) {
      const int64_t length = s.offsets[i + 1] - s.offsets[i];
      for (int64_t head = 0; length > 0 && head < s.heads; ++head) {
        const int64_t at = s.offsets[i] * s.heads + head * length;
        if (at < begin || end <= at) continue;
        std::memset(scratch.get(), 0, bytes);
        kernel.run(s, i, head, scratch.get());
      }
    }
  });
}

std::tuple<Tensor, Tensor> causal(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets,
                                  double eps) {
  return causal_attention(q, k, v, offsets, eps, [](const char* op, const Sequences& s, const Tensor& v) {
    run(op, chosen_kernels().causal, s, v.size(0));
  });
}

std::tuple<Tensor, Tensor, Tensor> causal_backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const Tensor& offsets, const Tensor& y, const Tensor& normaliser) {
  return causal_attention_backward(
      g, q, k, v, offsets, y, normaliser, [](const char* op, const Sequences& s, const Tensor& v) {
        run(op, chosen_kernels().causal_backward, s, v.size(0));
      });
}

}  // namespace
}  // namespace linpix

STABLE_TORCH_LIBRARY_IMPL(linpix, CPU, library) {
  library.impl("causal_attention", TORCH_BOX(&linpix::causal));
  library.impl("causal_attention_backward", TORCH_BOX(&linpix::causal_backward));
}
