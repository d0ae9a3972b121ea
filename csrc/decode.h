// What the kernels work on (Model, Rows) and what they offer (Kernels). Begin here to read csrc/.
//
// ops.cpp checks torch's tensors and makes plain pointers of them; after it nothing is checked again. decode.cpp
// divides the rows among threads (team.h). kernels.cpp runs the steps of some rows: pass.h takes tokens through the
// layers, with product.h for the matrices and attention.h for the recurrent state, and drawing.h draws the sub-pixels
// (categorical.h those of a head of 256 logits).
// The GPU has kernels of its own: see cuda/kernels.h.
//
// Why decode is fast on a processor:
// - One call takes all rows through a whole quantum, without Python or torch between the steps.
// - The kernels are compiled for each instruction set, and the best one is chosen at run time (setup.py, ops.cpp).
// - Weights are packed in the order in which they are read. A panel that has been loaded serves all rows of a block
//   (product.h).
// - A state is updated and read out in one sweep over its memory (attention.h).
// - A thread takes its block of rows through many steps at once, so states stay in its caches and threads need not wait
//   for each other. Only a few rows are shared by columns, between barriers (decode.cpp).
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "sequence.h"
#include "target.h"

namespace linpix {

// Columns and depth of packed weights are padded to multiples of TILE.
#if defined(LINPIX_ONE_LANE)
constexpr int TILE = 32;
#else
constexpr int TILE = 16;
#endif

// Always inlined: otherwise the linker might keep a copy compiled for AVX-512, and use it on every processor.
inline __attribute__((always_inline)) int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// The weights of a linear layer, packed by model/packing.py: `groups` of `columns` output columns each. For a
// processor, a group is cut into panels of at most PANEL blocks of 16 columns. Panels follow each other in memory. In a
// panel, k follows k (in bfloat16 pairs of k, in int8 groups of four), and each k has the panel's blocks side by side.
// For a GPU, see Stage in cuda/product.h.
struct Matrix {
  const void* weights;  // float, bfloat16 or int8
  const float* bias;    // groups * columns; int8: followed by as many scales and as many sums, see Factors
  int groups, columns, depth;  // columns and depth: multiples of TILE
  bool int8 = false;
  bool narrow = false;         // bfloat16 weights, which are exact, for inputs in float
  bool exceeds_cache = false;  // the model's weights do not stay in the cache that the cores share

