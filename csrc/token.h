// What a token looks up, and which sub-pixels are not tokens because they skip the layers; for processor and GPU alike.
#pragma once

#include "decode.h"
#include "functions.h"

namespace linpix::LINPIX_ISA {

struct Token {
  int64_t slot;
  int64_t t;      // the position being predicted, in tokens; in read, the index of the input
  int64_t start;  // start index of its image
  bool folded;    // false at position 0 of a model without a start token: there is nothing to fold in
  const bool* known = nullptr;  // (T): the sub-pixels of the image that the model has read; null: none
};

namespace {

constexpr int UNKNOWN = 256, OUTSIDE = 256, FOLLOWING_OUTSIDE = 257;

// The token of a row at position t.
LINPIX_FUNCTION Token token_at(const Model& m, const Rows& rows, int64_t row, int64_t t) {
  const int64_t slot = rows.slots[row];
  return {slot, t, rows.start[row], !(m.marginal && t == 0),
          rows.conditioned && rows.conditioned[row] ? rows.known + slot * m.subpixels : nullptr};
}

// The i-th value that a token looks up: a sub-pixel's, or from 256 on a substitute. See model/inputs.py.
LINPIX_FUNCTION int64_t value_of(const Model& m, const Token& k, const uint8_t* image, int i) {
  const int32_t at = m.source[k.t * m.values + i];
  const bool follows = i >= m.values - m.following;
  if (at < 0) return i == 0 ? k.start : follows ? FOLLOWING_OUTSIDE : OUTSIDE;
  return follows && !(k.known && k.known[at]) ? UNKNOWN : image[at];
}

// How many rows of the table a token sums, and the index of the i-th of them.
LINPIX_FUNCTION int look_ups(const Model& m) { return m.values + m.places + (m.class_rows > 0); }
LINPIX_FUNCTION int64_t row_of(const Model& m, const Token& k, const uint8_t* image, int i) {
  if (i < m.values) return m.base[i] + value_of(m, k, image, i);
  return i < m.values + m.places ? m.place[k.t * m.places + i - m.values] : m.class_rows + k.start - 256;
}

// Whether the i-th value is ink: a sub-pixel that is not background, so the token does not lie amid background.
LINPIX_FUNCTION bool is_ink(const Model& m, const Token& k, const uint8_t* image, int i) {
  const int64_t value = value_of(m, k, image, i);
  return value != m.background && value < 256;
}

LINPIX_FUNCTION bool was_read(const Model& m, const Token& k) { return k.known && k.known[k.t * m.token_size]; }

LINPIX_FUNCTION bool amid_background(const Model& m, const Token& k, const uint8_t* image) {
  if (m.background < 0) return false;
  for (int i = 0; i < m.values; ++i)
    if (is_ink(m, k, image, i)) return false;
  return true;
}

// Whether the i-th value is a following neighbour that is known to be background.
LINPIX_FUNCTION bool is_known_background(const Model& m, const Token& k, const uint8_t* image, int i) {
  return i >= m.values - m.following && value_of(m, k, image, i) == m.background;
}

// Hidden features of a sub-pixel amid background, from column c on. following: how many of its following neighbours are
// known background; last: what is kept of the last token, or null if there was none.
LINPIX_FUNCTION Floats skipped_feature(const Model& m, const Token& k, int64_t following, const float* last, int c) {
  const int n = m.project.columns, classes = m.tokens, known = classes + m.classes + 1;
  const float *position = m.skipped_table + k.t * n, *label = m.skipped_table + (classes + k.start - 256) * n,
              *ahead = m.skipped_table + (known + following) * n;
  const Floats before = last ? load(last + c) : Floats(0.0f);
  return gelu(before + (load(position + c) + load(label + c) + load(ahead + c)));
}

}  // namespace
}  // namespace linpix::LINPIX_ISA
