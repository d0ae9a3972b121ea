// The operators on the CPU: checks of their arguments, then plain pointers for decode.h. Schemas: model/ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "checks.h"
#include "decode.h"
#include "parts.h"
#include "team.h"

namespace linpix {

// --- which kernels -------------------------------------------------------------------------------------------------

const Kernels& chosen_kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    std::vector<const Kernels*> usable;  // the best first
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) usable.push_back(&kernels_avx512bf16);
    if (avx512 && __builtin_cpu_supports("avx512vnni")) usable.push_back(&kernels_avx512vnni);
    if (avx512) usable.push_back(&kernels_avx512);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) usable.push_back(&kernels_avx2);
#endif
    usable.push_back(&kernels_portable);
    const char* wanted = std::getenv("LINPIX_KERNEL");
    if (!wanted || !*wanted) return *usable[0];
    std::string names;
    for (const Kernels* kernels : usable) {
      if (!std::strcmp(kernels->name, wanted)) return *kernels;
      names += (names.empty() ? "" : ", ") + std::string(kernels->name);
    }
    STD_TORCH_CHECK(false, "LINPIX_KERNEL must be one of ", names, " on this processor, got ", wanted);
    return *usable[0];
  }();
  return chosen;
}

namespace {

std::string cpu_kernel() { return chosen_kernels().name; }
bool cpu_has_fast_bf16() { return chosen_kernels().fast_bf16; }

// --- recurrent_step --------------------------------------------------------------------------------------------------

template <class T>
float as_float(T x);
template <>
float as_float(float x) {
  return x;
}
template <>
float as_float(uint16_t x) {  // bfloat16
  const uint32_t bits = (uint32_t)x << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
void put(float* to, float x) { *to = x; }
void put(uint16_t* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  *to = (uint16_t)(nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
void attend_all(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& S, const Tensor& z,
                const int64_t* slots, float eps, Tensor& y) {
  const int64_t B = q.size(0), tokens = q.size(1), H = q.size(2), D = q.size(3), M = v.size(3);
  const Kernels& kernels = chosen_kernels();
  const auto one_head = [&](int64_t row, int64_t h, float* scratch) {
    const auto read = [&](const Tensor& from, int64_t t, float* to) {
      const T* at = (const T*)from.data_ptr() + row * from.stride(0) + t * from.stride(1) + h * from.stride(2);
      for (int64_t i = 0; i < from.size(3); ++i) to[i] = as_float<T>(at[i * from.stride(3)]);
    };
    float *mapped_q = scratch, *mapped_k = mapped_q + D, *value = mapped_k + D, *result = value + M;
    for (int64_t t = 0; t < tokens; ++t) {
      read(q, t, mapped_q);
      read(k, t, mapped_k);
      read(v, t, value);
      kernels.attend(mapped_q, mapped_k, value, (float*)S.data_ptr() + slots[row] * S.stride(0) + h * D * M,
                     (float*)z.data_ptr() + slots[row] * z.stride(0) + h * D, (int)D, (int)M, eps, result);
      T* to = (T*)y.data_ptr() + ((row * tokens + t) * H + h) * M;
      for (int64_t i = 0; i < M; ++i) put(to + i, result[i]);
    }
  };
  // Threads share the heads, not the rows, since rows may share slot 0.
  const bool small = B * tokens * H * D * M < 1 << 18;
  const int members = small ? 1 : (int)std::min<int64_t>(torch::stable::get_num_threads(), H);
  std::vector<std::vector<float>> scratch(members, std::vector<float>(2 * D + 2 * M));
  run_together(members, [&](int member) {
    for (int64_t row = 0; row < B; ++row)
      for (int64_t h = member * H / members; h < (member + 1) * H / members; ++h)
        one_head(row, h, scratch[member].data());
  });
}

Tensor recurrent_step(const Tensor& q, const Tensor& k, const Tensor& v, Tensor S, Tensor z, const Tensor& slots,
                      double eps) {
  const char* op = "recurrent_step";
  const auto [B, tokens, H, D, M, N, type] = check_step(op, q, k, v, S, z);
  const int64_t* at = checked<int64_t>(slots, op, "slots", ScalarType::Long, {B});
  check_slots(at, B, N, op);
  Tensor y = torch::stable::new_empty(v, {B, tokens, H, M});
  if (B * tokens == 0) return y;
  if (type == ScalarType::Float)
    attend_all<float>(q, k, v, S, z, at, (float)eps, y);
  else
    attend_all<uint16_t>(q, k, v, S, z, at, (float)eps, y);
  return y;
}

// --- decode_quantum, prefill, read -----------------------------------------------------------------------------------

// Adds the pools S and z of N states to the rows of a call, and checks the values of their slots.
Rows with_states(Rows rows, const char* op, const Model& m, int64_t N, const PoolsOf& pools, int64_t threads) {
  STD_TORCH_CHECK(threads >= 1 && threads <= 1024, op, ": threads must be in 1..1024, got ", threads);
  for (int which : {PoolOrder::tokens, PoolOrder::pairs, PoolOrder::scale, PoolOrder::saturated})
    STD_TORCH_CHECK(!pools.has(which), op, ": the pools tokens, pairs, scale and saturated must be empty on the CPU, "
                    "whose state is float32 and written at every step");
  rows.S = checked<float>(pools[PoolOrder::S], op, "S", ScalarType::Float, {N, m.layers, m.heads, m.key_dim, m.value_dim});
  rows.z = checked<float>(pools[PoolOrder::z], op, "z", ScalarType::Float, {N, m.layers, m.heads, m.key_dim});
  check_slots(rows.slots, rows.count, N, op);
  return rows;
}

// The rows of decode_quantum and prefill.
Rows checked_rows(const char* op, const Model& m, const PoolsOf& pools, const Tensor& numbers, int64_t threads) {
  const Rows rows =
      with_states(rows_of(op, m, pools, numbers), op, m, pools[PoolOrder::canvas].size(0), pools, threads);
  for (int i = 0; i < rows.count; ++i)
    STD_TORCH_CHECK(256 <= rows.start[i] && rows.start[i] <= 256 + m.classes, op, ": start must be in 256..",
                    256 + m.classes, ", got ", rows.start[i], " in row ", i);
  return rows;
}

// The steps of each row, 0 for padding rows (slot 0): on a processor nothing is gained by computing them.
std::vector<int64_t> real_steps(const char* op, const Model& m, const Rows& rows) {
  std::vector<int64_t> real(rows.count);
  for (int i = 0; i < rows.count; ++i) {
    const int64_t from = rows.positions[i], steps = rows.steps[i];
    STD_TORCH_CHECK(0 <= from && 0 <= steps && steps <= m.tokens - from, op, ": row ", i, " goes from ", from, " by ",
                    steps, " steps, but an image has ", m.tokens, " tokens");
    real[i] = rows.slots[i] ? steps : 0;
  }
  return real;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> decode_quantum(
    std::vector<Tensor> tensors, const Tensor& numbers, const Tensor& temperatures, const std::vector<Tensor>& weights,
    const std::vector<int64_t>& sizes, double eps, const std::vector<int64_t>& limits, double patience,
    bool with_log_probs) {
  const char* op = "decode_quantum";
  check_limits(op, limits);
  const PoolsOf pools(op, tensors);
  const Parts parts(op, weights, sizes, eps);
  const Model& m = parts.model;
  Rows rows = checked_rows(op, m, pools, numbers, limits[LimitOrder::threads]);
  const std::vector<int64_t> real = real_steps(op, m, rows);
  rows.steps = real.data();
  const auto results =
      results_of(op, m, rows, pools[PoolOrder::known], numbers, temperatures, limits, with_log_probs);
  for (int i = 0; i < rows.count; ++i) {
    STD_TORCH_CHECK(rows.temperatures[i] >= 0, op, ": temperatures must be at least 0, got ", rows.temperatures[i]);
    STD_TORCH_CHECK(real[i] <= rows.most_steps, op, ": row ", i, " takes ", real[i], " steps, but the limit is ",
                    rows.most_steps);
  }
  decode(chosen_kernels(), m, rows, (int)limits[LimitOrder::threads], patience);
  return results;
}

void prefill_slots(std::vector<Tensor> tensors, const Tensor& numbers, const std::vector<Tensor>& weights,
                   const std::vector<int64_t>& sizes, double eps, [[maybe_unused]] int64_t most, int64_t threads) {
  const char* op = "prefill";
  const PoolsOf pools(op, tensors);
  const Parts parts(op, weights, sizes, eps);
  Rows rows = checked_rows(op, parts.model, pools, numbers, threads);
  const std::vector<int64_t> real = real_steps(op, parts.model, rows);
  rows.steps = real.data();
  prefill(chosen_kernels(), parts.model, rows, (int)threads);
}

Tensor read_into(std::vector<Tensor> tensors, const Tensor& slots, const Tensor& inputs, const Tensor& offsets,
                 const std::vector<Tensor>& weights, const std::vector<int64_t>& sizes, double eps,
                 [[maybe_unused]] int64_t most, int64_t threads) {
  const char* op = "read";
  const PoolsOf pools(op, tensors);
  const Parts parts(op, weights, sizes, eps);
  const Model& m = parts.model;
  check_read(op, pools, slots, inputs);
  const int64_t N = pools[PoolOrder::S].size(0), B = slots.size(0), n = inputs.size(0);
  const int64_t* at = checked<int64_t>(slots, op, "slots", ScalarType::Long, {B});
  Rows rows = with_states(slots_of(op, m, N, pools, at, B), op, m, N, pools, threads);
  rows.inputs = checked<float>(inputs, op, "inputs", ScalarType::Float, {n, m.d_model});
  rows.offsets = checked<int64_t>(offsets, op, "offsets", ScalarType::Long, {B + 1});
  STD_TORCH_CHECK(rows.offsets[0] == 0 && rows.offsets[B] == n, op, ": offsets must go from 0 to ", n, ", got ",
                  rows.offsets[0], " and ", rows.offsets[B]);
  for (int i = 0; i < rows.count; ++i)
    STD_TORCH_CHECK(rows.offsets[i] < rows.offsets[i + 1], op, ": row ", i, " must have an input, but goes from ",
                    rows.offsets[i], " to ", rows.offsets[i + 1]);
  Tensor features = torch::stable::new_empty(inputs, {B, m.d_model});
  rows.features = (float*)features.data_ptr();
  read(chosen_kernels(), m, rows, (int)threads);
  return features;
}

}  // namespace
}  // namespace linpix

STABLE_TORCH_LIBRARY_IMPL(linpix, CPU, library) {
  library.impl("recurrent_step", TORCH_BOX(&linpix::recurrent_step));
  library.impl("decode_quantum", TORCH_BOX(&linpix::decode_quantum));
  library.impl("prefill", TORCH_BOX(&linpix::prefill_slots));
  library.impl("read", TORCH_BOX(&linpix::read_into));
}

STABLE_TORCH_LIBRARY_IMPL(linpix, CompositeExplicitAutograd, library) {
  library.impl("cpu_kernel", TORCH_BOX(&linpix::cpu_kernel));
  library.impl("cpu_has_fast_bf16", TORCH_BOX(&linpix::cpu_has_fast_bf16));
}
