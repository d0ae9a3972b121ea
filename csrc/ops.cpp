// The operators' CPU side: checks that name what they saw, then plain pointers. Schemas stand in model/ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <tuple>
#include <vector>

#include "decode.h"
#include "team.h"

namespace linpix {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// --- which kernels -------------------------------------------------------------------------------------------------

// The best that this processor can run, or the one that LINPIX_KERNEL names.
const Kernels& chosen_kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    std::vector<const Kernels*> usable;  // the best first
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) usable.push_back(&kernels_avx512bf16);
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

std::string cpu_kernel() { return chosen_kernels().name; }
bool cpu_has_fast_bf16() { return chosen_kernels().fast_bf16; }

// --- checks --------------------------------------------------------------------------------------------------------

std::string text(const std::vector<int64_t>& sizes) {
  std::string s = "(";
  for (size_t i = 0; i < sizes.size(); ++i) s += (i ? ", " : "") + std::to_string(sizes[i]);
  return s + ")";
}

std::vector<int64_t> sizes_of(const Tensor& x) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < x.dim(); ++i) sizes.push_back(x.size(i));
  return sizes;
}

void check_kind(const Tensor& x, const char* op, const char* name, ScalarType type, const std::vector<int64_t>& sizes) {
  STD_TORCH_CHECK(x.is_cpu(), op, ": ", name, " must be on the CPU, like the other tensors");
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

void check_slots(const int64_t* slots, int64_t rows, int64_t pool, const char* op) {
  std::vector<bool> taken(pool);
  for (int64_t i = 0; i < rows; ++i) {
    STD_TORCH_CHECK(0 <= slots[i] && slots[i] < pool, op, ": slots must be in 0..", pool - 1, ", got ", slots[i],
                    " in row ", i);
    STD_TORCH_CHECK(slots[i] == 0 || !taken[slots[i]], op, ": slot ", slots[i], " stands twice; only slot 0 may");
    taken[slots[i]] = true;
  }
}

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
  // Rows may share slot 0, so it is the heads that are dealt.
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
  STD_TORCH_CHECK(q.dim() == 4, op, ": q must have shape (B, T, H, D), got ", text(sizes_of(q)));
  STD_TORCH_CHECK(v.dim() == 4, op, ": v must have shape (B, T, H, M), got ", text(sizes_of(v)));
  STD_TORCH_CHECK(S.dim() == 4, op, ": S must have shape (N, H, D, M), got ", text(sizes_of(S)));
  const int64_t B = q.size(0), tokens = q.size(1), H = q.size(2), D = q.size(3), M = v.size(3), N = S.size(0);
  const ScalarType type = q.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, op,
                  ": q, k and v must be float32 or bfloat16, got ", torch::headeronly::toString(type));
  check_kind(q, op, "q", type, {B, tokens, H, D});
  check_kind(k, op, "k", type, {B, tokens, H, D});
  check_kind(v, op, "v", type, {B, tokens, H, M});
  check_kind(S, op, "S", ScalarType::Float, {N, H, D, M});
  check_kind(z, op, "z", ScalarType::Float, {N, H, D});
  STD_TORCH_CHECK(S.stride(3) == 1 && S.stride(2) == M && S.stride(1) == D * M && z.stride(2) == 1 && z.stride(1) == D,
                  op, ": each slot of S and z must be contiguous");
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

// --- decode_quantum, prefill -----------------------------------------------------------------------------------------

// Half of the 32 MiB of last-level cache that a few cores usually share. The system's own figure is of no use: it may
// be that of a whole socket.
constexpr size_t FAR_BYTES = 16 << 20;

