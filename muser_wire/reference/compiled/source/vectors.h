// Vectors of float32 or int32 as wide as the processor's, and the reference lane's functions over them.
//
// Plain C++ with the vector extension that GCC and Clang share; intrinsics only for the dot product of int16 pairs. Must
// be compiled without contraction: every operation is rounded by itself. No result depends on the width.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#include "constants.h"

#define INLINE static inline __attribute__((always_inline))

// WIDTH lanes; a block of ROWS_AT_ONCE rows and a few vectors stays in registers.
#if defined(__AVX512F__)
#define WIDTH 16
constexpr int ROWS_AT_ONCE = 6;
#elif defined(__AVX2__)
#define WIDTH 8
constexpr int ROWS_AT_ONCE = 2;
#else
#define WIDTH 4
constexpr int ROWS_AT_ONCE = 2;
#endif
typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));

template <class V, class T>
INLINE V load(const T* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V, class T>
INLINE void store(T* to, V v) {
  memcpy(to, &v, sizeof v);
}

INLINE vf all(float x) { return vf{} + x; }
INLINE vi all(int32_t x) { return vi{} + x; }
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vf from_bits(vi v) { return (vf)v; }
INLINE vi bits(vf v) { return (vi)v; }
INLINE vf maximum(vf a, vf b) { return a > b ? a : b; }
INLINE vf minimum(vf a, vf b) { return a < b ? a : b; }
INLINE vi maximum(vi a, vi b) { return a > b ? a : b; }

INLINE float from_bits(int32_t v) {
  float x;
  memcpy(&x, &v, sizeof x);
  return x;
}

INLINE int32_t bits(float x) {
  int32_t v;
  memcpy(&v, &x, sizeof v);
  return v;
}

INLINE int exponent_of_bits(int32_t magnitude) { return (magnitude >> 23) - 127; }
INLINE float power_of_two(int exponent) { return from_bits((exponent + 127) << 23); }

// Whole numbers, halves to even, of |x| < 2^22: the sum with 1.5 * 2^23 has no bits for fractions.
constexpr float ROUNDER = 12582912.0f;
constexpr int32_t ROUNDER_BITS = 0x4b400000;
INLINE vi rint_int(vf x) { return bits(x + ROUNDER) - ROUNDER_BITS; }

#if WIDTH == 16 && (defined(__clang__) || __GNUC__ >= 12)
#define FOLD(v, a, b, c, d, e, f, g, h) \
  __builtin_shufflevector(v, v, a, b, c, d, e, f, g, h, a, b, c, d, e, f, g, h)
template <class V, class F>
INLINE V fold(V v, F join) {
  v = join(v, FOLD(v, 8, 9, 10, 11, 12, 13, 14, 15));
  v = join(v, FOLD(v, 4, 5, 6, 7, 4, 5, 6, 7));
  v = join(v, FOLD(v, 2, 3, 2, 3, 2, 3, 2, 3));
  return join(v, FOLD(v, 1, 1, 1, 1, 1, 1, 1, 1));
}
#else
template <class V, class F>
INLINE V fold(V v, F join) {
  for (int half = WIDTH / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = join(v[i], v[i + half]);
  return v;
}
#endif
// Of maxima and of integer sums, for which any order is right.
INLINE int32_t largest(vi v) { return fold(v, [](auto a, auto b) { return a > b ? a : b; })[0]; }
INLINE float largest(vf v) { return fold(v, [](auto a, auto b) { return a > b ? a : b; })[0]; }
INLINE int32_t sum(vi v) { return fold(v, [](auto a, auto b) { return a + b; })[0]; }
// In the lane's order: the second half is added to the first until one is left.
INLINE float halving_sum(vf v) { return fold(v, [](auto a, auto b) { return a + b; })[0]; }

// acc + low * low + high * high of the two int16 in each lane of a and b: exact.
INLINE vi dot_pairs(vi acc, vi a, vi b) {
#if WIDTH == 16 && defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif WIDTH == 16 && defined(__AVX512BW__)
  return acc + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif WIDTH == 8 && defined(__AVXVNNI__)
  return (vi)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#elif WIDTH == 8
  return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif WIDTH == 4 && defined(__SSE2__)
  return acc + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif WIDTH == 4 && defined(__aarch64__)
  int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return acc + (vi)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  return acc + (a >> 16) * (b >> 16) + ((a << 16) >> 16) * ((b << 16) >> 16);
#endif
}

// The same value, in a register from here on: else each use may load it from memory again.
INLINE vi in_register(vi v) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(v));
#endif
  return v;
}

INLINE vi pair_everywhere(const int16_t* two) {
  int32_t pair;
  memcpy(&pair, two, sizeof pair);
  return all(pair);
}

// 2^x within [-120, 120]; beyond, 2^-120 and 2^120.
INLINE vf exp2_of(vf x) {
  vf y = minimum(maximum(x, all(-EXP2_LIMIT)), all(EXP2_LIMIT));
  vi n = rint_int(y);
  vf r = y - to_float(n);
  vf p = r * EXP2_COEFFICIENTS[0];
  for (int i = 1; i + 1 < EXP2_TERMS; ++i) {
    p = p + EXP2_COEFFICIENTS[i];
    p = p * r;
  }
  p = p + EXP2_COEFFICIENTS[EXP2_TERMS - 1];
  return from_bits(bits(p) + (n << 23));
}

INLINE vf sigmoid(vf x) { return 1.0f / (exp2_of(x * -LOG2_E) + 1.0f); }

// Float16 bits of float32 keys and values: no subnormals, no negative zero, no infinity.
INLINE uint16_t plane_bits(float x) {
  int32_t v = bits(x), magnitude = v & 0x7fffffff;
  int32_t limited = magnitude > 0x477fe000 ? 0x477fe000 : magnitude;
  int32_t rounded = ((limited + 0xfff + ((limited >> 13) & 1)) >> 13) - (112 << 10);
  return magnitude < 0x38800000 ? 0 : (uint16_t)(rounded | ((v >> 16) & 0x8000));
}

// The float32 of such bits.
INLINE float of_plane_bits(uint16_t half) {
  int32_t magnitude = half & 0x7fff, v = (magnitude << 13) + (112 << 23);
  return from_bits((magnitude ? v : 0) | ((half & 0x8000) << 16));
}
