// Sampling: from the parameters of a token to its sub-pixels and their log-probabilities. See model/mixture.py.
#pragma once

#include "categorical.h"

namespace linpix::LINPIX_ISA {
namespace {

// The parameters of K components, for a token of `size` sub-pixels: groups of K numbers, `stride` apart.
struct Mixture {
  float* group;  // the logits, and after them the other groups
  int K, stride, size;

  LINPIX_FUNCTION const float* logits() const { return group; }
  LINPIX_FUNCTION float* means(int c) const { return group + (1 + c) * stride; }
  LINPIX_FUNCTION const float* log_scales(int c) const { return group + (1 + size + c) * stride; }
  // how far the value of sub-pixel c moves the means of a later one, before tanh
  LINPIX_FUNCTION const float* coefficients(int later, int c) const {
    return group + (1 + 2 * size + later * (later - 1) / 2 + c) * stride;
  }
};

// The component that u picks, with the probabilities that were trained, or the likeliest one if the temperature is 0.
// Other temperatures do not sharpen this choice, since the likeliest value of nearly every sub-pixel is background.
LINPIX_FUNCTION int pick(const Mixture& p, float u, float temperature, float* weights) {
  const float* logits = p.logits();
  int best = 0;
  for (int j = 1; j < p.K; ++j)
    if (logits[j] > logits[best]) best = j;
  if (!(temperature > 0)) return best;
  for (int j = 0; j < p.K; j += LANES) store(weights + j, exp(load(logits + j) - logits[best]));
  float total = 0, passed = 0;
  for (int j = 0; j < p.K; ++j) total = total + weights[j];
  for (int j = 0; j < p.K; ++j) {
    passed = passed + weights[j];
    if (passed > u * total) return j;
  }
  return p.K - 1;
}

// The value that u draws from one component.
LINPIX_FUNCTION uint8_t draw(float mean, float log_scale, float u, float temperature, bool elu_scale) {
  alignas(64) float scale[LANES], logistic[LANES];
  const Floats as_elu = Floats(phi(Floats(log_scale))) + 0.0001f;  // elu(s) + 1.0001
  store(scale, elu_scale ? as_elu : exp(at_least(log_scale, -7.0f)));
  store(logistic, log(u) - log(1 - u));
  const float x = mean + scale[0] * temperature * logistic[0];
  const float value = (x + 1) / 2 * 255;
  if (!(value > 0)) return 0;  // also if NaN: the row is then reported as not finite
  return value > 255 ? 255 : (uint8_t)nearest(value);
}

// Subtracts from K logarithms the logarithm of the sum of their exponentials, and returns it. `to` may be `from`.
LINPIX_INLINE float normalise(const float* from, float* to, int K) {
  const auto lanes = [](int j) {
    alignas(64) float index[LANES];
    for (int i = 0; i < LANES; ++i) index[i] = (float)(j + i);
    return load(index);
  };
  float most = from[0];
  for (int j = 1; j < K; ++j) most = from[j] > most ? from[j] : most;
  Floats total = 0.0f;
  for (int j = 0; j < K; j += LANES)
    total = total + where_less(lanes(j), (float)K, exp(load(from + j) - most), 0.0f);
  const Floats normaliser = Floats(most) + log(Floats(sum(total)));
  for (int j = 0; j < K; j += LANES) store(to + j, load(from + j) - normaliser);
  alignas(64) float result[LANES];
  store(result, normaliser);
  return result[0];
}

LINPIX_FUNCTION float place_of(int value) { return (float)value / 127.5f - 1; }

// Adds to to[j] the log-probability that component j gives to this value of sub-pixel c.
LINPIX_FUNCTION void add_log_probabilities(const Mixture& p, int c, int value, float* to) {
  const float centre = place_of(value), half = 1.0f / 255;
  for (int j = 0; j < p.K; j += LANES) {
    const Floats inverse = exp(-at_least(load(p.log_scales(c) + j), -7.0f));
    const Floats centred = Floats(centre) - load(p.means(c) + j);
    Floats term = load(to + j);
    if (value < 255) term = term + log_sigmoid((centred + half) * inverse);
    if (value > 0) term = term + log_sigmoid(-((centred - half) * inverse));
    if (value > 0 && value < 255) term = term + log(one_minus_exp(at_least(2 * half * inverse, 1.17549435e-38f)));
    store(to + j, term);
  }
}

// Moves the means of later sub-pixels by the value of sub-pixel c.
LINPIX_FUNCTION void move_means(const Mixture& p, int c, int value) {
  const Floats place = place_of(value);
  for (int later = c + 1; later < p.size; ++later)
    for (int j = 0; j < p.K; j += LANES)
      store(p.means(later) + j, load(p.means(later) + j) + tanh(load(p.coefficients(later, c) + j)) * place);
}

LINPIX_FUNCTION uint8_t draw_marginal(const double* cumulative, float u0) {
  int value = 0;
  while (value < 255 && !(cumulative[value] > u0 * cumulative[255])) ++value;
  return (uint8_t)value;
}

// Draws the sub-pixels of one row's token to `pixel`, one after the other, unless they are known and there already, and
// writes their log-probabilities if these are wanted: most of the work is theirs. first: of the token's sub-pixels.
// parameters: of the token, whose means are changed in place. scratch: K floats. amid_background, compute_others: see
// finish_categorical.
template <class Compute>
LINPIX_FUNCTION void draw_token(const Model& m, const Rows& rows, int row, int64_t first, uint8_t* pixel,
                                float* log_probs, float* parameters, float* scratch, bool amid_background,
                                Compute compute_others) {
  const int size = m.token_size;
  const bool known = rows.known[rows.slots[row] * m.subpixels + first];
  if (m.marginal && first == 0) {
    if (!known) *pixel = draw_marginal(m.marginal, uniform(noise(rows.seeds[row], 0).word[0]));
    if (!log_probs) return;
    const double mass = m.marginal[*pixel] - (*pixel ? m.marginal[*pixel - 1] : 0);
    *log_probs = (float)natural_log(mass / m.marginal[255]);
    return;
  }
  if (m.categorical)
    return finish_categorical(m, rows, row, pixel, known, first, log_probs, parameters, scratch, amid_background,
                              compute_others);
  const Mixture p = {parameters, m.mixtures, m.head.columns, size};
  for (int group = 0; group < m.head.groups; ++group)
    if (!all_finite(parameters + group * p.stride, p.K)) rows.finite[row] = false;
  const float temperature = rows.temperatures[row];
  Words words = noise(rows.seeds[row], first);
  const int picked = known ? 0 : pick(p, uniform(words.word[0]), temperature, scratch);
  if (log_probs) normalise(p.logits(), scratch, p.K);  // log-probability of each component, given the sub-pixels so far
  for (int c = 0; c < size; ++c) {
    if (c) words = noise(rows.seeds[row], first + c);
    if (!known)
      pixel[c] = draw(p.means(c)[picked], p.log_scales(c)[picked], uniform(words.word[1]), temperature, m.elu_scale);
    if (log_probs) {
      add_log_probabilities(p, c, pixel[c], scratch);
      log_probs[c] = normalise(scratch, scratch, p.K);
    }
    move_means(p, c, pixel[c]);
  }
}

// The same for the token of this step, to the row's image and log-probabilities.
template <class Compute>
LINPIX_FUNCTION void finish_token(const Model& m, const Rows& rows, int row, int64_t step, float* parameters,
                                  float* scratch, bool amid_background, Compute compute_others) {
  const int64_t first = (rows.positions[row] + step) * m.token_size;
  float* log_probs = rows.log_probs ? rows.log_probs + (row * rows.most_steps + step) * m.token_size : nullptr;
  draw_token(m, rows, row, first, rows.canvas + rows.slots[row] * m.subpixels + first, log_probs, parameters, scratch,
             amid_background, compute_others);
}

}  // namespace
}  // namespace linpix::LINPIX_ISA