// What model/packing.py makes of a transformer, taken apart again; see `Packed` there for the order.
class Parts {
 public:
  Parts(const char* op, const std::vector<Tensor>& weights, const std::vector<int64_t>& sizes, double eps) : op_(op) {
    STD_TORCH_CHECK(sizes.size() == 10, op, ": sizes must hold 10 integers, got ", sizes.size());
    constexpr size_t first = 9, each = 12;
    STD_TORCH_CHECK(weights.size() >= first + each && (weights.size() - first) % each == 0, op, ": weights must hold ",
                    first, " tensors and ", each, " a layer, got ", weights.size());
    for (size_t i = 0; i < 7; ++i)
      STD_TORCH_CHECK((i == 6 ? 0 : 1) <= sizes[i] && sizes[i] <= 1 << 15, op, ": sizes[", i, "] is ", sizes[i]);
    STD_TORCH_CHECK(sizes[0] * (2 * sizes[1] + sizes[2]) <= 1 << 24, op, ": heads, key_dim and value_dim are ",
                    sizes[0], ", ", sizes[1], " and ", sizes[2], ", too large together");
    model.heads = (int)sizes[0];
    model.key_dim = (int)sizes[1];
    model.value_dim = (int)sizes[2];
    model.d_model = (int)sizes[3];
    model.d_ff = (int)sizes[4];
    model.mixtures = (int)sizes[5];
    classes = sizes[6];
    model.pre_norm = sizes[7];
    model.gelu = sizes[8];
    model.elu_scale = sizes[9];
    model.eps = (float)eps;
    model.layers = (int)((weights.size() - first) / each);
    STD_TORCH_CHECK(model.d_model % TILE == 0, op, ": d_model must be a multiple of ", TILE, ", got ", model.d_model);
    const Tensor &table = weights[0], &source = weights[1], &base = weights[2], &place = weights[3];
    STD_TORCH_CHECK(table.dim() == 2 && source.dim() == 2 && place.dim() == 2 && source.size(1) >= 1, op,
                    ": table, source and place must have two dimensions");
    table_rows_ = table.size(0);
    model.subpixels = (int)source.size(0);
    model.values = (int)source.size(1);
    model.places = (int)place.size(1);
    model.table = checked<float>(table, op, "table", ScalarType::Float, {table_rows_, model.d_model});
    model.source = checked<int32_t>(source, op, "source", ScalarType::Int, {model.subpixels, model.values});
    model.base = checked<int32_t>(base, op, "base", ScalarType::Int, {model.values});
    model.place = checked<int32_t>(place, op, "place", ScalarType::Int, {model.subpixels, model.places});
    const Tensor& marginal = weights[4];
    if (marginal.numel()) model.marginal = checked<double>(marginal, op, "marginal", ScalarType::Double, {256});
    model.norm = norm(weights[5], weights[6], "norm");
    check_look_ups();
    model.bf16 = weights[first].scalar_type() == ScalarType::BFloat16;
    model.head = matrix(weights[7], weights[8], "head", 3, model.mixtures, model.d_model, false);
    for (size_t i = first; i < weights.size(); i += each) {
      const Tensor* w = &weights[i];
      const int width = model.heads * model.value_dim;  // below 2^30
      layers_.push_back({matrix(w[0], w[1], "qkv", model.heads, 2 * model.key_dim + model.value_dim, model.d_model,
                                model.bf16),
                         matrix(w[2], w[3], "out", 1, model.d_model, width, model.bf16),
                         matrix(w[6], w[7], "up", 1, model.d_ff, model.d_model, model.bf16),
                         matrix(w[8], w[9], "down", 1, model.d_model, model.d_ff, model.bf16),
                         norm(w[4], w[5], "norm1"), norm(w[10], w[11], "norm2")});
    }
    model.layer = layers_.data();
    size_t bytes = 0;
    for (size_t i = first; i < weights.size(); ++i) bytes += weights[i].numel() * weights[i].element_size();
    model.far = bytes > FAR_BYTES;
    for (Layer& layer : layers_)
      for (Matrix* matrix : {&layer.qkv, &layer.out, &layer.up, &layer.down}) matrix->far = model.far;
  }