  static constexpr int PANEL = 4;  // blocks of a panel, at most
};

struct Norm {
  const float *weight, *bias;
};

struct Layer {
  Matrix qkv;  // one group for each head: its q, k and v side by side
  Matrix out, up, down;
  Norm norm1, norm2;
};

struct Model {
  int layers, heads, key_dim, value_dim, d_model, d_ff, mixtures, classes;
  bool categorical;  // the head gives 256 logits, as one group of parameters, instead of K logistics
  int subpixels, tokens, token_size;  // T = tokens * token_size; the first sub-pixel of token t is t * token_size
  bool pre_norm, gelu, elu_scale;
  bool bf16;           // inputs of the layers' products, where not int8; else float
  bool exceeds_cache;  // the weights do not stay in the cache that the cores share
  float eps;
  const Layer* layer;
  Norm norm;
  Matrix head;  // always float: in bfloat16 a mean would be off by a grey level; groups: see Mixture in drawing.h, or 1 of logits
  // A token's input is a sum of look-ups in one table: of `values` other sub-pixels, of `places` of the token, and of
  // the class unless class_rows is 0. The first value is the previous sub-pixel. The last `following` values come after
  // the token, all others before it.
  int values, following, places, class_rows;
  const float* table;       // (rows, d_model)
  const int32_t* source;    // (tokens, values): which sub-pixel to look up, or -1 outside the image
  const int32_t* base;      // (values): the first table row of each value
  const int32_t* place;     // (tokens, places): rows of the table
  const double* marginal;   // (256) cumulative: of sub-pixel 0, in a model without a start token; else null
  // A sub-pixel skips the layers if each sub-pixel that it looks up has this value, is unknown or is outside the image:
  // see model/background.py. Below 0: none skips.
  int background = -1;
  Matrix project, skipped_head;  // float: final features to what is kept; hidden features to parameters
  const float* skipped_table;    // (rows, project.columns): by position, by class, by known background that follows
};

// The rows of one call, and the pools (N slots) that rows.slots points into.
struct Rows {
  int count;
  int64_t most_steps, most_passes;
  uint8_t* canvas;    // (N, T)
  const bool* known;  // (N, T): the same for all sub-pixels of a token
  float *S, *z;       // (N, L, H, D, M) and (N, L, H, D)
  float* last;        // (N, project.columns): what is kept of the last token's features; only with a background
  const int64_t* conditioned;  // (count): whether the model has read what is known, which is then skipped; null: none
  int64_t* taken;     // (count): steps that each row has taken in this call, written by the thread that has the row
  int64_t* passes;    // (count): of these, those that went through the layers
  const int64_t *slots, *positions, *steps, *start, *seeds;  // (count)
  const float* temperatures;                                 // (count)
  float* log_probs;  // (count, most_steps, token_size); null: not wanted
  bool* finite;      // (count)
  // Only of read, whose tokens are not looked up: inputs of the first layer, row after row.
  const float* inputs;     // (offsets[count], d_model)
  const int64_t* offsets;  // (count + 1): where each row's inputs begin
  float* features;         // (count, d_model): the final features of each row's last token
};

double seconds_now();  // of a monotonic clock

// Where threads that share the columns of a pass wait for each other. A single thread never waits.
struct Barrier {
  int members;
  double patience = INFINITY;  // seconds a pass: threads that take longer have lost their cores to another program
  double began = seconds_now();
  int arrived = 0, round = 0, asleep = 0;
  bool given_up = false;  // then all members return, and the passes that are left are divided by rows
};

// Sets given_up if this many passes took much longer than patience allows.
void give_up_if_late(Barrier& barrier, int64_t passes);
// Sleeps if number == so, until say_changed(number); may return early.
void sleep_while(int& number, int so);
void say_changed(int& number);

// This thread's place among the `count` threads that divide the heads and panels of a pass.
struct Share {
  int index, count;
  Barrier* barrier;
};

// Some of a call's rows, and some of its passes. In a pass, each row takes one step through the layers, and the steps
// after it that skip the layers; so a row takes at least as many steps as passes. A call ends after most_passes, or
// when all steps are taken.
struct Piece {
  int first, last;   // rows first .. last-1
  int64_t from, to;  // passes from .. to-1
};

// Bytes of scratch for a pass: of each thread, and in common of the threads that share the pass.
struct Sizes {
  size_t own, common;
};

// Attention over one head of one sequence. scratch: scratch_bytes of zeros.
struct SequenceKernel {
  size_t (*scratch_bytes)(const Sequences&);
  void (*run)(const Sequences&, int64_t sequence, int64_t head, void* scratch);
};

// Folds tokens of one row into its slot.
using FoldIn = void (*)(const Model&, const Rows&, int row, Share, void* own, void* common);

// One version of the kernels, compiled for one instruction set.
struct Kernels {
  const char* name;
  bool fast_bf16;
  int block_rows;  // rows of a block, at most, where the weights stay in the cache
  Sizes (*sizes)(const Model&, int tokens);
  // Takes a piece's rows through its passes, each row while it has steps left. most: rows that the scratch is laid out
  // for. Pieces that reuse a scratch must pass the same number: padded columns in it must stay zero.
  // Returns the first pass that was not taken: piece.to, or an earlier one if sharing was given up.
  int64_t (*decode)(const Model&, const Rows&, Piece, int most, Share, void* own, void* common);
  // The next `steps` tokens of one row from its position on. Token 0 is the start token.
  FoldIn prefill;
  FoldIn read;  // all inputs of one row, see Rows::inputs
  // One token of one head: see recurrent_step in model/ops.py.
  void (*attend)(float* q, float* k, const float* v, float* S, float* z, int D, int M, float eps, float* y);
  SequenceKernel causal, causal_backward;  // see causal_attention in model/ops.py
};

constexpr int PREFILL_TOKENS = 32;  // tokens of one row that go through the layers together

// decode advances every row by its number of steps, prefill folds in as many of its tokens, and read folds in all of
// its inputs. patience: see Barrier.
void decode(const Kernels&, const Model&, const Rows&, int threads, double patience);
void prefill(const Kernels&, const Model&, const Rows&, int threads);
void read(const Kernels&, const Model&, const Rows&, int threads);

// The best kernels that this processor can run, or those that LINPIX_KERNEL names.
const Kernels& chosen_kernels();

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512vnni, kernels_avx512bf16;
#endif

}  // namespace linpix
