// The order in which Python hands things to the operators. model/packing.py has the same names, and a test compares them.
#pragma once

namespace linpix {

// Tensors of `pools`, by slot but for scale and saturated. Those that a model or a device has no use for are empty.
struct PoolOrder {
  enum { canvas, known, S, z, last, tokens, pairs, scale, saturated, count };
};

// Lines of `rows`, (count, B): what a call needs to know of each of its B rows.
struct RowOrder {
  enum { slot, position, steps, start, seed, conditioned, count };
};

// The integers of `sizes`: what a model's weights do not say.
struct SizeOrder {
  enum {
    heads, key_dim, value_dim, d_model, d_ff, mixtures, classes, pre_norm, gelu, elu_scale, following, class_rows,
    background, token_size, categorical, bf16, count
  };
};

// The integers of `limits`: the largest number of steps of a row, of its passes, and the threads to use.
struct LimitOrder {
  enum { steps, passes, threads, count };
};

}  // namespace linpix