  Model model{};
  int64_t classes;

 private:
  Matrix matrix(const Tensor& w, const Tensor& bias, const char* name, int groups, int columns, int depth, bool bf16) {
    columns = round_up(columns, TILE);
    depth = round_up(depth, TILE);
    const ScalarType type = bf16 ? ScalarType::BFloat16 : ScalarType::Float;
    return {checked<void>(w, op_, name, type, {(int64_t)groups * columns * depth}),
            checked<float>(bias, op_, name, ScalarType::Float, {(int64_t)groups * columns}), groups, columns, depth};
  }
  Norm norm(const Tensor& weight, const Tensor& bias, const char* name) {
    return {checked<float>(weight, op_, name, ScalarType::Float, {model.d_model}),
            checked<float>(bias, op_, name, ScalarType::Float, {model.d_model})};
  }
  // What is looked up lies inside the table and before t, whatever the image holds.
  void check_look_ups() {
    const Model& m = model;
    for (int i = 0; i < m.values; ++i)
      STD_TORCH_CHECK(0 <= m.base[i] && (int64_t)m.base[i] + 256 + (i == 0 ? classes : 0) < table_rows_, op_,
                      ": base[", i, "] is ", m.base[i], ", beyond a table of ", table_rows_, " rows");
    bool inside = true;
    for (int64_t t = 0; t < m.subpixels; ++t) {
      for (int i = 0; i < m.values; ++i) inside &= -1 <= m.source[t * m.values + i] && m.source[t * m.values + i] < t;
      for (int i = 0; i < m.places; ++i)
        inside &= 0 <= m.place[t * m.places + i] && m.place[t * m.places + i] < table_rows_;
    }
    STD_TORCH_CHECK(inside, op_, ": source and place must point before t and into the table");
  }

  const char* op_;
  int64_t table_rows_ = 0;
  std::vector<Layer> layers_;
};

// The pools and what both operators are told of every row.
Rows rows_of(const char* op, const Model& m, int64_t classes, const Tensor& canvas, const Tensor& S, const Tensor& z,
             const Tensor& slots, const Tensor& start, int64_t threads) {
  STD_TORCH_CHECK(slots.dim() == 1, op, ": slots must have shape (B,), got ", text(sizes_of(slots)));
  STD_TORCH_CHECK(canvas.dim() == 2, op, ": canvas must have shape (N, T), got ", text(sizes_of(canvas)));
  STD_TORCH_CHECK(threads >= 1 && threads <= 1024, op, ": threads must be in 1..1024, got ", threads);
  const int64_t B = slots.size(0), N = canvas.size(0);
  Rows rows{};
  rows.count = (int)B;
  rows.canvas = checked<uint8_t>(canvas, op, "canvas", ScalarType::Byte, {N, m.subpixels});
  rows.S = checked<float>(S, op, "S", ScalarType::Float, {N, m.layers, m.heads, m.key_dim, m.value_dim});
  rows.z = checked<float>(z, op, "z", ScalarType::Float, {N, m.layers, m.heads, m.key_dim});
  rows.slots = checked<int64_t>(slots, op, "slots", ScalarType::Long, {B});
  rows.start = checked<int64_t>(start, op, "start", ScalarType::Long, {B});
  check_slots(rows.slots, B, N, op);
  for (int64_t i = 0; i < B; ++i)
    STD_TORCH_CHECK(256 <= rows.start[i] && rows.start[i] <= 256 + classes, op, ": start must be in 256..",
                    256 + classes, ", got ", rows.start[i], " in row ", i);
  return rows;
}

