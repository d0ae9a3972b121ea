// From mixture parameters to a sub-pixel and its log-probability.
#pragma once

#include "decode.h"
#include "functions.h"
#include "philox.h"

namespace linpix::LINPIX_ISA {
namespace {

struct Mixture {
  const float *logits, *means, *log_scales;
  int K;
};

LINPIX_FUNCTION bool all_finite(const float* x, int n) {
  bool finite = true;
  for (int i = 0; i < n; ++i) finite &= x[i] - x[i] == 0;
  return finite;
}

// model.mixture.draw: u0 picks the component, u1 the value.
LINPIX_FUNCTION uint8_t draw(const Mixture& p, float u0, float u1, float temperature, bool elu_scale, float* weights) {
  int best = 0;
  for (int j = 1; j < p.K; ++j)
    if (p.logits[j] > p.logits[best]) best = j;
  int picked = best;
  if (temperature > 0) {
    const Floats divisor = temperature;
    for (int j = 0; j < p.K; j += LANES) store(weights + j, exp((load(p.logits + j) - p.logits[best]) / divisor));
    float total = 0, passed = 0;
    for (int j = 0; j < p.K; ++j) total = total + weights[j];
    picked = p.K - 1;
    for (int j = 0; j < p.K; ++j) {
      passed = passed + weights[j];
      if (passed > u0 * total) {
        picked = j;
        break;
      }
    }
  }
  alignas(64) float scale[LANES], logistic[LANES];
  const float s = p.log_scales[picked];
  const Floats as_elu = Floats(phi(Floats(s))) + 0.0001f;  // elu(s) + 1.0001
  store(scale, elu_scale ? as_elu : exp(at_least(s, -7.0f)));
  store(logistic, log(u1) - log(1 - u1));
  const float x = p.means[picked] + scale[0] * temperature * logistic[0];
  const float value = (x + 1) / 2 * 255;
  if (!(value > 0)) return 0;  // NaN too: the row is reported as not finite
  return value > 255 ? 255 : (uint8_t)nearest(value);
}

// model.mixture.log_likelihood of one value; terms is scratch for K floats.
LINPIX_FUNCTION float log_probability(const Mixture& p, int value, float* terms) {
  const auto lanes = [](int j) {
    Floats r;
    alignas(64) float index[LANES];
    for (int i = 0; i < LANES; ++i) index[i] = (float)(j + i);
    r = load(index);
    return r;
  };
  const auto log_sigmoid = [](Floats a) { return at_most(a, 0.0f) - log1p(exp(-magnitude(a))); };
  const auto log_sum_exp = [&](const float* of) {
    float most = of[0];
    for (int j = 1; j < p.K; ++j) most = of[j] > most ? of[j] : most;
    Floats total = 0.0f;
    for (int j = 0; j < p.K; j += LANES)
      total = total + where_less(lanes(j), (float)p.K, exp(load(of + j) - most), 0.0f);
    return Floats(most) + log(Floats(sum(total)));
  };
  const Floats normaliser = log_sum_exp(p.logits);
  const float centre = (float)value / 127.5f - 1, half = 1.0f / 255;
  for (int j = 0; j < p.K; j += LANES) {
    const Floats inverse = exp(-at_least(load(p.log_scales + j), -7.0f));
    const Floats centred = Floats(centre) - load(p.means + j);
    Floats term = load(p.logits + j) - normaliser;
    if (value < 255) term = term + log_sigmoid((centred + half) * inverse);
    if (value > 0) term = term + log_sigmoid(-((centred - half) * inverse));
    if (value > 0 && value < 255) term = term + log(one_minus_exp(at_least(2 * half * inverse, 1.17549435e-38f)));
    store(terms + j, term);
  }
  alignas(64) float result[LANES];
  store(result, log_sum_exp(terms));
  return result[0];
}

LINPIX_FUNCTION uint8_t draw_marginal(const double* cumulative, float u0) {
  int value = 0;
  while (value < 255 && !(cumulative[value] > u0 * cumulative[255])) ++value;
  return (uint8_t)value;
}

// The sub-pixel of one row at one position: drawn, or the known one; and its log-probability.
LINPIX_FUNCTION void finish_subpixel(const Model& m, const Rows& rows, int row, int64_t step, const float* parameters,
                                     float* scratch) {
  const int64_t t = rows.positions[row] + step, slot = rows.slots[row];
  uint8_t* pixel = rows.canvas + slot * m.subpixels + t;
  const bool known = rows.known[slot * m.subpixels + t];
  const Words words = noise(rows.seeds[row], t, 0);
  const float u0 = uniform(words.word[0]), u1 = uniform(words.word[1]);
  float& log_prob = rows.log_probs[row * rows.most_steps + step];
  if (m.marginal && t == 0) {
    if (!known) *pixel = draw_marginal(m.marginal, u0);
    const double mass = m.marginal[*pixel] - (*pixel ? m.marginal[*pixel - 1] : 0);
    log_prob = (float)natural_log(mass / m.marginal[255]);
    return;
  }
  const int width = m.head.columns;
  const Mixture p = {parameters, parameters + width, parameters + 2 * width, m.mixtures};
  if (!(all_finite(p.logits, p.K) && all_finite(p.means, p.K) && all_finite(p.log_scales, p.K)))
    rows.finite[row] = false;
  if (!known) *pixel = draw(p, u0, u1, rows.temperatures[row], m.elu_scale, scratch);
  log_prob = log_probability(p, *pixel, scratch);
}

}  // namespace
}  // namespace linpix::LINPIX_ISA
