// A pass: takes some tokens through all layers, on one thread's share of the columns. All of decode, prefill and read
// goes through it: one token of each row in decode, up to 32 of one row in the others.
//
// Why it is fast:
// - Bias, activation, residual and rounding are applied to the sums of a product while they are in the nearest cache.
// - The qkv product of a head is followed at once by that head's feature map and state, while the next head's state is
//   prefetched. q, k and v are stored for one head at a time.
// - Threads that share the columns meet at four barriers in a layer. Each of them does the norms of all rows for
//   itself, which saves further barriers.
#pragma once

#include "attention.h"
#include "decode.h"
#include "product.h"
#include "functions.h"
#include "token.h"

namespace linpix::LINPIX_ISA {
namespace {

// Returns when every thread of the share has called it.
void wait(Share share) {
  if (share.count == 1) return;
  Barrier& b = *share.barrier;
  const int round = __atomic_load_n(&b.round, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&b.arrived, 1, __ATOMIC_ACQ_REL) == b.members) {
    __atomic_store_n(&b.arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&b.round, round + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&b.asleep, __ATOMIC_SEQ_CST)) say_changed(b.round);
    return;
  }
  for (int spins = 0; __atomic_load_n(&b.round, __ATOMIC_ACQUIRE) == round; ++spins) {
    if (spins < 4000) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    } else {  // another thread has lost its core; if we yielded, we could lose ours too, and go on missing each other
      __atomic_add_fetch(&b.asleep, 1, __ATOMIC_SEQ_CST);
      sleep_while(b.round, round);
      __atomic_sub_fetch(&b.asleep, 1, __ATOMIC_SEQ_CST);
    }
  }
}

template <class T>
class Pass {
 public:
  // For up to `most` tokens. If own and common are null, this only counts the bytes that it needs of each.
  Pass(const Model& model, const Rows& rows, Share share, int most, void* own, void* common)
      : m(model), rows(rows), share(share) {
    uintptr_t at = (uintptr_t)own;
    token = take<Token>(at, most);
    x = take<float>(at, most * m.d_model);
    a = take<T>(at, most * m.d_model);
    const Matrix &out = m.layer[0].out, &down = m.layer[0].down;
    bytes = take<uint8_t>(at, most * greatest(greatest(m.d_model, out.depth), down.depth));
    affine = take<Affine>(at, most);
    qkv = take<float>(at, most * m.layer[0].qkv.columns);
    features = take<float>(at, most * m.d_model);
    parameters = take<float>(at, most * m.head.groups * m.head.columns);
    read = take<float>(at, round_up(m.value_dim, LANES));
    scratch = take<float>(at, m.head.columns);
    skipped = take<float>(at, m.project.columns + m.skipped_head.groups * m.skipped_head.columns);
    own_bytes = at - (uintptr_t)own;
    at = (uintptr_t)common;
    sum = take<float>(at, most * m.d_model);
    y = take<char>(at, most * out.depth * sizeof(float));  // some layers may store T
    hidden = take<char>(at, most * down.depth * sizeof(float));
    common_bytes = at - (uintptr_t)common;
  }

  size_t own_bytes, common_bytes;
  Token* token;       // of this pass
  int tokens = 0;
  float* parameters;  // (tokens, groups, columns): results of head()
  float* scratch;     // K, rounded up
  float* skipped;     // of a sub-pixel that skips the layers: hidden features, then parameters

  // Takes the tokens through all layers. Without `predict`, the last layer only updates its state.
  void run(bool predict) {
    embed();
    residual_norm(x, nullptr, m.layer[0].norm1, &m.layer[0].qkv);
    for (int l = 0; l < m.layers; ++l) {
      const Layer& layer = m.layer[l];
      attention(l);
      if (l == m.layers - 1 && !predict) return;
      wait(share);
      product_share(input_of(y, layer.out), layer.out, [&](int r, int c, Floats s) { add_residual(r, c, s); });
      wait(share);
      residual_norm(sum, &layer.norm1, layer.norm2, &layer.up);
      if (m.gelu)  // inlined, since a call would pass the sums through memory
        product_share(a, layer.up, [&](int r, int c, Floats s) __attribute__((always_inline)) {
          store_input(hidden, layer.down, r, c, gelu(s));
        });
      else
        product_share(a, layer.up,
                      [&](int r, int c, Floats s) { store_input(hidden, layer.down, r, c, at_least(s, 0.0f)); });
      wait(share);
      product_share(input_of(hidden, layer.down), layer.down, [&](int r, int c, Floats s) { add_residual(r, c, s); });
      wait(share);
      const Layer* next = l + 1 < m.layers ? &layer + 1 : nullptr;
      residual_norm(sum, &layer.norm2, next ? next->norm1 : Norm{}, next ? &next->qkv : nullptr);
    }
  }

