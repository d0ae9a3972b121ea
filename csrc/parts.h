// Turns a packed model (tensors and integers) into the pointers and sizes that the kernels take, and checks it.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "checks.h"
#include "decode.h"
#include "order.h"

namespace linpix {

#if defined(LINPIX_ONE_LANE)
constexpr bool ON_GPU = true;
#else
constexpr bool ON_GPU = false;
#endif

// Half of the 32 MiB of last-level cache that a few cores usually share. The system's own figure is not useful: it
// may be that of a whole socket.
constexpr size_t CACHE_BYTES = 16 << 20;

// Takes apart what model/packing.py makes of a transformer; see `Packed` there for the order of weights and sizes.
class Parts {
 public:
  Parts(const char* op, const std::vector<Tensor>& weights, const std::vector<int64_t>& sizes, double eps) : op_(op) {
    using Size = SizeOrder;
    STD_TORCH_CHECK(sizes.size() == Size::count, op, ": sizes must hold ", (int)Size::count, " integers, got ",
                    sizes.size());
    constexpr size_t first = 13, each = 12;
    STD_TORCH_CHECK(weights.size() >= first + each && (weights.size() - first) % each == 0, op, ": weights must hold ",
                    first, " tensors and ", each, " per layer, got ", weights.size());
    for (size_t i = 0; i <= Size::classes; ++i)
      STD_TORCH_CHECK((i == Size::classes ? 0 : 1) <= sizes[i] && sizes[i] <= 1 << 15, op, ": sizes[", i, "] is ", sizes[i]);
    STD_TORCH_CHECK(sizes[Size::heads] * (2 * sizes[Size::key_dim] + sizes[Size::value_dim]) <= 1 << 24, op, ": heads * (2 * key_dim + value_dim) must "
                    "be at most 2^24, got heads ", sizes[Size::heads], ", key_dim ", sizes[Size::key_dim], " and value_dim ", sizes[Size::value_dim]);
    model.heads = (int)sizes[Size::heads];
    model.key_dim = (int)sizes[Size::key_dim];
    model.value_dim = (int)sizes[Size::value_dim];
    model.d_model = (int)sizes[Size::d_model];
    model.d_ff = (int)sizes[Size::d_ff];
    model.mixtures = (int)sizes[Size::mixtures];
    model.classes = (int)sizes[Size::classes];
    model.pre_norm = sizes[Size::pre_norm];
    model.gelu = sizes[Size::gelu];
    model.elu_scale = sizes[Size::elu_scale];
    model.following = (int)sizes[Size::following];
    model.class_rows = (int)sizes[Size::class_rows];
    model.background = (int)sizes[Size::background];
    model.token_size = (int)sizes[Size::token_size];
    model.categorical = sizes[Size::categorical];
    model.eps = (float)eps;
    model.layers = (int)((weights.size() - first) / each);
    constexpr int unit = ON_GPU ? 8 : TILE;
    STD_TORCH_CHECK(model.d_model % unit == 0, op, ": d_model must be a multiple of ", unit, ", got ", model.d_model);
    const Tensor &table = weights[0], &source = weights[1], &base = weights[2], &place = weights[3];
    STD_TORCH_CHECK(table.dim() == 2 && source.dim() == 2 && place.dim() == 2 && source.size(1) >= 1, op,
                    ": table, source and place must have two dimensions");
    table_rows_ = table.size(0);
    model.tokens = (int)source.size(0);
    model.subpixels = model.tokens * model.token_size;
    model.values = (int)source.size(1);
    model.places = (int)place.size(1);
    model.table = checked<float>(table, op, "table", ScalarType::Float, {table_rows_, model.d_model});
    model.source = checked<int32_t>(source, op, "source", ScalarType::Int, {model.tokens, model.values});
    model.base = checked<int32_t>(base, op, "base", ScalarType::Int, {model.values});
    model.place = checked<int32_t>(place, op, "place", ScalarType::Int, {model.tokens, model.places});
    const Tensor& marginal = weights[4];
    if (marginal.numel()) model.marginal = checked<double>(marginal, op, "marginal", ScalarType::Double, {256});
    model.norm = norm(weights[5], weights[6], "norm");
    STD_TORCH_CHECK(0 <= sizes[Size::following] && sizes[Size::following] < model.values && 0 <= sizes[Size::class_rows] &&
                        (!sizes[Size::class_rows] || sizes[Size::class_rows] + model.classes < table_rows_) && -1 <= sizes[Size::background] && sizes[Size::background] <= 255,
                    op, ": following, class_rows and background are ", sizes[Size::following], ", ", sizes[Size::class_rows], " and ", sizes[Size::background]);
    STD_TORCH_CHECK(sizes[Size::token_size] == 1 || (sizes[Size::token_size] == 3 && !model.marginal && sizes[Size::background] < 0), op,
                    ": a token must have 1 sub-pixel, or 3 with a start token and no background; got ", sizes[Size::token_size]);
    STD_TORCH_CHECK(!sizes[Size::categorical] || (sizes[Size::mixtures] == 256 && sizes[Size::token_size] == 1 && !model.marginal), op, ": a categorical head must "
                    "have 256 logits, 1 sub-pixel in a token and a start token; got ", sizes[Size::mixtures], " and ", sizes[Size::token_size]);
    if (!ON_GPU) check_look_ups();  // on a GPU this would have to wait; pack made them from a valid configuration
    model.bf16 = sizes[Size::bf16];
    model.head = head(weights[7], weights[8], "head", model.d_model);
    if (model.background >= 0) {
      const Tensor& table = weights[10];
      constexpr int unit = ON_GPU ? 1 : TILE;
      STD_TORCH_CHECK(table.dim() == 2 && table.size(1) >= 1 && table.size(1) % unit == 0 && table.size(1) <= 1 << 15, op,
                      ": the background's table must have a multiple of ", unit, " columns, got ", text(sizes_of(table)));
      const int dim = (int)table.size(1);
      model.skipped_table = checked<float>(table, op, "background table", ScalarType::Float,
                                           {model.tokens + model.classes + 1 + model.following + 1, dim});
      if (ON_GPU) {
        model.project = {checked<float>(weights[9], op, "project", ScalarType::Float, {model.d_model, dim}), nullptr, 1,
                         dim, model.d_model};
      } else {
        no_bias_.resize(dim);
        model.project = {checked<void>(weights[9], op, "project", ScalarType::Float,
                                       {(int64_t)dim * round_up(model.d_model, TILE)}),
                         no_bias_.data(), 1, dim, round_up(model.d_model, TILE)};
      }
      model.skipped_head = head(weights[11], weights[12], "background head", dim);
    }
    for (size_t i = first; i < weights.size(); i += each) {
      const Tensor* w = &weights[i];
      const int width = model.heads * model.value_dim;  // below 2^30
      layers_.push_back({matrix(w[0], w[1], "qkv", model.heads, 2 * model.key_dim + model.value_dim, model.d_model,
                                true),
                         matrix(w[2], w[3], "out", 1, model.d_model, width, true),
                         matrix(w[6], w[7], "up", 1, model.d_ff, model.d_model, true),
                         matrix(w[8], w[9], "down", 1, model.d_model, model.d_ff, true),
                         norm(w[4], w[5], "norm1"), norm(w[10], w[11], "norm2")});
      // scratch memory is laid out for the first layer, and the padding of out's rows is zeroed only once
      STD_TORCH_CHECK(layers_[0].out.int8 == layers_.back().out.int8, op, ": out must be int8 in all layers or in none");
    }
    model.layer = layers_.data();
    size_t bytes = 0;
    for (size_t i = first; i < weights.size(); ++i) bytes += weights[i].numel() * weights[i].element_size();
    model.exceeds_cache = bytes > CACHE_BYTES;
    for (Layer& layer : layers_)
      for (Matrix* matrix : {&layer.qkv, &layer.out, &layer.up, &layer.down}) matrix->exceeds_cache = model.exceeds_cache;
  }

