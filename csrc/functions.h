// exp, log and functions made of them, accurate to a few units in the last place (gelu: see there). A processor
// computes sixteen at a time (vec.h), a thread of a GPU one (cuda/lane.h).
//
// Why they are fast: they take whole vectors, without calls or branches.
#pragma once

#include "target.h"

#if defined(LINPIX_ONE_LANE)
#include "cuda/lane.h"
#else
#include "vec.h"
#endif

namespace linpix::LINPIX_ISA {

// e^x as 2^n e^r with |r| <= ln(2)/2; e^-87 below -87, e^88 above 88
LINPIX_INLINE Floats exp(Floats x) {
  x = at_most(at_least(x, -87.0f), 88.0f);
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Floats shifted = multiply_add(x, 1.44269504f, shift);
  const Floats n = shifted - shift;
  Floats r = multiply_add(n, -0.693145752f, x);
  r = multiply_add(n, -1.42860677e-6f, r);
  Floats p = 1.0f / 720;
  p = multiply_add(p, r, 1.0f / 120);
  p = multiply_add(p, r, 1.0f / 24);
  p = multiply_add(p, r, 1.0f / 6);
  p = multiply_add(p, r, 0.5f);
  p = multiply_add(p, r, 1.0f);
  p = multiply_add(p, r, 1.0f);
  return times_power(p, shifted);
}

// 2 * atanh(s), for |s| <= 1/3
LINPIX_INLINE Floats twice_atanh(Floats s) {
  const Floats s2 = s * s;
  Floats p = 2.0f / 15;
  p = multiply_add(p, s2, 2.0f / 13);
  p = multiply_add(p, s2, 2.0f / 11);
  p = multiply_add(p, s2, 2.0f / 9);
  p = multiply_add(p, s2, 2.0f / 7);
  p = multiply_add(p, s2, 2.0f / 5);
  p = multiply_add(p, s2, 2.0f / 3);
  return multiply_add(p * s2, s, 2.0f * s);
}

// ln(x), for a positive, normal x
LINPIX_INLINE Floats log(Floats x) {
  Floats m, e;
  split(x, m, e);
  const Floats s = twice_atanh((m - 1.0f) / (m + 1.0f));
  return multiply_add(e, 0.693145752f, multiply_add(e, 1.42860677e-6f, s));
}

// ln(1 + x), for 0 <= x <= 1
LINPIX_INLINE Floats log1p(Floats x) { return twice_atanh(x / (x + 2.0f)); }

// 1 - e^-x, for x >= 0; the relative error is small for small x too
LINPIX_INLINE Floats one_minus_exp(Floats x) {
  Floats p = -1.0f / 40320;
  p = multiply_add(p, x, 1.0f / 5040);
  p = multiply_add(p, x, -1.0f / 720);
  p = multiply_add(p, x, 1.0f / 120);
  p = multiply_add(p, x, -1.0f / 24);
  p = multiply_add(p, x, 1.0f / 6);
  p = multiply_add(p, x, -0.5f);
  p = multiply_add(p, x, 1.0f);
  return where_less(x, 0.5f, p * x, 1.0f - exp(-x));
}

// the relative error is small for small x too
LINPIX_INLINE Floats tanh(Floats x) {
  const Floats m = one_minus_exp(2.0f * magnitude(x)), size = m / (2.0f - m);
  return where_less(x, 0.0f, -size, size);
}

#if !defined(__CUDACC__)  // a GPU has instructions for these (cuda/lane.h)
LINPIX_INLINE Floats reciprocal(Floats x) { return Floats(1.0f) / x; }
LINPIX_INLINE Floats fast_exp(Floats x) { return exp(x); }
#endif

// x Phi(x), with erfc by Abramowitz and Stegun, 7.1.26: absolute error of erfc at most 1.5e-7
LINPIX_INLINE Floats gelu(Floats x) {
  const Floats z = magnitude(x) * 0.707106781f;
  const Floats t = reciprocal(multiply_add(z, 0.3275911f, 1.0f));
  Floats p = 1.061405429f;
  p = multiply_add(p, t, -1.453152027f);
  p = multiply_add(p, t, 1.421413741f);
  p = multiply_add(p, t, -0.284496736f);
  p = multiply_add(p, t, 0.254829592f);
  const Floats half_erfc = 0.5f * (p * t * fast_exp(-(z * z)));  // of |x| / sqrt(2)
  return x * where_less(x, 0.0f, half_erfc, Floats(1.0f) - half_erfc);
}

// the feature map elu(x) + 1
LINPIX_INLINE Floats phi(Floats x) { return where_less(0.0f, x, x + 1.0f, exp(x)); }

}  // namespace linpix::LINPIX_ISA