  // Parameters of every token, from x.
  void head() {
    const int width = m.head.groups * m.head.columns;
    for (int r = 0; r < tokens; ++r) normalise(x + r * m.d_model, m.norm, features + r * m.d_model);
    product(features, m.d_model, tokens, m.head, 0, m.head.groups * panels_of(m.head.columns),
            [&](int r, int c, Floats s) { store(parameters + r * width + c, s); });
    if (m.background >= 0) keep(0);
  }

  // The final features of the last token, after run(true). What later sub-pixels that skip the layers need is kept.
  const float* finish_last() {
    float* found = features + (tokens - 1) * m.d_model;
    normalise(x + (tokens - 1) * m.d_model, m.norm, found);
    if (m.background >= 0) keep(tokens - 1);
    return found;
  }

  // Parameters of a sub-pixel amid background, as in model/background.py; they stay in `skipped`. With a categorical
  // head only the ground's and its neighbours': the others are seldom needed, and skip_others computes them.
  float* skip(const Token& k) {
    const uint8_t* image = rows.canvas + k.slot * m.subpixels;
    const int n = m.project.columns;
    int64_t following = 0;
    for (int i = 0; i < m.values; ++i) following += is_known_background(m, k, image, i);
    float* found = skipped + n;
    for (int c = 0; c < n; c += LANES) store(skipped + c, skipped_feature(m, k, following, rows.last + k.slot * n, c));
    const int panel = m.background / (Matrix::PANEL * LANES);  // all panels of 256 columns are of the same width
    if (m.categorical)
      skip_panels(panel, panel + 1);
    else
      skip_others();
    return found;
  }
  void skip_others() { skip_panels(0, m.skipped_head.groups * panels_of(m.skipped_head.columns)); }

 private:
  void skip_panels(int first, int last) {
    const int n = m.project.columns;
    product(skipped, n, 1, m.skipped_head, first, last, [&](int, int c, Floats s) { store(skipped + n + c, s); });
  }

  // Projects the final features of the tokens from `first` on, and keeps them in rows.last.
  void keep(int first) {
    product(features + first * m.d_model, m.d_model, tokens - first, m.project, 0, panels_of(m.project.columns),
            [&](int r, int c, Floats s) { store(rows.last + token[first + r].slot * m.project.columns + c, s); });
  }

  template <class U>
  static U* take(uintptr_t& at, size_t count) {
    U* part = (U*)at;
    at += (count * sizeof(U) + 63) / 64 * 64;
    return part;
  }

  // Panels first .. last-1 of w, for every token. The input is bytes and affine if w is int8, otherwise `from`.
  template <class Epilogue>
  void multiply(const T* from, const Matrix& w, int first, int last, Epilogue epilogue) {
    if (w.int8)
      return product(bytes, w.depth, tokens, w, first, last, epilogue, affine);
    if constexpr (sizeof(T) == sizeof(float))
      if (w.narrow) return product<T, bfloat16>(from, w.depth, tokens, w, first, last, epilogue);
    product(from, w.depth, tokens, w, first, last, epilogue);
  }

  // This thread's share of the panels of a matrix.
  template <class Epilogue>
  void product_share(const T* from, const Matrix& w, Epilogue epilogue) {
    const int panels = w.groups * panels_of(w.columns);
    multiply(from, w, share.index * panels / share.count, (share.index + 1) * panels / share.count, epilogue);
  }

  // y and hidden, the inputs of the products `out` and `down`, are rounded to T as they come. For an int8 product they
  // stay floats until a row is complete, because its range is needed to make bytes of it.
  static size_t bytes_for(const Matrix& w) { return w.int8 ? sizeof(float) : sizeof(T); }
  static void store_input(char* rows, const Matrix& w, int r, int c, Floats s) {
    if (w.int8)
      store((float*)rows + r * w.depth + c, s);
    else
      store((T*)rows + r * w.depth + c, s);
  }
  const T* input_of(const char* rows, const Matrix& w) {
    if (w.int8)
      for (int r = 0; r < tokens; ++r) to_bytes(r, w.depth, (const float*)rows + r * w.depth);
    return (const T*)rows;
  }
  void to_bytes(int r, int n, const float* row) { affine[r] = quantise(row, n, bytes + r * n); }

  void add_residual(int r, int c, Floats s) { store(sum + r * m.d_model + c, load(x + r * m.d_model + c) + s); }

