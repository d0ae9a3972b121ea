// The operators of causal linear attention, but for what runs them: checks that name what they saw, and results.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "checks.h"
#include "sequence.h"

namespace linpix {

inline Heads heads_of(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

// Each token's vector must lie side by side; images, tokens and heads may have any strides.
inline Heads checked_heads(const Tensor& x, const char* op, const char* name, ScalarType type,
                           const std::vector<int64_t>& sizes) {
  check_kind(x, op, name, type, sizes);
  STD_TORCH_CHECK(x.size(3) == 1 || x.stride(3) == 1, op, ": the last dimension of ", name, " must be contiguous");
  return heads_of(x);
}

inline ScalarType computed_in(ScalarType type) { return type == ScalarType::Double ? type : ScalarType::Float; }

inline void check_element(const char* op, ScalarType type) {
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Double, op,
                  ": q, k and v must be float32, bfloat16 or float64, got ", torch::headeronly::toString(type));
}

inline Element element_of(ScalarType type) {
  return type == ScalarType::Double ? Element::float64 : type == ScalarType::BFloat16 ? Element::bfloat16
                                                                                      : Element::float32;
}

inline Sequences check_sequences(const char* op, const Tensor& q, const Tensor& k, const Tensor& v) {
  STD_TORCH_CHECK(q.dim() == 4, op, ": q must have shape (B, T, H, D), got ", text(sizes_of(q)));
  STD_TORCH_CHECK(v.dim() == 4, op, ": v must have shape (B, T, H, M), got ", text(sizes_of(v)));
  const ScalarType type = q.scalar_type();
  check_element(op, type);
  Sequences s{};
  s.images = q.size(0);
  s.tokens = q.size(1);
  s.heads = (int)q.size(2);
  s.D = (int)q.size(3);
  s.M = (int)v.size(3);
  s.element = element_of(type);
  s.q = checked_heads(q, op, "q", type, sizes_of(q));
  s.k = checked_heads(k, op, "k", type, sizes_of(q));
  s.v = checked_heads(v, op, "v", type, {s.images, s.tokens, s.heads, s.M});
  STD_TORCH_CHECK(s.D > 0 && s.M > 0, op, ": D and M must be at least 1, got ", s.D, " and ", s.M);
  return s;
}

// run(op, Sequences) does the work where there is some.
template <class Run>
std::tuple<Tensor, Tensor> causal_attention(const Tensor& q, const Tensor& k, const Tensor& v, double eps, Run run) {
  const char* op = "causal_attention";
  Sequences s = check_sequences(op, q, k, v);
  Tensor y = torch::stable::new_empty(v, sizes_of(v));
  Tensor normaliser = torch::stable::new_empty(v, std::vector<int64_t>{s.images, s.tokens, s.heads},
                                               computed_in(v.scalar_type()));
  s.eps = eps;
  s.y = heads_of(y);
  s.normaliser = heads_of(normaliser);
  if (s.images * s.tokens * s.heads > 0) run(op, s);
  return {y, normaliser};
}

template <class Run>
std::tuple<Tensor, Tensor, Tensor> causal_attention_backward(const Tensor& g, const Tensor& q, const Tensor& k,
                                                             const Tensor& v, const Tensor& y,
                                                             const Tensor& normaliser, Run run) {
  const char* op = "causal_attention_backward";
  Sequences s = check_sequences(op, q, k, v);
  const ScalarType type = v.scalar_type();
  s.g = checked_heads(g, op, "g", type, sizes_of(v));
  s.y = checked_heads(y, op, "y", type, sizes_of(v));
  check_kind(normaliser, op, "normaliser", computed_in(type), {s.images, s.tokens, s.heads});
  s.normaliser = heads_of(normaliser);
  Tensor dq = torch::stable::new_empty(q, sizes_of(q)), dk = torch::stable::new_empty(k, sizes_of(k)),
         dv = torch::stable::new_empty(v, sizes_of(v));
  s.dq = heads_of(dq);
  s.dk = heads_of(dk);
  s.dv = heads_of(dv);
  if (s.images * s.tokens * s.heads > 0) run(op, s);
  return {dq, dk, dv};
}

}  // namespace linpix
