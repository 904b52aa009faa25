// Steps on one row: RMSNorm, activation, quantisation.
#pragma once

#include <algorithm>

#include "vectors.h"

// What every linear layer takes, for rows of n columns: integers, the power of two of each group of 32, and the group's
// integer sum times it.
struct Quantised {
  int16_t* values;
  float* scales;
  float* sums;
};

// values[0..n) = the integers of x[0..n) in groups; scales gets each group's power of two.
INLINE void quantise_row(const float* x, int64_t n, int64_t group, int16_t* values, float* scales) {
  for (int64_t g = 0; g * group < n; ++g) {
    const float* from = x + g * group;
    int32_t top = 0;
    for (int64_t i = 0; i < group; ++i) top = std::max(top, bits(from[i]) & 0x7fffffff);
    const int exponent = std::max(exponent_of_bits(top), SMALLEST_EXPONENT) - (INTEGER_BITS - 1);
    const float scale = power_of_two(-exponent);
    for (int64_t i = 0; i < group; ++i)
      values[g * group + i] = (int16_t)(bits(from[i] * scale + ROUNDER) - ROUNDER_BITS);
    scales[g] = power_of_two(exponent);
  }
}

// A row of activations; `n` is a multiple of 32.
INLINE void quantise_activations(const float* x, int64_t n, const Quantised& to, int64_t row) {
  int16_t* values = to.values + row * n;
  const int64_t groups = n / WEIGHT_GROUP;
  float *scales = to.scales + row * groups, *sums = to.sums + row * groups;
  quantise_row(x, n, WEIGHT_GROUP, values, scales);
  for (int64_t g = 0; g < groups; ++g) {
    int32_t total = 0;
    for (int i = 0; i < WEIGHT_GROUP; ++i) total += values[g * WEIGHT_GROUP + i];
    sums[g] = (float)total * scales[g];
  }
}

// 1 / sqrt(mean of squares + eps): squares in 64 lanes, row after row of 64, then the lanes by halving.
INLINE float inverse_rms(const float* x, int64_t n, float eps, float one_over_n) {
  constexpr int VECTORS = LANES / WIDTH;
  vf total[VECTORS] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int v = 0; v < VECTORS; ++v) {
      vf part = load<vf>(x + i + v * WIDTH);
      total[v] = total[v] + part * part;
    }
  }
  if (i < n) {
    float rest[LANES] = {};
    memcpy(rest, x + i, (n - i) * sizeof(float));
    for (int v = 0; v < VECTORS; ++v) {
      vf part = load<vf>(rest + v * WIDTH);
      total[v] = total[v] + part * part;
    }
  }
  for (int half = VECTORS / 2; half; half /= 2)
    for (int v = 0; v < half; ++v) total[v] = total[v] + total[v + half];
  const float mean = halving_sum(total[0]) * one_over_n;
  return 1.0f / std::sqrt(mean + eps);
}

// to = (x * r) * weight; without a weight x * r.
INLINE void norm_row(const float* x, const float* weight, int64_t n, float r, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    float scaled = x[i] * r;
    to[i] = weight ? scaled * weight[i] : scaled;
  }
}

INLINE vf activated(vf gate, vf up, bool gelu) {
  vf v = gate;
  if (gelu) {
    vf cubic = gate * gate;
    cubic = cubic * GELU_CUBIC;
    cubic = cubic + GELU_LINEAR;
    v = gate * cubic;
  }
  return (gate * sigmoid(v)) * up;
}

// to[0..n) = f(a[i], b[i]) lane by lane, the last lanes through zeros.
template <class F>
INLINE void by_lanes(const float* a, const float* b, int64_t n, float* to, F f) {
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) store(to + i, f(load<vf>(a + i), load<vf>(b + i)));
  if (i < n) {
    float x[WIDTH] = {}, y[WIDTH] = {};
    memcpy(x, a + i, (n - i) * sizeof(float));
    memcpy(y, b + i, (n - i) * sizeof(float));
    vf v = f(load<vf>(x), load<vf>(y));
    memcpy(to + i, &v, (n - i) * sizeof(float));
  }
}
