// causal_attention and its gradient, for processor and GPU alike: checks their arguments and allocates their results.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "checks.h"
#include "sequence.h"

namespace linpix {

inline Heads heads_of(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1)}; }

// One number for each token and head, or one vector, which must be contiguous. Tokens and heads may have any strides.
inline Heads checked_heads(const Tensor& x, const char* op, const char* name, ScalarType type,
                           const std::vector<int64_t>& sizes) {
  check_kind(x, op, name, type, sizes);
  STD_TORCH_CHECK(sizes.size() == 2 || x.size(2) == 1 || x.stride(2) == 1, op, ": the last dimension of ", name,
                  " must be contiguous");
  return heads_of(x);
}

inline ScalarType computed_in(ScalarType type) { return type == ScalarType::Double ? type : ScalarType::Float; }

// q, k (N, H, D), v (N, H, M), and offsets (B + 1), where each sequence begins. The values of offsets are checked only
// on the CPU.
inline Sequences check_sequences(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& offsets) {
  STD_TORCH_CHECK(q.dim() == 3, op, ": q must have shape (N, H, D), got ", text(sizes_of(q)));
  STD_TORCH_CHECK(v.dim() == 3, op, ": v must have shape (N, H, M), got ", text(sizes_of(v)));
  const ScalarType type = q.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Double, op,
                  ": q, k and v must be float32, bfloat16 or float64, got ", torch::headeronly::toString(type));
  Sequences s{};
  s.heads = (int)q.size(1);
  s.D = (int)q.size(2);
  s.M = (int)v.size(2);
  s.element = type == ScalarType::Double     ? Element::float64
              : type == ScalarType::BFloat16 ? Element::bfloat16
                                             : Element::float32;
  s.q = checked_heads(q, op, "q", type, sizes_of(q));
  s.k = checked_heads(k, op, "k", type, sizes_of(q));
  s.v = checked_heads(v, op, "v", type, {q.size(0), s.heads, s.M});
  STD_TORCH_CHECK(s.D > 0 && s.M > 0, op, ": D and M must be at least 1, got ", s.D, " and ", s.M);
  STD_TORCH_CHECK(offsets.dim() == 1 && offsets.size(0) > 0, op, ": offsets must have shape (B + 1), got ",
                  text(sizes_of(offsets)));
  s.count = offsets.size(0) - 1;
  s.offsets = checked<int64_t>(offsets, op, "offsets", ScalarType::Long, {s.count + 1});
  return s;
}

// run(op, sequences, v) does the work, if there is any.
template <class Run>
std::tuple<Tensor, Tensor> causal_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets,
                                            double eps, Run run) {
  const char* op = "causal_attention";
  Sequences s = check_sequences(op, q, k, v, offsets);
  Tensor y = torch::stable::new_empty(v, sizes_of(v));
  Tensor normaliser = torch::stable::new_empty(v, std::vector<int64_t>{v.size(0), s.heads},
                                               computed_in(v.scalar_type()));
  s.eps = eps;
  s.y = heads_of(y);
  s.normaliser = heads_of(normaliser);
  run(op, s, v);
  return {y, normaliser};
}

template <class Run>
std::tuple<Tensor, Tensor, Tensor> causal_attention_backward(const Tensor& g, const Tensor& q, const Tensor& k,
                                                             const Tensor& v, const Tensor& offsets, const Tensor& y,
                                                             const Tensor& normaliser, Run run) {
  const char* op = "causal_attention_backward";
  Sequences s = check_sequences(op, q, k, v, offsets);
  const ScalarType type = v.scalar_type();
  s.g = checked_heads(g, op, "g", type, sizes_of(v));
  s.y = checked_heads(y, op, "y", type, sizes_of(v));
  s.normaliser = checked_heads(normaliser, op, "normaliser", computed_in(type), {v.size(0), s.heads});
  Tensor dq = torch::stable::new_empty(q, sizes_of(q)), dk = torch::stable::new_empty(k, sizes_of(k)),
         dv = torch::stable::new_empty(v, sizes_of(v));
  s.dq = heads_of(dq);
  s.dk = heads_of(dk);
  s.dv = heads_of(dv);
  run(op, s, v);
  return {dq, dk, dv};
}

}  // namespace linpix