// Steps of each row, those of padding rows (slot 0) set to none: on a processor nothing is gained by computing them.
std::vector<int64_t> checked_steps(const char* op, const Model& m, const Rows& rows, const int64_t* steps) {
  std::vector<int64_t> real(rows.count);
  for (int i = 0; i < rows.count; ++i) {
    const int64_t from = rows.positions ? rows.positions[i] : 0;
    STD_TORCH_CHECK(0 <= from && 0 <= steps[i] && steps[i] <= m.subpixels - from, op, ": row ", i, " goes from ", from,
                    " by ", steps[i], " steps, but an image has ", m.subpixels, " sub-pixels");
    real[i] = rows.slots[i] ? steps[i] : 0;
  }
  return real;
}

std::tuple<Tensor, Tensor> decode_quantum(Tensor canvas, const Tensor& known, Tensor S, Tensor z, const Tensor& slots,
                                          const Tensor& positions, const Tensor& steps, const Tensor& start,
                                          const Tensor& seeds, const Tensor& temperatures,
                                          const std::vector<Tensor>& weights, const std::vector<int64_t>& sizes,
                                          double eps, int64_t threads) {
  const char* op = "decode_quantum";
  const Parts parts(op, weights, sizes, eps);
  const Model& m = parts.model;
  Rows rows = rows_of(op, m, parts.classes, canvas, S, z, slots, start, threads);
  const int64_t B = rows.count;
  rows.known = checked<bool>(known, op, "known", ScalarType::Bool, {canvas.size(0), m.subpixels});
  rows.positions = checked<int64_t>(positions, op, "positions", ScalarType::Long, {B});
  rows.seeds = checked<int64_t>(seeds, op, "seeds", ScalarType::Long, {B});
  rows.temperatures = checked<float>(temperatures, op, "temperatures", ScalarType::Float, {B});
  const std::vector<int64_t> real =
      checked_steps(op, m, rows, checked<int64_t>(steps, op, "steps", ScalarType::Long, {B}));
  for (int64_t i = 0; i < B; ++i)
    STD_TORCH_CHECK(rows.temperatures[i] >= 0, op, ": temperatures must be at least 0, got ", rows.temperatures[i]);
  rows.steps = real.data();
  for (int64_t n : real) rows.most_steps = n > rows.most_steps ? n : rows.most_steps;
  Tensor log_probs = torch::stable::new_zeros(temperatures, {B, rows.most_steps});
  Tensor finite = torch::stable::new_empty(known, {B});
  rows.log_probs = (float*)log_probs.data_ptr();
  rows.finite = (bool*)finite.data_ptr();
  std::memset(rows.finite, true, B);
  decode(chosen_kernels(), m, rows, (int)threads);
  return {log_probs, finite};
}

void prefill_slots(const Tensor& canvas, Tensor S, Tensor z, const Tensor& slots, const Tensor& lengths,
                   const Tensor& start, const std::vector<Tensor>& weights, const std::vector<int64_t>& sizes,
                   double eps, int64_t threads) {
  const char* op = "prefill";
  const Parts parts(op, weights, sizes, eps);
  Rows rows = rows_of(op, parts.model, parts.classes, canvas, S, z, slots, start, threads);
  const std::vector<int64_t> real = checked_steps(
      op, parts.model, rows, checked<int64_t>(lengths, op, "lengths", ScalarType::Long, {rows.count}));
  rows.steps = real.data();
  prefill(chosen_kernels(), parts.model, rows, (int)threads);
}

}  // namespace
}  // namespace linpix

STABLE_TORCH_LIBRARY_IMPL(linpix, CPU, library) {
  library.impl("recurrent_step", TORCH_BOX(&linpix::recurrent_step));
  library.impl("decode_quantum", TORCH_BOX(&linpix::decode_quantum));
  library.impl("prefill", TORCH_BOX(&linpix::prefill_slots));
}

STABLE_TORCH_LIBRARY_IMPL(linpix, CompositeExplicitAutograd, library) {
  library.impl("cpu_kernel", TORCH_BOX(&linpix::cpu_kernel));
  library.impl("cpu_has_fast_bf16", TORCH_BOX(&linpix::cpu_has_fast_bf16));
}
