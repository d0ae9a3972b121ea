// The operators on a GPU: checks of their arguments, buffers, then plain pointers for kernels.h, on the current stream.
//
// Nothing here waits for the GPU, so calls can be recorded in a CUDA graph. Values in the GPU's memory (slots,
// positions, steps) are therefore not checked here but in model/cuda.py. Compiled with LINPIX_EMULATE, the same code
// gives tests on a processor operators of their own.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "../checks.h"
#include "../parts.h"
#include "device.h"

namespace linpix {
namespace {

void check_heads(const char* op, int64_t D, int64_t M) {
  STD_TORCH_CHECK(attends((int)D, (int)M), op, ": heads must be of size 8, 16 or 32, keys and values alike, got ", D,
                  " and ", M);
}

// The state kernel alone, on one layer of a pool. q, k and v are copied to where a qkv product would leave them.
Tensor recurrent_step(const Tensor& q, const Tensor& k, const Tensor& v, Tensor S, Tensor z, const Tensor& slots,
                      double eps) {
  const char* op = "recurrent_step";
  const auto [B, tokens, H, D, M, N, type] = check_step(op, q, k, v, S, z);
  check_heads(op, D, M);
  const int64_t layers = N > 1 ? S.stride(0) / (H * D * M) : 1;  // of the pool: S and z are one of its layers
  STD_TORCH_CHECK(N <= 1 || (S.stride(0) == layers * H * D * M && z.stride(0) == layers * H * D), op,
                  ": S and z must be the same layer of a pool (N, L, H, D, M) and (N, L, H, D)");
  const Device device(S);
  Tensor qkv = torch::stable::new_empty(S, std::vector<int64_t>{B, tokens, H, 2 * D + M});
  int64_t at = 0;
  for (const Tensor* part : {&q, &k, &v}) {
    Tensor place = torch::stable::narrow(qkv, 3, at, part->size(3));
    torch::stable::copy_(place, *part);
    at += part->size(3);
  }
  Tensor steps = torch::stable::new_empty(slots, std::vector<int64_t>{B});
  torch::stable::fill_(steps, (double)(tokens + 1));
  Tensor y = torch::stable::new_empty(v, std::vector<int64_t>{B, tokens, H, M});
  if (B * tokens == 0) return y;
  AttendCall call{};
  call.group = (int)(2 * D + M);
  call.depth = (int)(H * M);
  Pass& pass = call.pass;
  pass.model.layers = (int)layers;
  pass.model.heads = (int)H;
  pass.model.key_dim = (int)D;
  pass.model.value_dim = (int)M;
  pass.model.bf16 = type == ScalarType::BFloat16;
  pass.model.eps = (float)eps;
  pass.rows.count = (int)B;
  pass.rows.slots = checked<int64_t>(slots, op, "slots", ScalarType::Long, {B});
  pass.rows.steps = (int64_t*)steps.data_ptr();
  pass.pools.S = S.data_ptr();
  pass.pools.z = (float*)z.data_ptr();
  pass.buffers.qkv = (float*)qkv.data_ptr();
  pass.buffers.y = y.data_ptr();
  pass.tokens = (int)tokens;
  pass.step = 1;  // not the first token of an image, which would find an empty state
  check(op, attend(call, device.stream, false));
  return y;
}

// A pass made of the operators' arguments, with buffers for at_once tokens of each row.
class Call {
 public:
  // Of decode_quantum and prefill. most: the largest number of steps of a row.
  Call(const char* op, const PoolsOf& pools, const Tensor& numbers, const std::vector<Tensor>& weights,
       const std::vector<int64_t>& sizes, double eps, int64_t most, int64_t at_once)
      : Call(op, weights, sizes, eps) {
    const Model& m = pass.model;
    STD_TORCH_CHECK(0 <= most && most <= m.tokens, op, ": most must be in 0..", m.tokens, ", got ", most);
    pass.rows = rows_of(op, m, pools, numbers);
    const int64_t N = pools[PoolOrder::canvas].size(0);
    const bool counts = pools.has(PoolOrder::tokens);
    STD_TORCH_CHECK(counts || m.background < 0, op, ": a model with a background needs the pool `tokens`, got none");
    if (counts) pass.pools.tokens = checked<int64_t>(pools[PoolOrder::tokens], op, "tokens", ScalarType::Long, {N});
    if (!counts) pass.rows.conditioned = nullptr;  // such a model reads nothing
    take(op, N, pools, at_once);
  }
  // Of read. most: inputs of a row, of which S and z get what they leave in an empty state.
  Call(const char* op, const PoolsOf& pools, const Tensor& slots, const Tensor& inputs, const Tensor& offsets,
       const std::vector<Tensor>& weights, const std::vector<int64_t>& sizes, double eps, int64_t most, int64_t at_once)
      : Call(op, weights, sizes, eps) {
    const Tensor& S = pools[PoolOrder::S];
    const int64_t B = slots.size(0);
    STD_TORCH_CHECK(0 <= most && most <= inputs.size(0), op, ": most must be in 0..", inputs.size(0), ", got ", most);
    STD_TORCH_CHECK(S.scalar_type() == ScalarType::Float, op, ": S must have dtype Float, got ",
                    torch::headeronly::toString(S.scalar_type()));
    pass.model.marginal = nullptr;  // these are no sub-pixels, so the first of them counts
    Rows& rows = pass.rows;
    rows = slots_of(op, pass.model, S.size(0), pools, checked<int64_t>(slots, op, "slots", ScalarType::Long, {B}), B);
    rows.inputs = checked<float>(inputs, op, "inputs", ScalarType::Float, {inputs.size(0), pass.model.d_model});
    rows.offsets = checked<int64_t>(offsets, op, "offsets", ScalarType::Long, {rows.count + 1});
    Tensor all = offsets;
    const auto from = [&](int64_t first) {  // in double, since integers cannot be subtracted here
      return torch::stable::to(torch::stable::narrow(all, 0, first, rows.count), ScalarType::Double);
    };
    held_.push_back(torch::stable::to(torch::stable::subtract(from(1), from(0)), ScalarType::Long));
    rows.steps = (const int64_t*)held_[0].data_ptr();
    take(op, S.size(0), pools, at_once);
  }

