// causal_attention, gated_delta and their gradients on the processor: torch's threads, each with its share of the
// sequences' heads.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "decode.h"
#include "sequence_ops.h"

namespace linpix {
namespace {

// Threads get equal shares of all heads' tokens: a head of a sequence belongs to the share that its first token is in.
template <class S>
void run(const char* op, const SequenceKernel<S>& kernel, const S& s, int64_t tokens) {
  STD_TORCH_CHECK(s.offsets[0] == 0 && s.offsets[s.count] == tokens, op, ": offsets must go from 0 to ", tokens,
                  ", the number of tokens, got ", s.offsets[0], " to ", s.offsets[s.count]);
  for (int64_t i = 0; i < s.count; ++i)
    STD_TORCH_CHECK(s.offsets[i] <= s.offsets[i + 1], op, ": offsets must ascend, got ", s.offsets[i + 1], " after ",
                    s.offsets[i]);
  const size_t bytes = (kernel.scratch_bytes(s) + 63) / 64 * 64;
  torch::stable::parallel_for(0, tokens * s.heads, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<void, decltype(&std::free)> scratch(std::aligned_alloc(64, bytes), std::free);
    STD_TORCH_CHECK(scratch, op, ": no memory for ", bytes, " bytes of scratch");
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
  return causal_attention(q, k, v, offsets, eps, [](const char* op, const CausalSequences& s, const Tensor& v) {
    run(op, chosen_kernels().causal, s, v.size(0));
  });
}

std::tuple<Tensor, Tensor, Tensor> causal_backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const Tensor& offsets, const Tensor& y, const Tensor& normaliser) {
  return causal_attention_backward(
      g, q, k, v, offsets, y, normaliser, [](const char* op, const CausalSequences& s, const Tensor& v) {
        run(op, chosen_kernels().causal_backward, s, v.size(0));
      });
}

DeltaSequences check_delta(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                           const Tensor& g, const Tensor& offsets) {
  DeltaSequences s{};
  check_sequences(op, q, k, v, offsets, s);
  const ScalarType type = computed_in(q.scalar_type());
  s.beta = checked_heads(beta, op, "beta", type, {q.size(0), s.heads});
  s.g = checked_heads(g, op, "g", type, {q.size(0), s.heads});
  return s;
}

std::vector<int64_t> states_shape(const DeltaSequences& s, int64_t tokens) {
  return {tokens / SEQUENCE_CHUNK, s.heads, s.D, s.M};
}

std::tuple<Tensor, Tensor> delta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                                 const Tensor& g, const Tensor& offsets) {
  const char* op = "gated_delta";
  DeltaSequences s = check_delta(op, q, k, v, beta, g, offsets);
  Tensor o = torch::stable::new_empty(v, sizes_of(v));
  Tensor states = torch::stable::new_empty(v, states_shape(s, q.size(0)), computed_in(v.scalar_type()));
  s.o = heads_of(o);
  s.states = states.data_ptr();
  run(op, chosen_kernels().delta, s, q.size(0));
  return {o, states};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> delta_backward(const Tensor& d_o, const Tensor& q, const Tensor& k,
                                                                  const Tensor& v, const Tensor& beta,
                                                                  const Tensor& g, const Tensor& offsets,
                                                                  const Tensor& states) {
  const char* op = "gated_delta_backward";
  DeltaSequences s = check_delta(op, q, k, v, beta, g, offsets);
  s.d_o = checked_heads(d_o, op, "do", v.scalar_type(), sizes_of(v));
  s.states = checked<void>(states, op, "states", computed_in(v.scalar_type()), states_shape(s, q.size(0)));
  Tensor dq = torch::stable::new_empty(q, sizes_of(q)), dk = torch::stable::new_empty(k, sizes_of(k)),
         dv = torch::stable::new_empty(v, sizes_of(v)), dbeta = torch::stable::new_empty(beta, sizes_of(beta)),
         dg = torch::stable::new_empty(g, sizes_of(g));
  s.dq = heads_of(dq);
  s.dk = heads_of(dk);
  s.dv = heads_of(dv);
  s.dbeta = heads_of(dbeta);
  s.dg = heads_of(dg);
  run(op, chosen_kernels().delta_backward, s, q.size(0));
  return {dq, dk, dv, dbeta, dg};
}

}  // namespace
}  // namespace linpix

STABLE_TORCH_LIBRARY_IMPL(linpix, CPU, library) {
  library.impl("causal_attention", TORCH_BOX(&linpix::causal));
  library.impl("causal_attention_backward", TORCH_BOX(&linpix::causal_backward));
  library.impl("gated_delta", TORCH_BOX(&linpix::delta));
  library.impl("gated_delta_backward", TORCH_BOX(&linpix::delta_backward));
}
