// The reference lane on a CPU: functions that Python calls with pointers. They check nothing.
#include "attention.h"
#include "heads.h"
#include "linear.h"
#include "rows.h"
#ifdef _OPENMP
#include <omp.h>
#endif

#define EXPORTED extern "C" __attribute__((visibility("default")))

// How many threads there are for work of this thread.
EXPORTED int32_t muser_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

EXPORTED void muser_linear(const Linear* a, int32_t threads) { linear(*a, threads); }
EXPORTED void muser_heads(const Heads* a, int32_t threads) { heads(*a, threads); }
EXPORTED void muser_attention(const Attention* a, int32_t threads) { attention(*a, threads); }
EXPORTED void muser_derive(const Attention* a, int64_t origin, int32_t threads) { derive(*a, origin, threads); }

// x [rows, n], n a multiple of 32, as activations; `normed`: through RMSNorm first, whose weight may be null.
EXPORTED void muser_quantise(const float* x, const float* weight, int32_t normed, float eps, float one_over_n,
                             int64_t rows, int64_t n, const Quantised* to, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room(n);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = x + row * n;
      if (normed) {
        norm_row(from, weight, n, inverse_rms(from, n, eps, one_over_n), room.data());
        from = room.data();
      }
      quantise_activations(from, n, *to, row);
    }
  }
}

// Two halves of x [rows, 2 n], gate and up, as activations of f(gate) * up; gelu in its tanh form, else silu.
EXPORTED void muser_activate(const float* x, int32_t gelu, int64_t rows, int64_t n, const Quantised* to,
                             int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room(n);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const float *gate = x + row * 2 * n, *up = gate + n;
      if (gelu) by_lanes(gate, up, n, room.data(), [](vf a, vf b) { return activated(a, b, true); });
      else by_lanes(gate, up, n, room.data(), [](vf a, vf b) { return activated(a, b, false); });
      quantise_activations(room.data(), n, *to, row);
    }
  }
}

// x [rows, n] times sigmoid(gate), gate `stride` floats from row to row, as activations.
EXPORTED void muser_gate(const float* x, const float* gate, int64_t stride, int64_t rows, int64_t n,
                         const Quantised* to, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room(n);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      by_lanes(x + row * n, gate + row * stride, n, room.data(), [](vf a, vf b) { return a * sigmoid(b); });
      quantise_activations(room.data(), n, *to, row);
    }
  }
}

// residual [rows, n] + RMSNorm(x), into `to`, which may be either.
EXPORTED void muser_add_normed(const float* residual, const float* x, const float* weight, float eps, float one_over_n,
                               int64_t rows, int64_t n, float* to, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room(n);
    float* normed = room.data();
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = x + row * n;
      norm_row(from, weight, n, inverse_rms(from, n, eps, one_over_n), normed);
      for (int64_t i = 0; i < n; ++i) to[row * n + i] = residual[row * n + i] + normed[i];
    }
  }
}