  Pass pass{};

 private:
  Call(const char* op, const std::vector<Tensor>& weights, const std::vector<int64_t>& sizes, double eps)
      : parts_(op, weights, sizes, eps) {
    const Model& m = pass.model = parts_.model;
    check_heads(op, m.key_dim, m.value_dim);
    STD_TORCH_CHECK(m.d_model <= MAX_D_MODEL, op, ": d_model must be at most ", MAX_D_MODEL, ", got ", m.d_model);
    STD_TORCH_CHECK(m.mixtures <= MAX_MIXTURES, op, ": at most ", MAX_MIXTURES, " mixtures, got ", m.mixtures);
    STD_TORCH_CHECK(m.d_ff <= MAX_DEPTH && m.heads * m.value_dim <= MAX_DEPTH, op, ": d_ff and the values of all heads "
                    "must be at most ", MAX_DEPTH, ", got ", m.d_ff, " and ", m.heads * m.value_dim);
    STD_TORCH_CHECK(m.background < 0 || m.project.columns <= MAX_BACKGROUND_DIM, op, ": background_dim must be at most ",
                    MAX_BACKGROUND_DIM, ", got ", m.project.columns);
  }

  // The pools of N states, and buffers.
  void take(const char* op, int64_t N, const PoolsOf& given, int64_t at_once) {
    const Model& m = pass.model;
    const int64_t B = pass.rows.count, L = m.layers, H = m.heads, D = m.key_dim, M = m.value_dim;
    STD_TORCH_CHECK(B <= 1 << 16, op, ": at most 65536 rows, got ", B);
    Pools& pools = pass.pools;
    const Tensor &S = given[PoolOrder::S], &z = given[PoolOrder::z];
    const bool half = S.scalar_type() == ScalarType::Half;
    int of_half = 0;
    for (int which : {PoolOrder::pairs, PoolOrder::scale, PoolOrder::saturated}) of_half += given.has(which);
    STD_TORCH_CHECK(of_half == 3 * half, op, ": a float16 S needs pairs, scale and saturated, and a float32 S none of "
                    "them, got ", of_half, " of them and ", torch::headeronly::toString(S.scalar_type()));
    if (half) {
      STD_TORCH_CHECK(D == HALF_HEAD, op, ": a float16 S must have heads of size ", HALF_HEAD, ", got ", D);
      pools.pairs = checked<uint16_t>(given[PoolOrder::pairs], op, "pairs", ScalarType::BFloat16, {N, L, H, GROUP, D + M});
      pools.scale = checked<float>(given[PoolOrder::scale], op, "scale", ScalarType::Float, {L, H});
      pools.saturated = checked<int64_t>(given[PoolOrder::saturated], op, "saturated", ScalarType::Long, {1});
    }
    pools.S = checked<void>(S, op, "S", half ? ScalarType::Half : ScalarType::Float, {N, L, H, D, M});
    pools.z = checked<float>(z, op, "z", ScalarType::Float, {N, L, H, D});

    const int64_t count = m.bf16 ? (B * at_once + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS : B * at_once;
    const Layer& layer = m.layer[0];
    const ScalarType type = m.bf16 ? ScalarType::BFloat16 : ScalarType::Float;
    const auto buffer = [&](int64_t columns, ScalarType kind, bool zeroed = false) {
      return held(z, count, columns, kind, zeroed);
    };
    pass.buffers.sum = (float*)buffer(m.d_model, ScalarType::Float);
    pass.buffers.x = (float*)buffer(m.d_model, ScalarType::Float);
    pass.buffers.qkv = (float*)buffer((int64_t)layer.qkv.groups * layer.qkv.columns, ScalarType::Float);
    pass.buffers.y = buffer(layer.out.depth, type, H * M < layer.out.depth);  // padded columns are multiplied by zero
    pass.buffers.hidden = buffer(layer.down.depth, type);
    if (m.bf16) pass.buffers.normalised = buffer(layer.qkv.depth, type);
    if (pools.tokens) pass.buffers.skipped = (bool*)held(z, B, at_once, ScalarType::Bool, false);
  }

  // Memory on the device of `beside`, for as long as this Call lives.
  void* held(const Tensor& beside, int64_t rows, int64_t columns, ScalarType kind, bool zeroed) {
    const std::vector<int64_t> shape = {rows, columns};
    held_.push_back(zeroed ? torch::stable::new_zeros(beside, shape, kind)
                           : torch::stable::new_empty(beside, shape, kind));
    return held_.back().data_ptr();
  }

  Parts parts_;
  std::vector<Tensor> held_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> decode_quantum(
    std::vector<Tensor> tensors, const Tensor& numbers, const Tensor& temperatures, const std::vector<Tensor>& weights,
    const std::vector<int64_t>& sizes, double eps, const std::vector<int64_t>& limits, double, bool with_log_probs) {
  const char* op = "decode_quantum";
  check_limits(op, limits);
  const PoolsOf pools(op, tensors);
  const Device device(pools[PoolOrder::S]);
  Call call(op, pools, numbers, weights, sizes, eps, limits[LimitOrder::steps], 1);
  Rows& rows = call.pass.rows;
  const auto results = results_of(op, call.pass.model, rows, pools[PoolOrder::known], numbers, temperatures, limits,
                                  with_log_probs);
  if (rows.count) check(op, decode(call.pass, (int)rows.most_passes, device.stream));
  return results;
}

void prefill_slots(std::vector<Tensor> tensors, const Tensor& numbers, const std::vector<Tensor>& weights,
                   const std::vector<int64_t>& sizes, double eps, int64_t most, int64_t) {
  const char* op = "prefill";
  const PoolsOf pools(op, tensors);
  const Device device(pools[PoolOrder::S]);
  Call call(op, pools, numbers, weights, sizes, eps, most, most < CHUNK ? most : CHUNK);
  if (call.pass.rows.count) check(op, prefill(call.pass, most, device.stream));
}

Tensor read_into(std::vector<Tensor> tensors, const Tensor& slots, const Tensor& inputs, const Tensor& offsets,
                 const std::vector<Tensor>& weights, const std::vector<int64_t>& sizes, double eps, int64_t most,
                 int64_t) {
  const char* op = "read";
  const PoolsOf pools(op, tensors);
  const Device device(pools[PoolOrder::S]);
  check_read(op, pools, slots, inputs);
  Call call(op, pools, slots, inputs, offsets, weights, sizes, eps, most, most < CHUNK ? most : CHUNK);
  Rows& rows = call.pass.rows;
  Tensor features = torch::stable::new_empty(inputs, {rows.count, call.pass.model.d_model});
  rows.features = (float*)features.data_ptr();
  if (rows.count) check(op, prefill(call.pass, most, device.stream));
  return features;
}

}  // namespace
}  // namespace linpix

#if defined(USE_CUDA)
STABLE_TORCH_LIBRARY_IMPL(linpix, CUDA, library) {
  library.impl("recurrent_step", TORCH_BOX(&linpix::recurrent_step));
  library.impl("decode_quantum", TORCH_BOX(&linpix::decode_quantum));
  library.impl("prefill", TORCH_BOX(&linpix::prefill_slots));
  library.impl("read", TORCH_BOX(&linpix::read_into));
}
#else
// For tests: run the threads of a phase in reverse, which must not change results; set a GPU's shared memory in bytes.
extern "C" void linpix_backwards(bool yes) { linpix::gpu::backwards = yes; }
extern "C" void linpix_shared_bytes(int of_a_block) { linpix::gpu::this_gpu().shared_bytes = of_a_block; }

STABLE_TORCH_LIBRARY_IMPL(linpix_emulated, CPU, library) {
  library.impl("recurrent_step", TORCH_BOX(&linpix::recurrent_step));
  library.impl("decode_quantum", TORCH_BOX(&linpix::decode_quantum));
  library.impl("prefill", TORCH_BOX(&linpix::prefill_slots));
  library.impl("read", TORCH_BOX(&linpix::read_into));
}
#endif
