// What the CUDA kernels work on, and how they are started: plain pointers into the GPU's memory, and sizes.
//
// A pass takes `tokens` tokens of each row through all layers: in decode one of every row, in prefill many of a few.
// Token j of row r stands at position positions[r] + begun + j (without positions: begun + j), where begun is taken[r]
// in decode and `step` else. It takes part if begun + j < steps[r], unless it is skipped. Rows and tokens that do not
// take part are computed as far as that harms nobody.
#pragma once

#include "../decode.h"

namespace linpix {

// Recurrent state of all slots. With defer > 1, S holds only whole groups of tokens, those of numbers below
// n - n % defer, and the keys and values of the others wait in pairs: S is read at every step but written once a group.
// What is done when depends on nothing but a token's number in its image, so an image does not depend on who is beside
// it. The number is the position, unless some sub-pixels are no tokens, or something was read before the first.
struct Pools {
  void* S;             // (N, L, H, D, M) float, or float16 times a head's scale
  float* z;            // (N, L, H, D)
  uint16_t* pairs;     // (N, L, H, defer, D + M) bfloat16: mapped key, value; null if defer is 1
  const float* scale;  // (L, H), powers of two; null if S is float
  int64_t* saturated;  // elements of S that float16 could not hold, clamped; null if S is float
  int defer;
  int64_t* tokens;     // (N): the number of a slot's next token; null: its position
};

// Between kernels. Padded columns of y are zero, as those of hidden come out of the products.
struct Buffers {
  float *sum, *x;  // (rows * tokens, d_model): what the last sub-layer left with its residual; the residual stream
  float* qkv;      // (rows * tokens, columns of qkv)
  void *y, *hidden;  // (rows * tokens, depth of out), (rows * tokens, depth of down): float or bfloat16
  bool* skipped;     // (rows * tokens): of prefill with Pools.tokens, sub-pixels that are no tokens; else null
};

struct Pass {
  Model model;  // its layers are on the host: kernels are given what they need of them
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
  const void* a;  // (rows, depth): what is multiplied; or null: what `residual_norm` makes of sum
  Matrix weights;
  int rows;
  // residual_norm: x = norm_post(sum) if there is one, else sum; multiplied is norm_pre(x) if there is one, else x
  const float* sum;
  Norm post, pre;
  int d_model;
  float* x;        // written by residual_norm; read by what adds it
  void* out;       // (rows, columns)
  bool gelu;
};

struct EndCall {
  Pass pass;
  Norm post;       // of the last layer, if post-norm
  bool embed_next = false;
  bool keep_head = false;  // in shared memory, where it fits: finish says so
};

// What a product does with its sums: qkv stores them, up applies relu or gelu, and add adds x.
enum class Product { qkv, up, add };

// Each returns a cudaError_t. overlapped: see launch in threads.h. multiply, finish and keep_last always are, and embed
// never is.
int attend(const AttendCall&, void* stream, bool overlapped);
int multiply(Product, const ProductCall&, bool bf16, void* stream);
int embed(const Pass&, void* stream);
int finish(const EndCall&, void* stream);
int run_ahead(const Pass&, void* stream, bool overlapped);
int keep_last(const EndCall&, void* stream);

// All of it: passes of decode, or the first tokens of each row. Buffers for rows * tokens.
constexpr int CHUNK = 128;  // tokens of a row that prefill takes together
int decode(Pass, int passes, void* stream);
int prefill(Pass, int64_t longest, void* stream);

// Attention over whole sequences, forward and backward, with heads of at most this size: a block keeps a chunk and a state
// in its shared memory, in double too.
constexpr int MAX_SEQUENCE_HEAD = 64;
int causal(const Sequences&, void* stream);
int causal_backward(const Sequences&, void* stream);

const char* explain(int error);
bool attends(int key_dim, int value_dim);  // whether there is a kernel for heads of this size
constexpr int MAX_D_MODEL = 512;          // residual_norm keeps a row in a warp's registers
constexpr int MAX_MIXTURES = 512;         // and parameters of four rows
constexpr int MAX_DEPTH = 2048;           // products keep their rows in a block's shared memory
constexpr int MAX_BACKGROUND_DIM = 4096;  // as model/config.py has it; hidden features of a row in shared memory

}  // namespace linpix