  Model model{};

 private:
  Matrix matrix(const Tensor& w, const Tensor& bias, const char* name, int groups, int columns, int depth,
                bool of_layer) {
    columns = round_up(columns, TILE);
    depth = round_up(depth, TILE);
    const bool int8 = of_layer && !ON_GPU && w.scalar_type() == ScalarType::Char;
    STD_TORCH_CHECK(!int8 || depth <= 1 << 16, op_, ": ", name, " is int8, with a depth of at most 65536, got ", depth);
    const bool narrow = of_layer && !ON_GPU && !model.bf16 && w.scalar_type() == ScalarType::BFloat16;
    const ScalarType wide = (of_layer && model.bf16) || narrow ? ScalarType::BFloat16 : ScalarType::Float;
    const ScalarType type = int8 ? ScalarType::Char : wide;
    const int64_t all = (int64_t)groups * columns;  // biases; int8: followed by as many scales and sums, see Factors
    return {checked<void>(w, op_, name, type, {all * depth}),
            checked<float>(bias, op_, name, ScalarType::Float, {(int8 ? 3 : 1) * all}), groups, columns, depth, int8, narrow};
  }
  // Gives the parameters of Mixture in drawing.h, or logits. On a GPU k follows k, without padding: a lane takes a column.
  Matrix head(const Tensor& w, const Tensor& bias, const char* name, int depth) {
    const int size = model.token_size, groups = model.categorical ? 1 : 1 + 2 * size + size * (size - 1) / 2;
    if (!ON_GPU) return matrix(w, bias, name, groups, model.mixtures, depth, false);
    const int64_t columns = groups * model.mixtures;
    return {checked<float>(w, op_, name, ScalarType::Float, {depth, columns}),
            checked<float>(bias, op_, name, ScalarType::Float, {columns}), groups, model.mixtures, depth};
  }
  Norm norm(const Tensor& weight, const Tensor& bias, const char* name) {
    return {checked<float>(weight, op_, name, ScalarType::Float, {model.d_model}),
            checked<float>(bias, op_, name, ScalarType::Float, {model.d_model})};
  }
  // Look-ups must lie inside the table whatever the image holds, and before the token, or after it for `following`.
  void check_look_ups() {
    const Model& m = model;
    for (int i = 0; i < m.values; ++i)
      STD_TORCH_CHECK(0 <= m.base[i] && (int64_t)m.base[i] + 256 + (i == 0 ? m.classes : i >= m.values - m.following) < table_rows_, op_,
                      ": base[", i, "] is ", m.base[i], ", beyond a table of ", table_rows_, " rows");
    bool inside = true;
    for (int64_t t = 0; t < m.tokens; ++t) {
      const int64_t first = t * m.token_size, end = first + m.token_size;
      for (int i = 0; i < m.values; ++i) {
        const int32_t at = m.source[t * m.values + i];
        inside &= -1 <= at && (i < m.values - m.following ? at < first : at == -1 || (at >= end && at < m.subpixels));
      }
      for (int i = 0; i < m.places; ++i)
        inside &= 0 <= m.place[t * m.places + i] && m.place[t * m.places + i] < table_rows_;
    }
    STD_TORCH_CHECK(inside, op_, ": each source must lie before t, or after t for look-ups of `following`, and "
                                  "each place inside the table");
  }

