// What attention over whole sequences works on: plain pointers and sizes.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace linpix {

constexpr int SEQUENCE_CHUNK = 32;  // tokens; quadratic inside a chunk, recurrent between chunks

enum class Element { float32, bfloat16, float64 };  // of q, k, v and their gradients; computed in float, or in double

// A vector, side by side, for each token of each head of each image; elements from one to the next.
struct Heads {
  void* at;
  int64_t image, token, head;
};

struct Sequences {
  int64_t images, tokens;
  int heads, D, M;
  Element element;
  double eps;
  Heads q, k, v, y, normaliser;  // normaliser: one number, float, or double if all is
  Heads g, dq, dk, dv;           // of the backward pass: the gradient with respect to y, and what is asked for
};

// Of the gated delta rule: sequences packed one after the other, tokens offsets[i] .. offsets[i + 1] - 1 of sequence i.
// Heads of it have no images. beta and g are one number a token, float, or double if all is.
struct PackedSequences {
  int64_t sequences;
  const int64_t* offsets;  // sequences + 1
  int heads, D, M;
  Element element;
  Heads q, k, v, beta, g, o;
  void* states;  // (N / SEQUENCE_CHUNK, heads, D, M), float or double: after chunk c of sequence i, where c counts from
                 // offsets[i] / SEQUENCE_CHUNK, if that is before offsets[i + 1] / SEQUENCE_CHUNK
  Heads d_o, dq, dk, dv, dbeta, dg;  // of the backward pass: the gradient with respect to o, and what is asked for
};

}  // namespace linpix
