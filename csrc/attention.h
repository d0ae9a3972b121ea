// Linear attention on one head's state: fold a token in, read the state out.
//
// Why it is fast: S (D x M floats) is by far the largest operand, and is swept once. Each vector of it is loaded,
// updated, multiplied by q and stored before the next.
#pragma once

#include "functions.h"

namespace linpix::LINPIX_ISA {
namespace {

// V vectors of the values: S += k v^T, then numerator = q S (equations 18 and 20).
template <int V>
LINPIX_INLINE void fold_and_read(const float* q, const float* k, const float* v, float* S, int D, int M,
                                 float* numerator) {
  constexpr int CHAINS = 4;  // independent sums: a single one would wait for each addition to finish
  Floats value[V], total[CHAINS][V];
  for (int j = 0; j < V; ++j) value[j] = load(v + j * LANES);
  for (int i = 0; i < CHAINS; ++i)
    for (int j = 0; j < V; ++j) total[i][j] = 0.0f;
  const auto one = [&](int d, Floats(&chain)[V]) {
    for (int j = 0; j < V; ++j) {
      float* s = S + (size_t)d * M + j * LANES;
      const Floats updated = multiply_add(k[d], value[j], load(s));
      store(s, updated);
      chain[j] = multiply_add(q[d], updated, chain[j]);
    }
  };
  int d = 0;
  for (; d + CHAINS <= D; d += CHAINS)
    for (int i = 0; i < CHAINS; ++i) one(d + i, total[i]);
  for (int i = 0; i < CHAINS - 1; ++i)
    if (d + i < D) one(d + i, total[i]);
  for (int j = 0; j < V; ++j)
    store(numerator + j * LANES, (total[0][j] + total[1][j]) + (total[2][j] + total[3][j]));
}

// Applies phi to n numbers, in place.
void map_features(float* x, int n) {
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(x + i, phi(load(x + i)));
  if (i < n) store_some(x + i, phi(load_some(x + i, n - i)), n - i);
}

// Prefetches a state of n floats that is needed soon: with many images, states do not stay in a core's own cache.
void ask_for(const float* S, int n) {
  for (int i = 0; i < n; i += LANES) __builtin_prefetch(S + i, 0, 2);
}

// One token of one head: fold it into (S, z), read the state out into y (M floats). q and k: after the feature map.
void attend_mapped(const float* q, const float* k, const float* v, float* S, float* z, int D, int M, float eps,
                   float* y) {
  Floats products = 0.0f;
  int d = 0;
  for (; d + LANES <= D; d += LANES) {
    const Floats updated = load(z + d) + load(k + d);
    store(z + d, updated);
    products = multiply_add(load(q + d), updated, products);
  }
  if (d < D) {
    const Floats updated = load_some(z + d, D - d) + load_some(k + d, D - d);
    store_some(z + d, updated, D - d);
    products = multiply_add(load_some(q + d, D - d), updated, products);
  }
  constexpr int V = PARTS == 1 ? 2 : 1;  // two only where a vector is one register
  int m = 0;
  for (; m + V * LANES <= M; m += V * LANES) fold_and_read<V>(q, k, v + m, S + m, D, M, y + m);
  for (; m + LANES <= M; m += LANES) fold_and_read<1>(q, k, v + m, S + m, D, M, y + m);
  for (; m < M; ++m) {
    float total = 0;
    for (d = 0; d < D; ++d) {
      float& s = S[(size_t)d * M + m];
      s = s + k[d] * v[m];
      total = total + q[d] * s;
    }
    y[m] = total;
  }
  const float normaliser = sum(products) + eps;
  for (m = 0; m < M; ++m) y[m] = y[m] / normaliser;
}

void attend(float* q, float* k, const float* v, float* S, float* z, int D, int M, float eps, float* y) {
  map_features(q, D);
  map_features(k, D);
  attend_mapped(q, k, v, S, z, D, M, eps, y);
}

}  // namespace
}  // namespace linpix::LINPIX_ISA
