// Sampling from 256 logits: one sub-pixel and its log-probability. See model/categorical.py.
//
// Why it is fast: whether a sub-pixel is the ground is decided by one number. Amid background it nearly always is, so
// there the other logits are seldom computed.
#pragma once

#include "decode.h"
#include "functions.h"
#include "philox.h"

namespace linpix::LINPIX_ISA {
namespace {

constexpr int VALUES = 256;

LINPIX_FUNCTION bool all_finite(const float* x, int n) {
  bool finite = true;
  for (int i = 0; i < n; ++i) finite &= x[i] - x[i] == 0;
  return finite;
}

LINPIX_INLINE float first_lane(Floats x) {
  alignas(64) float lanes[LANES];
  store(lanes, x);
  return lanes[0];
}

// log(1 / (1 + e^-x))
LINPIX_INLINE Floats log_sigmoid(Floats x) { return at_most(x, 0.0f) - log1p(exp(-magnitude(x))); }

LINPIX_FUNCTION int ground_of(const Model& m) { return m.background < 0 ? 0 : m.background; }

// The values other than the ground, weighed by the exponentials of their logits.
struct Others {
  float most;    // their largest logit
  float total;   // sum of weights, relative to that of the largest logit

  // log of the sum of the exponentials of their logits
  LINPIX_FUNCTION float log_total() const { return most + first_lane(log(Floats(total))); }
};

// weights: VALUES floats, of which the ground's becomes 0. With a temperature of 0 all that counts is `most`.
LINPIX_FUNCTION Others weigh(const float* logits, int ground, float temperature, float* weights) {
  for (int j = 0; j < VALUES; j += LANES) store(weights + j, load(logits + j));
  weights[ground] = weights[ground ? 0 : 1];  // any other value's
  Floats largest = load(weights);
  for (int j = LANES; j < VALUES; j += LANES) {
    const Floats next = load(weights + j);
    largest = where_less(largest, next, next, largest);
  }
  alignas(64) float lanes[LANES];
  store(lanes, largest);
  Others found = {lanes[0], 0};
  for (int i = 1; i < LANES; ++i) found.most = lanes[i] > found.most ? lanes[i] : found.most;
  const Floats inverse = temperature > 0 ? 1.0f / temperature : 1.0f;
  for (int j = 0; j < VALUES; j += LANES) {
    const Floats exponent = (load(weights + j) - found.most) * inverse;
    store(weights + j, where_less(exponent, -86.0f, 0.0f, exp(exponent)));  // exp gives no 0
    if (j <= ground && ground < j + LANES) weights[ground] = 0;
    found.total = found.total + sum(load(weights + j));
  }
  return found;
}

// The first value at which the running sum of weights exceeds u times their total.
LINPIX_FUNCTION uint8_t pick_value(const float* weights, float total, float u) {
  float passed = 0;
  int last = 0;
  for (int j = 0; j < VALUES; j += LANES) {
    const float after = passed + sum(load(weights + j));
    if (after > u * total || j + LANES == VALUES)
      for (int i = j; i < j + LANES; ++i) {
        passed = passed + weights[i];
        if (weights[i] > 0) last = i;
        if (weights[i] > 0 && passed > u * total) return (uint8_t)i;
      }
    if (after > u * total) break;  // the sums of lanes and those one by one are rounded in different places
    passed = after;
  }
  return (uint8_t)last;
}

LINPIX_FUNCTION uint8_t likeliest(const float* logits, int ground, float most) {
  int value = 0;
  while (value < VALUES - 1 && (value == ground || logits[value] != most)) ++value;
  return (uint8_t)value;  // if NaN, any: the row is then reported as not finite
}

// Draws a row's sub-pixel unless it is known, and writes its log-probability if it is asked for.
// logits: VALUES floats. Amid background the ground's is its log-odds against all other values, and the others' are
// there only after compute_others(). scratch: VALUES floats.
template <class Compute>
LINPIX_FUNCTION void finish_categorical(const Model& m, const Rows& rows, int row, uint8_t* pixel, bool known,
                                        int64_t position, float* log_prob, const float* logits, float* scratch,
                                        bool amid_background, Compute compute_others) {
  const int ground = ground_of(m);
  const float asked = rows.temperatures[row], temperature = asked > 1e-30f ? asked : 0;  // its inverse is finite
  const Words words = noise(rows.seeds[row], position);
  Others others{};
  bool weighed = false;
  const auto weigh_others = [&] {  // as trained
    if (weighed) return;
    if (amid_background) compute_others();
    if (!all_finite(logits, VALUES)) rows.finite[row] = false;
    others = weigh(logits, ground, 1, scratch);
    weighed = true;
  };
  float odds = logits[ground];
  if (!amid_background) {
    weigh_others();
    odds -= others.log_total();
  }
  if (!(odds - odds == 0)) rows.finite[row] = false;
  if (!known) {
    const float u = temperature > 0 ? uniform(words.word[0]) : 0.5f;
    if (u * (1 + first_lane(exp(Floats(-odds)))) < 1) {
      *pixel = (uint8_t)ground;
    } else {
      weigh_others();
      if (!(temperature > 0)) {
        *pixel = likeliest(logits, ground, others.most);
      } else if (temperature == 1) {
        *pixel = pick_value(scratch, others.total, uniform(words.word[1]));
      } else {
        const Others sharpened = weigh(logits, ground, temperature, scratch);
        *pixel = pick_value(scratch, sharpened.total, uniform(words.word[1]));
      }
    }
  }
  if (!log_prob) return;
  if (*pixel == ground) {
    *log_prob = first_lane(log_sigmoid(odds));
  } else {
    weigh_others();
    *log_prob = first_lane(log_sigmoid(-odds)) + logits[*pixel] - others.log_total();
  }
}

}  // namespace
}  // namespace linpix::LINPIX_ISA
