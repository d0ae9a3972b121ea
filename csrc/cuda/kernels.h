// What the CUDA kernels work on (plain pointers into the GPU's memory, and sizes), and the functions that start them.
// Begin here to read csrc/cuda/. pass.cpp puts the kernels in order, threads.h says how a kernel is written, product.h
// and many_rows.h have the matrix products, attention.h and recall.h the recurrent state, background.h the sub-pixels
// that skip the layers, and ends.h embedding, head and sampling.
//
// A pass takes `tokens` tokens of each row through all layers: in decode one of every row, in prefill and read up to
// CHUNK.
// Token j of row r has position positions[r] + begun + j (without positions: begun + j), where begun is taken[r] in
// decode and `step` otherwise. It takes part if begun + j < steps[r], unless it is skipped. Rows and tokens that do not
// take part are computed too where this is harmless.
//
// Why decode is fast on a GPU:
// - Reading and writing the state should take most of a step. S is read once per step, in 16-byte chunks that are
//   requested before any of them is used. In float16 it is written only once per group of tokens (see Pools).
// - A layer is five kernels, since norms, residuals and activations are part of the products (pass.cpp, product.h).
//   With many rows it is seven: a norm in each block of columns would cost more than a kernel for it (many_rows.h).
// - On Hopper and later, a kernel begins while the one before it ends, and requests what that one does not write:
//   weights and state (follow in threads.h).
// - Nothing waits for the processor: steps, positions and images are in the GPU's memory, so a CUDA graph
//   holds several passes (ops.cpp, model/cuda.py).
#pragma once

#include <stdlib.h>

#include "../decode.h"

namespace linpix {

// The recurrent state of all slots, in float or float16. If the next token is number n in its image, a float16 S holds
// only whole groups of tokens, those below n - n % GROUP. The keys and values of later ones wait in pairs. So S is read
// at every step, but written, and rounded, once per group. This schedule depends only on a token's number, so an image
// does not depend on the images beside it. The number is the position, unless some sub-pixels are not tokens, or inputs
// were read before the first.
constexpr int GROUP = 8, HALF_HEAD = 32;  // HALF_HEAD: the size of heads whose S may be float16
struct Pools {
  void* S;             // (N, L, H, D, M): float, or float16 that a head's scale multiplies, in the order of pack_state
  float* z;            // (N, L, H, D)
  uint16_t* pairs;     // (N, L, H, GROUP, D + M) bfloat16: see recall.h; this and the next two: null if S is float
  const float* scale;  // (L, H), powers of two
  int64_t* saturated;  // how many elements of S float16 could not hold; they are clamped
  int64_t* tokens;     // (N): the number of a slot's next token; null: its position
};

// What kernels pass to each other. Padded columns of y and hidden are zero: those of y from the start, those of hidden
// as results of the products.
struct Buffers {
  float *sum, *x;  // (rows * tokens, d_model): a sub-layer's output and its residual; the residual stream
  float* qkv;      // (rows * tokens, columns of qkv)
  void *y, *hidden;  // (rows * tokens, depth of out), (rows * tokens, depth of down): float or bfloat16
  void* normalised;  // (rows * tokens, depth of qkv): bfloat16; null in float32
  bool* skipped;     // (rows * tokens): sub-pixels that are not tokens; in decode, rows that skip this pass; null
                     // without Pools.tokens
};

struct Pass {
  Model model;  // its layers are in host memory, so kernels get what they need of them in their calls
  Rows rows;
  Pools pools;
  Buffers buffers;
  int tokens;
  int64_t step;

  LINPIX_HOST_DEVICE int64_t begun(int64_t row) const { return rows.taken ? rows.taken[row] : step; }
};

struct AttendCall {
  Pass pass;
  int layer, group, depth;  // columns of a head in qkv; columns of y
};

struct ProductCall {
  const void* a;  // (rows, depth): what is multiplied; null: what residual and norm make of sum is multiplied
  Matrix weights;
  int rows;
  // residual and norm: x = post(sum), or sum without post; what is multiplied is pre(x), or x without pre
  const float* sum;
  Norm post, pre;
  int d_model;
  float* x;        // written with the norm, read by Product::add
  void* out;       // (rows, columns)
  bool gelu;
  void* normalised;  // (rows, depth): where each row is normalised once, what is multiplied
};

struct EndCall {
  Pass pass;
  Norm post;       // of the last layer, in post-norm models
  bool embed_next = false;
  bool keep_head = false;  // head weights are kept in shared memory; set by finish() if they fit
};

// Tiles of a product in bfloat16, all with the same bits: of 16 rows, which each block normalises (product.h); of 32 x 32
// to 128 x 128, of rows that a kernel of its own has normalised (many_rows.h). LINPIX_TILES names them when a graph is
// recorded, since model/cuda.py times all of them; else they follow from the number of rows. Buffers hold whole tiles.
enum class Tiles { few, medium, large };
constexpr int FEW = 64, MEDIUM = 1024, TILE_ROWS = 128;
inline Tiles tiles_for(int rows) {
  const char* wanted = getenv("LINPIX_TILES");
  const char initial = wanted ? *wanted : 0;
  if (initial) return initial == 'f' ? Tiles::few : initial == 'm' ? Tiles::medium : Tiles::large;
  return rows <= FEW ? Tiles::few : rows <= MEDIUM ? Tiles::medium : Tiles::large;
}

// What a product does with its sums: qkv stores them, up applies relu or gelu, add adds x.
enum class Product { qkv, up, add };

// Each starts one kernel, multiply two if rows are normalised, and returns a cudaError_t. overlapped: see launch in
// threads.h; always so in multiply, finish and keep_last, never in embed.
int attend(const AttendCall&, void* stream, bool overlapped);
int multiply(Product, ProductCall, bool bf16, void* stream);
int embed(const Pass&, void* stream);
int finish(const EndCall&, void* stream);
int run_ahead(const Pass&, void* stream, bool overlapped);
int keep_last(const EndCall&, void* stream);

// All kernels of some passes of decode, or of a prefill of at most `longest` tokens of each row. The buffers need room
// for rows * tokens.
constexpr int CHUNK = 128;  // tokens of a row that prefill, or inputs that read, takes together
int decode(Pass, int passes, void* stream);
int prefill(Pass, int64_t longest, void* stream);

// Attention over whole sequences, forward and backward. Heads may have at most this size, since a block keeps a chunk
// and a state in its shared memory, in double too.
constexpr int MAX_SEQUENCE_HEAD = 64;
int causal(const Sequences&, void* stream);
int causal_backward(const Sequences&, void* stream);

const char* explain(int error);
bool attends(int key_dim, int value_dim);  // whether there is a kernel for heads of this size
constexpr int MAX_D_MODEL = 512;          // a warp keeps a row in its registers (norm.h)
constexpr int MAX_MIXTURES = 512;         // finish keeps the parameters of four rows in shared memory
constexpr int MAX_DEPTH = 2048;           // a product keeps its rows in a block's shared memory
constexpr int MAX_BACKGROUND_DIM = 4096;  // as in model/config.py; run_ahead keeps a row's in shared memory

}  // namespace linpix
