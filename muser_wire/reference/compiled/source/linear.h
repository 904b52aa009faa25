// Linear layers: exact integer dot products of a group, combined in one order of float32 steps.
#pragma once

#include <algorithm>
#include <vector>

#include "rows.h"

constexpr int COLUMNS = 32, VECTORS = COLUMNS / WIDTH;
constexpr int64_t BLOCK_ROWS = 252;

// Outputs [rows, outputs] of x [rows, inputs]. Weights are in panels of 32 outputs, the last one filled with zeros:
// int8 [panels][inputs / 2][32][2], scales and offsets [panels][groups][32], groups of 32 or 16 inputs; no offsets: null.
// Row r of the result goes to to + r * stride, added to `residual` (same stride) where there is one.
struct Linear {
  const int16_t* values;
  const float* scales;
  const float* sums;
  const int8_t* weights;
  const float* weight_scales;
  const float* offsets;
  const float* residual;
  float* to;
  int64_t rows, outputs, inputs, stride;
  int32_t group;
};

// One panel. Few rows read its int8 as they are; for many they are widened to int16 once.
template <class W>
struct Panel {
  const W* weights;
  const float* scales;
  const float* offsets;
  int64_t first_output;
};

INLINE vi weight_pairs(const int16_t* from) { return load<vi>(from); }
INLINE vi weight_pairs(const int8_t* from) {
  typedef int8_t narrow __attribute__((vector_size(2 * WIDTH)));
  typedef int16_t wide __attribute__((vector_size(4 * WIDTH)));
  return (vi)__builtin_convertvector(load<narrow>(from), wide);
}

template <int ROWS>
INLINE void put(const Linear& a, int64_t first_output, int64_t row, const vf (&total)[ROWS][VECTORS]) {
  const int64_t count = std::min<int64_t>(COLUMNS, a.outputs - first_output);
  for (int r = 0; r < ROWS; ++r) {
    const int64_t at = (row + r) * a.stride + first_output;
    float sums[COLUMNS];
    for (int v = 0; v < VECTORS; ++v) store(sums + v * WIDTH, total[r][v]);
    for (int64_t i = 0; i < count; ++i) a.to[at + i] = a.residual ? a.residual[at + i] + sums[i] : sums[i];
  }
}

template <int ROWS, int PAIRS, bool OFFSETS, class W>
static void tile(const Linear& a, const Panel<W>& panel, int64_t row) {
  // So many sums of one dot product run side by side: one instruction need not wait for the last. They are exact.
  constexpr int CHAINS = std::max(1, 8 / (ROWS * VECTORS));
  constexpr int64_t PER_SCALE = WEIGHT_GROUP / (2 * PAIRS);
  const int64_t groups = a.inputs / (2 * PAIRS), scales_a_row = a.inputs / WEIGHT_GROUP;
  const int16_t* x = a.values + row * a.inputs;
  const W* w = panel.weights;
  vf total[ROWS][VECTORS] = {};
  for (int64_t g = 0; g < groups; ++g) {
    vi dots[CHAINS][ROWS][VECTORS] = {};
#pragma GCC unroll 16
    for (int p = 0; p < PAIRS; ++p) {
      vi weights[VECTORS];
      for (int v = 0; v < VECTORS; ++v) weights[v] = weight_pairs(w + 2 * v * WIDTH);
      w += 2 * COLUMNS;
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) {
        vi pair = pair_everywhere(x + r * a.inputs + 2 * p);
        vi(&to)[VECTORS] = dots[p % CHAINS][r];
        for (int v = 0; v < VECTORS; ++v) to[v] = dot_pairs(to[v], pair, weights[v]);
      }
    }
    x += 2 * PAIRS;
    vf s[VECTORS], m[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      s[v] = load<vf>(panel.scales + g * COLUMNS + v * WIDTH);
      if (OFFSETS) m[v] = load<vf>(panel.offsets + g * COLUMNS + v * WIDTH);
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      const int64_t at = (row + r) * scales_a_row + g / PER_SCALE;
      for (int v = 0; v < VECTORS; ++v) {
        vi dot = dots[0][r][v];
        for (int c = 1; c < CHAINS; ++c) dot = dot + dots[c][r][v];
        vf t = s[v] * (to_float(dot) * a.scales[at]);
        if (OFFSETS) t = t + m[v] * a.sums[at];
        total[r][v] = total[r][v] + t;
      }
    }
  }
  put<ROWS>(a, panel.first_output, row, total);
}

template <int PAIRS, bool OFFSETS, class W>
static void tiles(const Linear& a, const Panel<W>& panel, int64_t row, int64_t stop) {
  for (; row + ROWS_AT_ONCE <= stop; row += ROWS_AT_ONCE) tile<ROWS_AT_ONCE, PAIRS, OFFSETS>(a, panel, row);
  switch (stop - row) {
#if WIDTH == 16
    case 5: return tile<5, PAIRS, OFFSETS>(a, panel, row);
    case 4: return tile<4, PAIRS, OFFSETS>(a, panel, row);
    case 3: return tile<3, PAIRS, OFFSETS>(a, panel, row);
    case 2: return tile<2, PAIRS, OFFSETS>(a, panel, row);
#endif
    case 1: return tile<1, PAIRS, OFFSETS>(a, panel, row);
  }
}

template <class W>
static void panel_rows(const Linear& a, const Panel<W>& panel, int64_t row, int64_t stop) {
  if (a.group == WEIGHT_GROUP) {
    if (panel.offsets) tiles<16, true>(a, panel, row, stop);
    else tiles<16, false>(a, panel, row, stop);
  } else {
    // Sums are those of groups of 32, so groups of 16 have no offsets: the caller refuses them.
    tiles<8, false>(a, panel, row, stop);
  }
}

static void linear(const Linear& a, int threads) {
  const int64_t panels = (a.outputs + COLUMNS - 1) / COLUMNS;
  const int64_t blocks = std::max<int64_t>(1, (a.rows + BLOCK_ROWS - 1) / BLOCK_ROWS);
  const int64_t block = ((a.rows + blocks - 1) / blocks + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;
  const bool few = a.rows <= ROWS_AT_ONCE;
#pragma omp parallel num_threads(threads)
  {
    std::vector<vi> room(few ? 0 : a.inputs * COLUMNS / (2 * WIDTH));
    int16_t* wide = (int16_t*)room.data();
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < panels * blocks; ++task) {
      const int64_t index = task % panels, row = task / panels * block;
      const int64_t stop = std::min(a.rows, row + block), scales = index * COLUMNS * (a.inputs / a.group);
      const float *s = a.weight_scales + scales, *m = a.offsets ? a.offsets + scales : nullptr;
      const int8_t* narrow = a.weights + index * COLUMNS * a.inputs;
      if (few) {
        panel_rows(a, Panel<int8_t>{narrow, s, m, index * COLUMNS}, row, stop);
      } else if (row < stop) {
        for (int64_t i = 0; i < COLUMNS * a.inputs; ++i) wide[i] = narrow[i];
        panel_rows(a, Panel<int16_t>{wide, s, m, index * COLUMNS}, row, stop);
      }
    }
  }
}
