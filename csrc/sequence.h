// What attention over whole sequences works on: plain pointers and sizes.
#pragma once

#include <stdint.h>

namespace linpix {

constexpr int SEQUENCE_CHUNK = 32;  // tokens; quadratic inside a chunk, recurrent between chunks

enum class Element { float32, bfloat16, float64 };  // of q, k, v and their gradients; computed in float, or in double

// A vector, side by side, or one number for each head of each token; elements from one to the next.
struct Heads {
  void* at;
  int64_t token, head;
};

// Sequences packed one after the other: tokens offsets[i] .. offsets[i + 1] - 1 of sequence i.
struct Sequences {
  int64_t count;
  const int64_t* offsets;  // count + 1
  int heads, D, M;
  Element element;
  double eps;
  Heads q, k, v;
  Heads y, normaliser;  // normaliser: one number, float, or double if all is
  Heads g, dq, dk, dv;  // of the backward pass: the gradient with respect to y, and what is asked for
};

}  // namespace linpix
