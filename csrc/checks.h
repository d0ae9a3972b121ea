// Checks of the tensors that an operator is given. An error says what was expected and what was given.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <string>
#include <vector>

namespace linpix {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string text(const std::vector<int64_t>& sizes) {
  std::string s = "(";
  for (size_t i = 0; i < sizes.size(); ++i) s += (i ? ", " : "") + std::to_string(sizes[i]);
  return s + ")";
}

inline std::vector<int64_t> sizes_of(const Tensor& x) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < x.dim(); ++i) sizes.push_back(x.size(i));
  return sizes;
}

inline void check_kind(const Tensor& x, const char* op, const char* name, ScalarType type, const std::vector<int64_t>& sizes) {
#if defined(USE_CUDA)
  STD_TORCH_CHECK(x.is_cuda(), op, ": ", name, " must be on the GPU, like the other tensors");
#else
  STD_TORCH_CHECK(x.is_cpu(), op, ": ", name, " must be on the CPU, like the other tensors");
#endif
  STD_TORCH_CHECK(x.scalar_type() == type, op, ": ", name, " must have dtype ", torch::headeronly::toString(type),
                  ", got ", torch::headeronly::toString(x.scalar_type()));
  STD_TORCH_CHECK(sizes_of(x) == sizes, op, ": ", name, " must have shape ", text(sizes), ", got ", text(sizes_of(x)));
}

template <class T>
T* checked(const Tensor& x, const char* op, const char* name, ScalarType type, const std::vector<int64_t>& sizes) {
  check_kind(x, op, name, type, sizes);
  STD_TORCH_CHECK(x.is_contiguous(), op, ": ", name, " must be contiguous");
  return (T*)x.data_ptr();
}

// Sizes of recurrent_step's arguments: q and k (B, T, H, D), v (B, T, H, M), S and z of one layer of a pool of N slots.
struct StepSizes {
  int64_t B, tokens, H, D, M, N;
  ScalarType type;  // of q, k and v
};

inline StepSizes check_step(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& S,
                            const Tensor& z) {
  STD_TORCH_CHECK(q.dim() == 4, op, ": q must have shape (B, T, H, D), got ", text(sizes_of(q)));
  STD_TORCH_CHECK(v.dim() == 4, op, ": v must have shape (B, T, H, M), got ", text(sizes_of(v)));
  STD_TORCH_CHECK(S.dim() == 4, op, ": S must have shape (N, H, D, M), got ", text(sizes_of(S)));
  const StepSizes s = {q.size(0), q.size(1), q.size(2), q.size(3), v.size(3), S.size(0), q.scalar_type()};
  STD_TORCH_CHECK(s.type == ScalarType::Float || s.type == ScalarType::BFloat16, op,
                  ": q, k and v must be float32 or bfloat16, got ", torch::headeronly::toString(s.type));
  check_kind(q, op, "q", s.type, {s.B, s.tokens, s.H, s.D});
  check_kind(k, op, "k", s.type, {s.B, s.tokens, s.H, s.D});
  check_kind(v, op, "v", s.type, {s.B, s.tokens, s.H, s.M});
  check_kind(S, op, "S", ScalarType::Float, {s.N, s.H, s.D, s.M});
  check_kind(z, op, "z", ScalarType::Float, {s.N, s.H, s.D});
  STD_TORCH_CHECK(S.stride(3) == 1 && S.stride(2) == s.M && S.stride(1) == s.D * s.M && z.stride(2) == 1 &&
                  z.stride(1) == s.D, op, ": each slot of S and z must be contiguous");
  return s;
}

inline void check_slots(const int64_t* slots, int64_t rows, int64_t pool, const char* op) {
  std::vector<bool> taken(pool);
  for (int64_t i = 0; i < rows; ++i) {
    STD_TORCH_CHECK(0 <= slots[i] && slots[i] < pool, op, ": slots must be in 0..", pool - 1, ", got ", slots[i],
                    " in row ", i);
    STD_TORCH_CHECK(slots[i] == 0 || !taken[slots[i]], op, ": slot ", slots[i], " appears twice; only slot 0 may");
    taken[slots[i]] = true;
  }
}

}  // namespace linpix
