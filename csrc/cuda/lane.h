// Floats of one float: a thread of a GPU has one where a processor's core has sixteen (vec.h). So functions.h,
// drawing.h and token.h are the same code on both, and the host can test what a GPU runs.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define LINPIX_INLINE __device__ __forceinline__
#define LINPIX_FUNCTION __device__
#else
#define LINPIX_INLINE inline __attribute__((always_inline))
#define LINPIX_FUNCTION [[maybe_unused]]
#endif

namespace linpix::LINPIX_ISA {

constexpr int LANES = 1;

struct Floats {
  float x;
  Floats() = default;
  LINPIX_INLINE Floats(float x) : x(x) {}
};

LINPIX_INLINE Floats operator+(Floats a, Floats b) { return a.x + b.x; }
LINPIX_INLINE Floats operator-(Floats a, Floats b) { return a.x - b.x; }
LINPIX_INLINE Floats operator*(Floats a, Floats b) { return a.x * b.x; }
LINPIX_INLINE Floats operator/(Floats a, Floats b) { return a.x / b.x; }
LINPIX_INLINE Floats operator-(Floats a) { return -a.x; }

LINPIX_INLINE Floats where_less(Floats a, Floats b, Floats yes, Floats no) { return a.x < b.x ? yes : no; }
LINPIX_INLINE Floats at_least(Floats x, float low) { return x.x < low ? low : x.x; }
LINPIX_INLINE Floats at_most(Floats x, float high) { return high < x.x ? high : x.x; }

#if defined(__CUDACC__)
LINPIX_INLINE uint32_t bits_of(float x) { return __float_as_uint(x); }
LINPIX_INLINE float float_of(uint32_t bits) { return __uint_as_float(bits); }
LINPIX_INLINE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
LINPIX_INLINE float square_root(float x) { return __fsqrt_rn(x); }
LINPIX_INLINE float nearest(float x) { return rintf(x); }
LINPIX_INLINE double natural_log(double x) { return ::log(x); }
LINPIX_INLINE double natural_exp(double x) { return ::exp(x); }
#else
LINPIX_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
LINPIX_INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
LINPIX_INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LINPIX_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
LINPIX_INLINE float nearest(float x) { return __builtin_nearbyintf(x); }
LINPIX_INLINE double natural_log(double x) { return __builtin_log(x); }
LINPIX_INLINE double natural_exp(double x) { return __builtin_exp(x); }
#endif

LINPIX_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return multiply_add(a.x, b.x, c.x); }
LINPIX_INLINE Floats magnitude(Floats x) { return float_of(bits_of(x.x) & 0x7fffffff); }
LINPIX_INLINE Floats load(const float* from) { return *from; }
LINPIX_INLINE void store(float* to, Floats x) { *to = x.x; }
LINPIX_INLINE float sum(Floats x) { return x.x; }

// p * 2^n, where shifted = n + 1.5 * 2^23, so that its low bits are n
LINPIX_INLINE Floats times_power(Floats p, Floats shifted) {
  return float_of(bits_of(p.x) + (bits_of(shifted.x) << 23));
}
// x = m * 2^e with m in [sqrt(1/2), sqrt(2)), for a positive, normal x
LINPIX_INLINE void split(Floats x, Floats& m, Floats& e) {
  const int32_t bits = (int32_t)bits_of(x.x), exponent = (bits - 0x3f3504f3) >> 23;
  m = float_of((uint32_t)bits - ((uint32_t)exponent << 23));
  e = (float)exponent;
}

// bfloat16: the upper half of a float
struct bfloat16 {
  uint16_t bits;
};
// rounds to the nearest, ties to even; a NaN stays a NaN, but of other bits on a GPU
LINPIX_INLINE bfloat16 rounded(float x) {
#if defined(__CUDACC__)
  bfloat16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
  return r;
#else
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return {(uint16_t)(bits >> 16 | 0x40)};
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#endif
}
LINPIX_INLINE uint32_t rounded_pair(float x, float y) {
#if defined(__CUDACC__)
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
#else
  return rounded(x).bits | (uint32_t)rounded(y).bits << 16;
#endif
}
// Two numbers as sums of two bfloat16 each: the rounded pair, and the rest, rounded too.
LINPIX_INLINE void split_pair(float x, float y, uint32_t& pair, uint32_t& rest) {
  pair = rounded_pair(x, y);
  rest = rounded_pair(x - float_of(pair << 16), y - float_of(pair & 0xffff0000));
}
#if defined(__CUDACC__)
// 1 / x, to a unit in the last place; e^x for x of at most 0, to 2^-21. Exact division and our exp would take half of
// the time of gelu's product.
LINPIX_INLINE Floats reciprocal(Floats x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x.x));
  return r;
}
LINPIX_INLINE Floats fast_exp(Floats x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x.x * 1.44269504f));
  return r;
}
#endif
LINPIX_INLINE float to_float(bfloat16 x) { return float_of((uint32_t)x.bits << 16); }
LINPIX_INLINE void store(bfloat16* to, Floats x) { *to = rounded(x.x); }

// to_float16 rounds to the nearest, ties to even. Callers must pass it at most 65,504; more may become infinity.
struct float16 {
  uint16_t bits;
};
#if defined(__CUDACC__)
LINPIX_INLINE float16 to_float16(float x) {
  float16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
  return r;
}
LINPIX_INLINE float to_float(float16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
  return r;
}
#else
LINPIX_INLINE float16 to_float16(float x) {
  const uint16_t sign = (uint16_t)(bits_of(x) >> 16 & 0x8000);
  const float most = float_of(bits_of(x) & 0x7fffffff);
  if (!(most <= 65504.0f)) return {(uint16_t)(sign | (most >= 65520.0f ? 0x7c00 : most == most ? 0x7bff : 0x7e00))};
  // unit: a float whose last place is that of the result, so that adding it rounds, and its low bits count the places
  int exponent = (int)(bits_of(most) >> 23) - 127;
  if (exponent < -14) exponent = -14;
  const float unit = float_of((uint32_t)(exponent + 13 + 127) << 23);  // 2^(exponent - 10 + 23)
  const uint32_t places = bits_of(most + unit) - bits_of(unit);
  return {(uint16_t)(sign | (((uint32_t)(exponent + 14) << 10) + places))};
}
LINPIX_INLINE float to_float(float16 x) {
  const uint32_t exponent = x.bits >> 10 & 31, places = x.bits & 1023;
  const float sign = x.bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return float_of((x.bits & 0x8000u) << 16 | 0x7f800000 | places << 13);
  return exponent ? sign * float_of((exponent + 112) << 23 | places << 13) : sign * (float)places * 0x1p-24f;
}
#endif

}  // namespace linpix::LINPIX_ISA