  void embed() {
    for (int r = 0; r < tokens; ++r) {
      const Token& k = token[r];
      float* to = x + r * m.d_model;
      if (rows.inputs) {
        memcpy(to, rows.inputs + k.t * m.d_model, m.d_model * sizeof(float));
        continue;
      }
      const uint8_t* image = rows.canvas + k.slot * m.subpixels;
      for (int i = 0; i < look_ups(m); ++i) {
        const float* from = m.table + row_of(m, k, image, i) * m.d_model;
        for (int c = 0; c < m.d_model; c += LANES) store(to + c, i ? load(to + c) + load(from + c) : load(from + c));
      }
    }
  }

  void normalise(const float* from, Norm norm, float* to) {
    const int n = m.d_model;
    Floats total = 0.0f, squares = 0.0f;
    for (int c = 0; c < n; c += LANES) total = total + load(from + c);
    const Floats mean = linpix::LINPIX_ISA::sum(total) / (float)n;
    for (int c = 0; c < n; c += LANES) {
      const Floats centred = load(from + c) - mean;
      squares = multiply_add(centred, centred, squares);
    }
    const Floats scale = 1.0f / __builtin_sqrtf(linpix::LINPIX_ISA::sum(squares) / (float)n + 1e-5f);
    for (int c = 0; c < n; c += LANES)
      store(to + c, multiply_add((load(from + c) - mean) * scale, load(norm.weight + c), load(norm.bias + c)));
  }

  // Between two sub-layers. Writes the residual stream x from `from`, and the input of the next product: a, or bytes if
  // its matrix w is int8. w is null after the last layer, which needs only x.
  // Post-norm: x = norm(from), a = x. Pre-norm: x = from, a = norm(x).
  void residual_norm(const float* from, const Norm* post, Norm pre, const Matrix* w) {
    const int n = m.d_model;
    for (int r = 0; r < tokens; ++r) {
      float* to = x + r * n;
      if (!m.pre_norm && post)
        normalise(from + r * n, *post, to);
      else if (from != x)
        memcpy(to, from + r * n, n * sizeof(float));
      const float* next = to;
      if (m.pre_norm && pre.weight) {
        normalise(to, pre, features + r * n);
        next = features + r * n;
      }
      if (!w) continue;
      if (w->int8)
        to_bytes(r, n, next);
      else
        for (int c = 0; c < n; c += LANES) store(a + r * n + c, load(next + c));
    }
  }

  // This thread's share of the heads: qkv product, feature map, state, and the result into y.
  void attention(int l) {
    const Matrix &w = m.layer[l].qkv, &out = m.layer[l].out;
    const int D = m.key_dim, M = m.value_dim, panels = panels_of(w.columns);
    const int end = (share.index + 1) * m.heads / share.count;
    for (int h = share.index * m.heads / share.count; h < end; ++h) {
      multiply(a, w, h * panels, (h + 1) * panels,
               [&](int r, int c, Floats s) { store(qkv + r * w.columns + c - h * w.columns, s); });
      for (int r = 0; r < tokens; ++r) {
        const size_t size = bytes_for(out);
        char* to = y + (r * out.depth + h * M) * size;
        float* q = qkv + r * w.columns;
        if (token[r].folded) {
          const int64_t state = (token[r].slot * m.layers + l) * m.heads + h;
          if (tokens > FEW_ROWS && h + 1 < end && (!r || token[r].slot != token[r - 1].slot))
            ask_for(rows.S + (state + 1) * D * M, D * M);
          map_features(q, 2 * D);
          attend_mapped(q, q + D, q + 2 * D, rows.S + state * D * M, rows.z + state * D, D, M, m.eps, read);
        } else {
          for (int i = 0; i < M; ++i) read[i] = 0;
        }
        for (int i = 0; i < M; i += LANES) {
          alignas(64) char rounded[LANES * sizeof(float)];
          store_input(rounded, out, 0, 0, load(read + i));
          memcpy(to + i * size, rounded, least(LANES, M - i) * size);
        }
      }
    }
  }

  const Model& m;
  const Rows& rows;
  const Share share;
  float* x;         // (tokens, d_model): the residual stream
  T* a;             // (tokens, d_model): the input of a product
  uint8_t* bytes;   // (tokens, depth): the input of an int8 product
  Affine* affine;    // (tokens): the range of its rows
  float* qkv;       // (tokens, q k v of one head)
  float* features;  // (tokens, d_model)
  float* read;      // M, rounded up: the result of one head
  // Common to the threads of the share:
  float* sum;       // (tokens, d_model): a sub-layer's output and its residual
  char* y;          // (tokens, H * M): see store_input()
  char* hidden;     // (tokens, d_ff): see store_input()
};

}  // namespace
}  // namespace linpix::LINPIX_ISA