  const char* op_;
  int64_t table_rows_ = 0;
  std::vector<Layer> layers_;
  std::vector<float> no_bias_;
};

// A call's pools. Here and below, what tensors hold is not checked.
class [[gnu::visibility("hidden")]] PoolsOf {  // as Tensor is
 public:
  PoolsOf(const char* op, const std::vector<Tensor>& pools) : pools_(pools) {
    STD_TORCH_CHECK(pools.size() == PoolOrder::count, op, ": pools must hold ", (int)PoolOrder::count,
                    " tensors, got ", pools.size());
  }
  const Tensor& operator[](int which) const { return pools_[which]; }
  bool has(int which) const { return pools_[which].numel() > 0; }

 private:
  const std::vector<Tensor>& pools_;
};

// The slots of a call's rows, and the pool of N states beside S and z that they point into.
inline Rows slots_of(const char* op, const Model& m, int64_t N, const PoolsOf& pools, const int64_t* slots, int64_t B) {
  Rows rows{};
  rows.count = (int)B;
  rows.slots = slots;
  if (m.background >= 0) {
    STD_TORCH_CHECK(pools.has(PoolOrder::last), op, ": a model with a background needs the pool `last`, got none");
    rows.last = checked<float>(pools[PoolOrder::last], op, "last", ScalarType::Float, {N, m.project.columns});
  }
  return rows;
}

// The rows of decode_quantum and prefill.
inline Rows rows_of(const char* op, const Model& m, const PoolsOf& pools, const Tensor& numbers) {
  const Tensor& canvas = pools[PoolOrder::canvas];
  STD_TORCH_CHECK(canvas.dim() == 2, op, ": canvas must have shape (N, T), got ", text(sizes_of(canvas)));
  STD_TORCH_CHECK(numbers.dim() == 2, op, ": rows must have shape (", (int)RowOrder::count, ", B), got ",
                  text(sizes_of(numbers)));
  const int64_t N = canvas.size(0), B = numbers.size(1);
  const int64_t* lines = checked<int64_t>(numbers, op, "rows", ScalarType::Long, {RowOrder::count, B});
  Rows rows = slots_of(op, m, N, pools, lines + RowOrder::slot * B, B);
  rows.canvas = checked<uint8_t>(canvas, op, "canvas", ScalarType::Byte, {N, m.subpixels});
  rows.known = checked<bool>(pools[PoolOrder::known], op, "known", ScalarType::Bool, {N, m.subpixels});
  rows.positions = lines + RowOrder::position * B;
  rows.steps = lines + RowOrder::steps * B;
  rows.start = lines + RowOrder::start * B;
  rows.seeds = lines + RowOrder::seed * B;
  rows.conditioned = lines + RowOrder::conditioned * B;
  return rows;
}

inline void check_read(const char* op, const PoolsOf& pools, const Tensor& slots, const Tensor& inputs) {
  const Tensor& S = pools[PoolOrder::S];
  STD_TORCH_CHECK(S.dim() == 5, op, ": S must have shape (N, L, H, D, M), got ", text(sizes_of(S)));
  STD_TORCH_CHECK(slots.dim() == 1, op, ": slots must have shape (B,), got ", text(sizes_of(slots)));
  STD_TORCH_CHECK(inputs.dim() == 2, op, ": inputs must have shape (n, d_model), got ", text(sizes_of(inputs)));
}

// What decode_quantum returns. rows gets its places, and the arguments that say what to draw.
inline std::tuple<Tensor, Tensor, Tensor, Tensor> results_of(
    const char* op, const Model& m, Rows& rows, const Tensor& known, const Tensor& numbers, const Tensor& temperatures,
    const std::vector<int64_t>& limits, bool with_log_probs) {
  const int64_t B = rows.count, most = limits[LimitOrder::steps], most_passes = limits[LimitOrder::passes];
  STD_TORCH_CHECK(most >= 0 && most_passes >= 0, op, ": the limits of steps and passes must be at least 0, got ", most,
                  " and ", most_passes);
  rows.most_steps = most;
  rows.most_passes = std::min(most, most_passes);
  rows.temperatures = checked<float>(temperatures, op, "temperatures", ScalarType::Float, {B});
  Tensor log_probs = torch::stable::new_zeros(temperatures, {B, with_log_probs ? most * m.token_size : 0});
  Tensor finite = torch::stable::fill_(torch::stable::new_empty(known, {B}), 1);
  Tensor taken = torch::stable::new_zeros(numbers, {B}), passes = torch::stable::new_zeros(numbers, {B});
  rows.log_probs = with_log_probs ? (float*)log_probs.data_ptr() : nullptr;
  rows.finite = (bool*)finite.data_ptr();
  rows.taken = (int64_t*)taken.data_ptr();
  rows.passes = (int64_t*)passes.data_ptr();
  return {log_probs, finite, taken, passes};
}

inline void check_limits(const char* op, const std::vector<int64_t>& limits) {
  STD_TORCH_CHECK(limits.size() == LimitOrder::count, op, ": limits must hold ", (int)LimitOrder::count,
                  " integers, got ", limits.size());
}

}  // namespace linpix
