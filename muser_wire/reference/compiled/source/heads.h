// What is done to the heads of queries, keys and values between their products and attention.
#pragma once

#include <vector>

#include "rows.h"

// Heads [rows, heads, head_dim] at `from`, `stride` floats from row to row. A head goes through RMSNorm (`normed`; the
// weight may be null), then through positions (tables [rows, half], half of the rotated components; null: none).
// `to` gets float32 or, for planes, float16 bits: [rows, heads, head_dim] contiguous.
struct Heads {
  const float* from;
  const float* weight;
  const float* cos;
  const float* sin;
  float* to;
  uint16_t* plane;
  int64_t rows, heads, head_dim, stride, half;
  int32_t normed;
  float eps, one_over_dim;
};

INLINE void rotate(const float* x, const float* cos, const float* sin, int64_t half, float* to) {
  for (int64_t i = 0; i < half; ++i) {
    float ac = x[i] * cos[i], bs = x[half + i] * sin[i], as = x[i] * sin[i], bc = x[half + i] * cos[i];
    to[i] = ac - bs;
    to[half + i] = as + bc;
  }
}

static void heads(const Heads& a, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room(2 * a.head_dim);
    float *normed = room.data(), *turned = normed + a.head_dim;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a.rows; ++row) {
      for (int64_t head = 0; head < a.heads; ++head) {
        const float* x = a.from + row * a.stride + head * a.head_dim;
        if (a.normed) {
          norm_row(x, a.weight, a.head_dim, inverse_rms(x, a.head_dim, a.eps, a.one_over_dim), normed);
          x = normed;
        }
        if (a.cos) {
          rotate(x, a.cos + row * a.half, a.sin + row * a.half, a.half, turned);
          memcpy(turned + 2 * a.half, x + 2 * a.half, (a.head_dim - 2 * a.half) * sizeof(float));
          x = turned;
        }
        const int64_t at = (row * a.heads + head) * a.head_dim;
        if (a.plane) {
          for (int64_t i = 0; i < a.head_dim; ++i) a.plane[at + i] = plane_bits(x[i]);
        } else {
          memcpy(a.to + at, x, a.head_dim * sizeof(float));
        }
      }
    }
  }
}
