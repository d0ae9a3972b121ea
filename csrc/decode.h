// What the kernels work on: plain pointers and sizes, checked by ops.cpp and by nobody after it.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "sequence.h"
#include "target.h"

namespace linpix {

// Columns and depth of packed weights are padded to multiples of it.
#if defined(LINPIX_ONE_LANE)
constexpr int TILE = 32;
#else
constexpr int TILE = 16;
#endif

// Inlined everywhere: a copy compiled for AVX-512 must not become the one that the linker keeps for all.
inline __attribute__((always_inline)) int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// The weights of a linear layer, packed by model/packing.py: `groups` of `columns` output columns each. For a processor
// a group is cut into panels of at most PANEL blocks of 16 columns. In memory: panel after panel, in it k after k
// (bfloat16: pair of k after pair, int8: four after four), for each k its blocks side by side. For a GPU, see Stage in
// cuda/product.h.
struct Matrix {
  const void* weights;  // float, bfloat16 or int8
  const float* bias;    // groups * columns; if int8, as many scales and sums of weights follow: see Factors
  int groups, columns, depth;  // columns and depth: multiples of TILE
  bool int8 = false;
  bool exceeds_cache = false;  // of a model whose weights do not stay in the cache that the cores share

  static constexpr int PANEL = 4;  // blocks of a panel at most
};

struct Norm {
  const float *weight, *bias;
};

struct Layer {
  Matrix qkv;  // a group per head: its q, k and v side by side
  Matrix out, up, down;
  Norm norm1, norm2;
};

struct Model {
  int layers, heads, key_dim, value_dim, d_model, d_ff, mixtures, classes;
  int subpixels, tokens, token_size;  // T = tokens * token_size; token t has sub-pixels t * token_size and those after it
  bool pre_norm, gelu, elu_scale, bf16, exceeds_cache;  // as of its matrices; bf16: of those that are not int8
  float eps;
  const Layer* layer;
  Norm norm;
  Matrix head;  // always float: rounded to bfloat16, a mean is off by a grey level; groups: see Mixture in drawing.h
  // Inputs: the sum of `values` look-ups of other sub-pixels (the first is the previous one, all but the last `following`
  // are earlier than those of t) and `places` of t, and of the class where its table's first row is not 0.
  int values, following, places, class_rows;
  const float* table;       // rows of d_model
  const int32_t* source;    // (tokens, values): which sub-pixel has a value, -1 outside the image
  const int32_t* base;      // (values): its table's first row
  const int32_t* place;     // (tokens, places): rows of the table
  const double* marginal;   // cumulative, of sub-pixel 0 of a model without a start token; else null
  // Sub-pixels that look up nothing but this value skip the layers: see model/background.py. Below 0: none does.
  int background = -1;
  Matrix project, skipped_head;  // float; final features to what is kept of them, and that to the head's parameters
  const float* skipped_table;    // rows of project.columns: position, class, known background that follows
};

// The rows of one call, and the pools that their slots index.
struct Rows {
  int count;
  int64_t most_steps, most_passes;
  uint8_t* canvas;    // (N, T)
  const bool* known;  // (N, T): the same for all sub-pixels of a token
  float *S, *z;       // (N, L, H, D, M) and (N, L, H, D)
  float* last;        // (N, project.columns): what is kept of the last token's features, of models with a background
  const bool* told;   // (count): whether the model has read what is known; null: of no row. What is known is no token then
  int64_t* taken;     // (count): steps that each row has taken in this call; whoever works on a row writes them
  int64_t* passes;    // (count): of these, those that went through the layers
  const int64_t *slots, *positions, *steps, *start, *seeds;  // (count)
  const float* temperatures;                                 // (count)
  float* log_probs;  // (count, most_steps, token_size)
  bool* finite;      // (count)
  // Of read alone, whose tokens are not looked up but given: what goes into the first layer, row after row.
  const float* inputs;     // (offsets[count], d_model)
  const int64_t* offsets;  // (count + 1): where each row's inputs begin
  float* features;         // (count, d_model): the final features of each row's last token
};

double seconds_now();  // of a clock that only goes forward

// Threads that take the same steps side by side, each its share of the columns. One alone never waits.
struct Barrier {
  int members;
  double patience = INFINITY;  // seconds a pass: threads that take longer must have lost their cores to another program
  double began = seconds_now();
  int arrived = 0, round = 0, asleep = 0;
  bool given_up = false;  // whoever comes here goes home, and what is left is dealt out by rows
};

// Whether so many passes took too long for it.
void give_up_if_late(Barrier& barrier, int64_t passes);
// Sleep while a number is so, at most until it is said to have changed.
void sleep_while(int& number, int so);
void say_changed(int& number);

struct Share {
  int index, count;
  Barrier* barrier;
};

// Some of a call's rows, and some of its passes: in each, a row takes one step through the layers, and those that skip
// them. So after n passes a row has taken n steps at least. A call ends after most_passes, or when all steps are taken.
struct Piece {
  int first, last;   // rows first .. last-1
  int64_t from, to;  // passes from .. to-1
};

// Bytes of scratch for a pass of so many tokens: of each thread, and of what the threads of a share have in common.
struct Sizes {
  size_t own, common;
};

// One head of one sequence; scratch: so many bytes, zeros when the run begins.
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
  Sizes (*sizes)(const Model&, int tokens);
  // Each of a piece's rows takes part in its passes as long as it has steps left. Scratch is laid out for blocks of `most` rows,
  // the same for all who use it one after the other: columns beyond a matrix's own must stay zero in it.
  // Returns the pass it came to: that of the piece, unless the share's threads keep each other waiting.
  int64_t (*decode)(const Model&, const Rows&, Piece, int most, Share, void* own, void* common);
  // The next `steps` tokens of one row from its position on, folded into its slot; token 0 is the start token.
  FoldIn prefill;
  FoldIn read;  // all inputs of one row
  // One token of one head: see recurrent_step in model/ops.py.
  void (*attend)(float* q, float* k, const float* v, float* S, float* z, int D, int M, float eps, float* y);
  SequenceKernel causal, causal_backward;  // see causal_attention in model/ops.py
};

constexpr int PREFILL_TOKENS = 32;  // tokens of one row that go through the layers together

// Every row by its number of steps, or with as many of its tokens folded in, or all of its inputs. patience: see Barrier.
void decode(const Kernels&, const Model&, const Rows&, int threads, double patience);
void prefill(const Kernels&, const Model&, const Rows&, int threads);
void read(const Kernels&, const Model&, const Rows&, int threads);

// The best that this processor can run, or the one that LINPIX_KERNEL names.
const Kernels& chosen_kernels();

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512vnni, kernels_avx512bf16;
#endif

}  // namespace linpix
