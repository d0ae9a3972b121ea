// gated_delta and its gradient on the processor: torch's threads, each with its share of the sequences' heads.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "causal_ops.h"
#include "decode.h"

namespace linpix {
namespace {

Heads packed(const Tensor& x) { return {x.data_ptr(), 0, x.stride(0), x.stride(1)}; }

// Of each token and head one number, or a vector that must lie side by side; tokens and heads may have any strides.
Heads checked_packed(const Tensor& x, const char* op, const char* name, ScalarType type,
                     const std::vector<int64_t>& sizes) {
  check_kind(x, op, name, type, sizes);
  STD_TORCH_CHECK(sizes.size() == 2 || x.size(2) == 1 || x.stride(2) == 1, op, ": the last dimension of ", name,
                  " must be contiguous");
  return packed(x);
}

PackedSequences check_packed(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                             const Tensor& g, const Tensor& offsets) {
  STD_TORCH_CHECK(q.dim() == 3, op, ": q must have shape (N, H, D), got ", text(sizes_of(q)));
  STD_TORCH_CHECK(v.dim() == 3, op, ": v must have shape (N, H, M), got ", text(sizes_of(v)));
  const ScalarType type = q.scalar_type();
  check_element(op, type);
  const int64_t tokens = q.size(0), heads = q.size(1);
  PackedSequences s{};
  s.heads = (int)heads;
  s.D = (int)q.size(2);
  s.M = (int)v.size(2);
  s.element = element_of(type);
  s.q = checked_packed(q, op, "q", type, sizes_of(q));
  s.k = checked_packed(k, op, "k", type, sizes_of(q));
  s.v = checked_packed(v, op, "v", type, {tokens, heads, s.M});
  s.beta = checked_packed(beta, op, "beta", computed_in(type), {tokens, heads});
  s.g = checked_packed(g, op, "g", computed_in(type), {tokens, heads});
  STD_TORCH_CHECK(s.D > 0 && s.M > 0, op, ": D and M must be at least 1, got ", s.D, " and ", s.M);
  STD_TORCH_CHECK(offsets.dim() == 1 && offsets.size(0) > 0, op, ": offsets must have shape (B + 1), got ",
                  text(sizes_of(offsets)));
  s.sequences = offsets.size(0) - 1;
  s.offsets = checked<int64_t>(offsets, op, "offsets", ScalarType::Long, {s.sequences + 1});
  STD_TORCH_CHECK(s.offsets[0] == 0 && s.offsets[s.sequences] == tokens, op, ": offsets must go from 0 to ", tokens,
                  ", the number of tokens, got ", s.offsets[0], " to ", s.offsets[s.sequences]);
  for (int64_t i = 0; i < s.sequences; ++i)
    STD_TORCH_CHECK(s.offsets[i] <= s.offsets[i + 1], op, ": offsets must ascend, got ", s.offsets[i + 1], " after ",
                    s.offsets[i]);
  return s;
}

// Threads get equal shares of all heads' tokens: a head of a sequence belongs to the share that its first token is in.
void run(const char* op, const SequenceKernel<PackedSequences>& kernel, const PackedSequences& s) {
  const size_t bytes = (kernel.scratch_bytes(s) + 63) / 64 * 64;
  torch::stable::parallel_for(0, s.offsets[s.sequences] * s.heads, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<void, decltype(&std::free)> scratch(std::aligned_alloc(64, bytes), std::free);
    STD_TORCH_CHECK(scratch, op, ": no memory for ", bytes, " bytes of scratch");
    for (int64_t i = 0; i < s.sequences; ++i) {
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

std::vector<int64_t> states_shape(const PackedSequences& s, int64_t tokens) {
  return {tokens / SEQUENCE_CHUNK, s.heads, s.D, s.M};
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                                   const Tensor& g, const Tensor& offsets) {
  const char* op = "gated_delta";
  PackedSequences s = check_packed(op, q, k, v, beta, g, offsets);
  Tensor o = torch::stable::new_empty(v, sizes_of(v));
  Tensor states = torch::stable::new_empty(v, states_shape(s, q.size(0)), computed_in(v.scalar_type()));
  s.o = packed(o);
  s.states = states.data_ptr();
  if (q.size(0) * s.heads > 0) run(op, chosen_kernels().delta, s);
  return {o, states};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Tensor& d_o, const Tensor& q, const Tensor& k,
                                                            const Tensor& v, const Tensor& beta, const Tensor& g,
                                                            const Tensor& offsets, const Tensor& states) {
  const char* op = "gated_delta_backward";
  PackedSequences s = check_packed(op, q, k, v, beta, g, offsets);
  s.d_o = checked_packed(d_o, op, "do", v.scalar_type(), sizes_of(v));
  s.states = checked<void>(states, op, "states", computed_in(v.scalar_type()), states_shape(s, q.size(0)));
  Tensor dq = torch::stable::new_empty(q, sizes_of(q)), dk = torch::stable::new_empty(k, sizes_of(k)),
         dv = torch::stable::new_empty(v, sizes_of(v)), dbeta = torch::stable::new_empty(beta, sizes_of(beta)),
         dg = torch::stable::new_empty(g, sizes_of(g));
  s.dq = packed(dq);
  s.dk = packed(dk);
  s.dv = packed(dv);
  s.dbeta = packed(dbeta);
  s.dg = packed(dg);
  if (q.size(0) * s.heads > 0) run(op, chosen_kernels().delta_backward, s);
  return {dq, dk, dv, dbeta, dg};
}

}  // namespace
}  // namespace linpix

STABLE_TORCH_LIBRARY_IMPL(linpix, CPU, library) {
  library.impl("gated_delta", TORCH_BOX(&linpix::forward));
  library.impl("gated_delta_backward", TORCH_BOX(&linpix::backward));
}
