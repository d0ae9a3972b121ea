// Sixteen floats at a time, in whatever registers the instruction set has; bfloat16 and bytes as products take them.
//
// Kernels are written once over these types, and compiled once for each instruction set, each version in the namespace
// LINPIX_ISA. Floats is one AVX-512 register, or two or four smaller ones.
// The C++ standard library is not included here: the linker could keep a copy of one of its inline functions that was
// compiled for AVX-512, and use it on every processor. Results depend on the instruction set alone, not on what the
// compiler inlines: the build forbids contraction (-ffp-contract=off), and multiply-adds are explicit.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LINPIX_INLINE inline __attribute__((always_inline))
#define LINPIX_FUNCTION

namespace linpix::LINPIX_ISA {

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int NATIVE = 16;  // floats of one register
#elif defined(__AVX2__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif
constexpr int PARTS = LANES / NATIVE;

typedef float NativeFloats __attribute__((vector_size(4 * NATIVE)));
typedef int32_t NativeInts __attribute__((vector_size(4 * NATIVE)));
typedef int16_t NativeShorts __attribute__((vector_size(4 * NATIVE)));

// The same at any address, also where an array has another type. Copying all parts at once by memcpy would make gcc 12
// take the way through the stack, in pieces of 16 bytes, for which the following load of 32 bytes must wait.
typedef float FloatsAnywhere __attribute__((vector_size(4 * NATIVE), aligned(1), may_alias));
typedef int32_t IntsAnywhere __attribute__((vector_size(4 * NATIVE), aligned(1), may_alias));

struct Ints {
  NativeInts part[PARTS];
};

struct Floats {
  NativeFloats part[PARTS];

