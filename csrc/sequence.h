// The data of attention over whole sequences: plain pointers and sizes, for processor and GPU alike.
#pragma once

#include <stdint.h>

namespace linpix {

constexpr int SEQUENCE_CHUNK = 32;  // tokens; quadratic inside a chunk, recurrent between chunks

enum class Element { float32, bfloat16, float64 };  // of q, k, v and gradients; computed in float, or float64 in double

// A contiguous vector or one number for each head of each token. token, head: elements from one to the next.
struct Heads {
  void* at;
  int64_t token, head;
};

// Sequences packed one after the other: sequence i has tokens offsets[i] .. offsets[i + 1] - 1.
struct Sequences {
  int64_t count;
  const int64_t* offsets;  // count + 1
  int heads, D, M;
  Element element;
  double eps;
  Heads q, k, v;
  Heads y, normaliser;  // normaliser: one number, float, or double with float64
  Heads g, dq, dk, dv;  // only of the backward pass: the gradient with respect to y (given), q, k and v (computed)
};

}  // namespace linpix