  Floats() = default;
  LINPIX_INLINE Floats(float x) {
    for (int i = 0; i < PARTS; ++i) part[i] = x - NativeFloats{};  // x + 0 would make -0 a 0
  }
};

#define LINPIX_EACH(expression)                                  \
  Floats result_;                                                  \
  for (int i = 0; i < PARTS; ++i) result_.part[i] = expression;  \
  return result_

LINPIX_INLINE Floats operator+(Floats a, Floats b) { LINPIX_EACH(a.part[i] + b.part[i]); }
LINPIX_INLINE Floats operator-(Floats a, Floats b) { LINPIX_EACH(a.part[i] - b.part[i]); }
LINPIX_INLINE Floats operator*(Floats a, Floats b) { LINPIX_EACH(a.part[i] * b.part[i]); }
LINPIX_INLINE Floats operator/(Floats a, Floats b) { LINPIX_EACH(a.part[i] / b.part[i]); }
LINPIX_INLINE Floats operator-(Floats a) { LINPIX_EACH(-a.part[i]); }

// a < b ? yes : no, lane by lane; a NaN in a or b chooses no
LINPIX_INLINE Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  LINPIX_EACH(a.part[i] < b.part[i] ? yes.part[i] : no.part[i]);
}
// a < b ? a : b and b < a ? a : b, lane by lane, in one instruction where there is one; a NaN in a or b chooses b
LINPIX_INLINE NativeFloats native_smaller(NativeFloats a, NativeFloats b) {
#if defined(__AVX512F__)
  return (NativeFloats)_mm512_maskz_min_ps((__mmask16)-1, (__m512)a, (__m512)b);  // _mm512_min_ps: gcc 12 warns
#elif defined(__AVX2__)
  return (NativeFloats)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
LINPIX_INLINE NativeFloats native_larger(NativeFloats a, NativeFloats b) {
#if defined(__AVX512F__)
  return (NativeFloats)_mm512_maskz_max_ps((__mmask16)-1, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (NativeFloats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return b < a ? a : b;
#endif
}
LINPIX_INLINE Floats smaller(Floats a, Floats b) { LINPIX_EACH(native_smaller(a.part[i], b.part[i])); }
LINPIX_INLINE Floats larger(Floats a, Floats b) { LINPIX_EACH(native_larger(a.part[i], b.part[i])); }
// a NaN in x stays a NaN
LINPIX_INLINE Floats at_least(Floats x, float low) { return larger(low, x); }
LINPIX_INLINE Floats at_most(Floats x, float high) { return smaller(high, x); }
LINPIX_INLINE Floats magnitude(Floats x) {
  LINPIX_EACH((NativeFloats)((NativeInts)x.part[i] & 0x7fffffff));
}

LINPIX_INLINE NativeFloats native_multiply_add(NativeFloats a, NativeFloats b, NativeFloats c) {
#if defined(__AVX512F__)
  return (NativeFloats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (NativeFloats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (NativeFloats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
// a * b + c, rounded once where the processor can
LINPIX_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  LINPIX_EACH(native_multiply_add(a.part[i], b.part[i], c.part[i]));
}

LINPIX_INLINE Floats load(const float* from) { LINPIX_EACH(((const FloatsAnywhere*)from)[i]); }
LINPIX_INLINE Ints load_bits(const void* from) {
  Ints r;
  for (int i = 0; i < PARTS; ++i) r.part[i] = ((const IntsAnywhere*)from)[i];
  return r;
}
LINPIX_INLINE void store(float* to, Floats x) {
  for (int i = 0; i < PARTS; ++i) ((FloatsAnywhere*)to)[i] = x.part[i];
}
// the first n lanes only; the others are 0
LINPIX_INLINE Floats load_some(const float* from, int n) {
  alignas(64) float lanes[LANES] = {};
  for (int i = 0; i < n; ++i) lanes[i] = from[i];
  return load(lanes);
}
LINPIX_INLINE void store_some(float* to, Floats x, int n) {
  alignas(64) float lanes[LANES];
  store(lanes, x);
  for (int i = 0; i < n; ++i) to[i] = lanes[i];
}

// p * 2^n, where shifted = n + 1.5 * 2^23, so that its low bits are n
LINPIX_INLINE Floats times_power(Floats p, Floats shifted) {
  LINPIX_EACH((NativeFloats)((NativeInts)p.part[i] + ((NativeInts)shifted.part[i] << 23)));
}
// x = m * 2^e with m in [sqrt(1/2), sqrt(2)), for a positive, normal x
LINPIX_INLINE void split(Floats x, Floats& m, Floats& e) {
  for (int i = 0; i < PARTS; ++i) {
    const NativeInts bits = (NativeInts)x.part[i], exponent = (bits - 0x3f3504f3) >> 23;
    m.part[i] = (NativeFloats)(bits - (exponent << 23));
    e.part[i] = __builtin_convertvector(exponent, NativeFloats);
  }
}

LINPIX_INLINE Floats as_floats(Floats x) { return x; }
LINPIX_INLINE Floats as_floats(Ints x) { LINPIX_EACH(__builtin_convertvector(x.part[i], NativeFloats)); }

LINPIX_INLINE float nearest(float x) { return __builtin_nearbyintf(x); }
LINPIX_INLINE double natural_log(double x) { return __builtin_log(x); }
LINPIX_INLINE double natural_exp(double x) { return __builtin_exp(x); }

LINPIX_INLINE float least_of(Floats x) {
  alignas(64) float lanes[LANES];
  store(lanes, x);
  for (int width = LANES / 2; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i + width] < lanes[i] ? lanes[i + width] : lanes[i];
  return lanes[0];
}

// In a fixed order: the upper half of the lanes is added to the lower one, until one lane is left.
LINPIX_INLINE float sum(Floats x) {
  alignas(64) float lanes[LANES];
  store(lanes, x);
  for (int width = LANES / 2; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// --- bfloat16: the upper half of a float -----------------------------------------------------------------------

struct bfloat16 {
  uint16_t bits;
};

// rounds to the nearest, ties to even; a NaN stays a NaN
LINPIX_INLINE void store(bfloat16* to, Floats x) {
#if defined(__AVX512BF16__)
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)x.part[0]);
  memcpy(to, &rounded, sizeof rounded);
#else
  alignas(64) uint32_t bits[LANES];
  memcpy(bits, &x, sizeof bits);
  for (int i = 0; i < LANES; ++i) {
    const uint32_t rounded = (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16;
    const bool nan = (bits[i] & 0x7fffffff) > 0x7f800000;
    to[i].bits = (uint16_t)(nan ? bits[i] >> 16 | 0x40 : rounded);
  }
#endif
}

// --- bytes: x is about low + step * byte ----------------------------------------------------------------------------

struct Affine {
  float low, step;
};

// The low byte of each number. gcc 12 would take a vector apart, number by number, for __builtin_convertvector.
LINPIX_INLINE void store_low_bytes(uint8_t* to, NativeInts x) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8((__mmask16)-1, (__m512i)x);  // _mm512_cvtepi32_epi8: gcc 12 warns
  memcpy(to, &bytes, sizeof bytes);
#elif defined(__AVX2__)
  const __m128i each = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(each));
  const int32_t low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
  memcpy(to, &low, sizeof low);
  memcpy(to + 4, &high, sizeof high);
#else
  for (int i = 0; i < NATIVE; ++i) to[i] = (uint8_t)x[i];
#endif
}

// A row of n numbers (a multiple of LANES) as bytes, the same on every instruction set. If one is not finite, low is
// NaN.
LINPIX_INLINE Affine quantise(const float* from, int n, uint8_t* to) {
  Floats low = load(from), high = low;
  for (int i = LANES; i < n; i += LANES) {
    low = smaller(load(from + i), low);
    high = larger(load(from + i), high);
  }
  const float least = least_of(low), span = -least_of(-high) - least;
  const float steps = 255 / span < 3e38f ? 255 / span : 3e38f;  // finite when multiplied by a span near 0
  NativeInts seen = {};
  for (int i = 0; i < n; i += LANES) {
    // to the nearest integer, which adding 1.5 * 2^23 (bits 0x4b400000) leaves in the low bits
    const Floats shifted = (load(from + i) - least) * steps + 12582912.0f;
    for (int p = 0; p < PARTS; ++p) {
      const NativeInts bits = (NativeInts)shifted.part[p];
      store_low_bytes(to + i + p * NATIVE, bits);
      seen |= bits;
    }
  }
  int32_t all = 0;
  for (int i = 0; i < NATIVE; ++i) all |= seen[i];
  return {all & 0x30000000 ? __builtin_nanf("") : least, span / 255};  // set in infinity and NaN
}

// What a matrix product multiplies at once: in each lane one float, two bfloat16 or four bytes, of neighbouring k.
// T: of the inputs. W: of the weights.
template <class T, class W = T>
struct Operand;

template <>
struct Operand<float> {
  static constexpr int K = 1;      // values of k that are stored together
  static constexpr int TURNS = 1;  // multiplications for them
  using Sum = Floats;
  Floats x;
  static LINPIX_INLINE Operand load(const float* from, int) { return {linpix::LINPIX_ISA::load(from)}; }
  static LINPIX_INLINE Operand broadcast(const float* from) { return {Floats(*from)}; }
  LINPIX_INLINE Floats times(Operand other, Floats sum) const { return multiply_add(x, other.x, sum); }
};

// Weights that bfloat16 holds exactly, in half of the bytes: the same products and sums as with those weights in float.
template <>
struct Operand<float, bfloat16> {
  static constexpr int K = 2, TURNS = 2;
  using Sum = Floats;
  Floats x;
  static LINPIX_INLINE Operand load(const bfloat16* from, int turn) {
    const NativeInts upper = (int32_t)0xffff0000 - NativeInts{};
    Operand r;
    for (int i = 0; i < PARTS; ++i) {
      const NativeInts pair = ((const IntsAnywhere*)from)[i];
      r.x.part[i] = (NativeFloats)(turn ? pair & upper : pair << 16);
    }
    return r;
  }
  static LINPIX_INLINE Operand broadcast(const float* from) { return {Floats(*from)}; }
  LINPIX_INLINE Floats times(Operand other, Floats sum) const { return multiply_add(x, other.x, sum); }
};

template <>
struct Operand<bfloat16> {
  static constexpr int K = 2, TURNS = 1;
  using Sum = Floats;
  Ints x;
  static LINPIX_INLINE Operand load(const bfloat16* from, int) { return {load_bits(from)}; }
  static LINPIX_INLINE Operand broadcast(const bfloat16* from) {
    int32_t pair;
    memcpy(&pair, from, sizeof pair);
    Operand r;
    for (int i = 0; i < PARTS; ++i) r.x.part[i] = pair - NativeInts{};
    return r;
  }
  LINPIX_INLINE Floats times(Operand other, Floats sum) const {
    Floats r;
    for (int i = 0; i < PARTS; ++i) {
#if defined(__AVX512BF16__)
      r.part[i] = (NativeFloats)_mm512_dpbf16_ps((__m512)sum.part[i], (__m512bh)x.part[i], (__m512bh)other.x.part[i]);
#else
      const NativeFloats low = (NativeFloats)(x.part[i] << 16), other_low = (NativeFloats)(other.x.part[i] << 16);
      const NativeInts mask = (int32_t)0xffff0000 - NativeInts{};
      const NativeFloats high = (NativeFloats)(x.part[i] & mask), other_high = (NativeFloats)(other.x.part[i] & mask);
      r.part[i] = native_multiply_add(high, other_high, native_multiply_add(low, other_low, sum.part[i]));
#endif
    }
    return r;
  }
};

// The sum of two neighbouring products in each lane. Exact, unless both products are -2^15 * -2^15.
LINPIX_INLINE NativeInts add_products(NativeShorts a, NativeShorts b) {
#if defined(__AVX512BW__)
  return (NativeInts)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (NativeInts)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  const NativeInts products = (NativeInts)(a * b);  // of a byte and a signed byte: fits in 16 bits
  return (products << 16 >> 16) + (products >> 16);
#endif
}

// Unsigned activations times signed weights. Sums of integers are exact, so their order does not matter.
template <>
struct Operand<uint8_t> {
  static constexpr int K = 4, TURNS = 1;
  using Sum = Ints;
  Ints x;
  static LINPIX_INLINE Operand load(const uint8_t* from, int) { return {load_bits(from)}; }
  static LINPIX_INLINE Operand broadcast(const uint8_t* from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    Operand r;
    for (int i = 0; i < PARTS; ++i) r.x.part[i] = four - NativeInts{};
    return r;
  }
  LINPIX_INLINE Ints times(Operand weights, Ints sum) const {
    for (int i = 0; i < PARTS; ++i) {
#if defined(__AVX512VNNI__)
      const auto a = (__m512i)x.part[i], w = (__m512i)weights.x.part[i];
      sum.part[i] = (NativeInts)_mm512_dpbusd_epi32((__m512i)sum.part[i], a, w);
#else  // even and odd bytes separately, as 16-bit numbers, since pmaddubsw would saturate
      const NativeShorts a = (NativeShorts)x.part[i], w = (NativeShorts)weights.x.part[i];
      sum.part[i] += add_products(a & 0xff, w << 8 >> 8) + add_products(a >> 8 & 0xff, w >> 8);
#endif
    }
    return sum;
  }
};

#undef LINPIX_EACH
}  // namespace linpix::LINPIX_ISA
