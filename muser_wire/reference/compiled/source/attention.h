// Causal attention over float16 planes: blocks of 64 keys anchored at position 0, exact integer dot products.
//
// Integers of 12 bits fit int16, and their dot products over 64 terms int32: an int32 rounded to float32 is what
// high * 64 + low gives elsewhere.
#pragma once

#include <algorithm>
#include <vector>

#include "rows.h"

constexpr int BLOCK_VECTORS = KEY_BLOCK / WIDTH, VECTORS_AT_ONCE = 4, WIDEST = 16;

// Keys and values as integers, by block. Per key head and block:
// keys [head_dim / 2][64][2], key_scales [groups][64], values [32][width][2], value_scales [64]. The width is the next
// multiple of 16 to head_dim. From key head to key head there are `count` blocks.
struct Integers {
  int16_t* keys;
  int16_t* values;
  float* key_scales;
  float* value_scales;
  int64_t count;
};

// Queries [tokens, query_heads, head_dim], positions applied, of positions from `start`. Planes hold the positions from
// `first`, the lowest that a query sees or an earlier one, up to the last query's: [held, kv_heads, head_dim]. The result
// has the shape of the queries. A query at p sees the key at k when 0 <= p - k < window; window 0: every k <= p. `group`
// is the head group of queries and keys. Where there are `integers`, whose first block is that of `first`, no plane is read.
struct Attention {
  const float* queries;
  const uint16_t* keys;
  const uint16_t* values;
  const Integers* integers;
  float* to;
  int64_t tokens, query_heads, kv_heads, head_dim, start, first, window, group;
  float scale;

  // Where the first block begins.
  int64_t base() const { return first / KEY_BLOCK * KEY_BLOCK; }
};

// Integers that are given, or room for those of all planes.
struct Blocks : Integers {
  int64_t groups, width;
  std::vector<vi> room;

  explicit Blocks(const Attention& a)
      : Integers(), groups(a.head_dim / a.group), width((a.head_dim + WIDEST - 1) / WIDEST * WIDEST) {
    if (a.integers) {
      (Integers&)*this = *a.integers;
      return;
    }
    count = blocks_of(a);
    const int64_t all_blocks = a.kv_heads * count;
    const int64_t nbytes = KEY_BLOCK * (2 * a.head_dim + 4 * groups + 2 * width + 4);
    room.resize(all_blocks * nbytes / sizeof(vi));
    keys = (int16_t*)room.data();
    values = keys + all_blocks * KEY_BLOCK * a.head_dim;
    key_scales = (float*)(values + all_blocks * KEY_BLOCK * width);
    value_scales = key_scales + all_blocks * groups * KEY_BLOCK;
  }

  // How many blocks the planes touch.
  static int64_t blocks_of(const Attention& a) { return (a.start + a.tokens - a.base() + KEY_BLOCK - 1) / KEY_BLOCK; }

  // The same memory, from a later block on.
  void skip(const Attention& a, int64_t blocks) {
    keys += blocks * KEY_BLOCK * a.head_dim;
    values += blocks * KEY_BLOCK * width;
    key_scales += blocks * groups * KEY_BLOCK;
    value_scales += blocks * KEY_BLOCK;
  }
};

static void derive_block(const Attention& a, const Blocks& to, int64_t kv_head, int64_t block, float* head, int16_t* q) {
  const int64_t index = kv_head * to.count + block, position = a.base() + block * KEY_BLOCK;
  int16_t* keys = to.keys + index * KEY_BLOCK * a.head_dim;
  int16_t* values = to.values + index * KEY_BLOCK * to.width;
  float* key_scales = to.key_scales + index * to.groups * KEY_BLOCK;
  std::vector<float> scales(to.groups);
  const int64_t stop = std::min<int64_t>(KEY_BLOCK, a.start + a.tokens - position);
  for (int64_t k = std::max<int64_t>(0, a.first - position); k < stop; ++k) {
    const int64_t at = ((position + k - a.first) * a.kv_heads + kv_head) * a.head_dim;
    for (int64_t i = 0; i < a.head_dim; ++i) head[i] = of_plane_bits(a.keys[at + i]);
    quantise_row(head, a.head_dim, a.group, q, scales.data());
    for (int64_t i = 0; i < a.head_dim; ++i) keys[(i / 2 * KEY_BLOCK + k) * 2 + i % 2] = q[i];
    for (int64_t g = 0; g < to.groups; ++g) key_scales[g * KEY_BLOCK + k] = scales[g];
    for (int64_t i = 0; i < a.head_dim; ++i) head[i] = of_plane_bits(a.values[at + i]);
    quantise_row(head, a.head_dim, a.head_dim, q, to.value_scales + index * KEY_BLOCK + k);
    for (int64_t i = 0; i < a.head_dim; ++i) values[(k / 2 * to.width + i) * 2 + k % 2] = q[i];
  }
}

// Some rows of one key head: row j is head j % repeats of query j / repeats.
struct Rows {
  int64_t kv_head, first, count, repeats;
  int16_t* queries;    // [ROWS_AT_ONCE][head_dim]
  float* query_scales; // [ROWS_AT_ONCE][groups]
  float* weighted;     // [ROWS_AT_ONCE][width]
  alignas(64) float scores[ROWS_AT_ONCE][KEY_BLOCK];
  alignas(64) int16_t weights[ROWS_AT_ONCE][KEY_BLOCK];
  float old[ROWS_AT_ONCE], fresh[ROWS_AT_ONCE];
  float top[ROWS_AT_ONCE], denominator[ROWS_AT_ONCE];

  int64_t query(int64_t row) const { return (first + row) / repeats; }
  int64_t head(int64_t row) const { return kv_head * repeats + (first + row) % repeats; }
};

static void take_queries(const Attention& a, const Blocks& blocks, Rows& rows) {
  memset(rows.queries, 0, ROWS_AT_ONCE * a.head_dim * sizeof(int16_t));
  std::fill_n(rows.query_scales, ROWS_AT_ONCE * blocks.groups, 0.0f);
  std::fill_n(rows.weighted, ROWS_AT_ONCE * blocks.width, 0.0f);
  for (int64_t r = 0; r < ROWS_AT_ONCE; ++r) rows.top[r] = HIDDEN_SCORE, rows.denominator[r] = 0.0f;
  for (int64_t r = 0; r < rows.count; ++r) {
    const float* x = a.queries + (rows.query(r) * a.query_heads + rows.head(r)) * a.head_dim;
    quantise_row(x, a.head_dim, a.group, rows.queries + r * a.head_dim, rows.query_scales + r * blocks.groups);
  }
}

// Scores of the block's keys [first, first + 4 WIDTH).
static void score_keys(const Attention& a, const Blocks& blocks, int64_t index, Rows& rows, int64_t first) {
  const int16_t* keys = blocks.keys + index * KEY_BLOCK * a.head_dim + 2 * first;
  const float* scales = blocks.key_scales + index * blocks.groups * KEY_BLOCK + first;
  vf total[ROWS_AT_ONCE][VECTORS_AT_ONCE] = {};
  for (int64_t g = 0; g < blocks.groups; ++g) {
    vi dots[ROWS_AT_ONCE][VECTORS_AT_ONCE] = {};
    for (int64_t p = g * a.group / 2; p < (g + 1) * a.group / 2; ++p) {
      vi k[VECTORS_AT_ONCE];
      for (int n = 0; n < VECTORS_AT_ONCE; ++n) k[n] = in_register(load<vi>(keys + (p * KEY_BLOCK + n * WIDTH) * 2));
#pragma GCC unroll 6
      for (int r = 0; r < ROWS_AT_ONCE; ++r) {
        vi pair = pair_everywhere(rows.queries + r * a.head_dim + 2 * p);
        for (int n = 0; n < VECTORS_AT_ONCE; ++n) dots[r][n] = dot_pairs(dots[r][n], pair, k[n]);
      }
    }
    for (int r = 0; r < ROWS_AT_ONCE; ++r) {
      const float query_scale = rows.query_scales[r * blocks.groups + g];
      for (int n = 0; n < VECTORS_AT_ONCE; ++n) {
        vf t = to_float(dots[r][n]) * query_scale;
        total[r][n] = total[r][n] + t * load<vf>(scales + g * KEY_BLOCK + n * WIDTH);
      }
    }
  }
  for (int r = 0; r < ROWS_AT_ONCE; ++r)
    for (int n = 0; n < VECTORS_AT_ONCE; ++n) store(rows.scores[r] + first + n * WIDTH, total[r][n] * a.scale);
}

// 2^x for whole x <= 0, 0 below -120.
INLINE float factor(float x) { return x < RESCALE_LIMIT ? 0.0f : power_of_two((int)x); }

// Turns a row's scores into integer weights; returns the power of two of their unit. `key` is the block's first position.
// A hidden key's weight is 2^-120, which both roundings make 0. Of a row that sees none of the block, all weights are 1;
// its maximum is so low that the factors take them away.
static float weigh_row(const Attention& a, const Blocks& blocks, int64_t index, int64_t key, Rows& rows, int r) {
  const int64_t at = a.start + rows.query(r);
  const vi lowest = all((int32_t)std::max<int64_t>(a.window ? at - a.window + 1 - key : 0, 0));
  const vi highest = all((int32_t)std::min<int64_t>(at - key, KEY_BLOCK - 1));
  static const int32_t NUMBERS[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vi lane = load<vi>(NUMBERS);
  vf scores[BLOCK_VECTORS], largest_score = all(HIDDEN_SCORE);
  for (int n = 0; n < BLOCK_VECTORS; ++n) {
    const vi k = lane + n * WIDTH;
    scores[n] = ((k >= lowest) & (k <= highest)) ? load<vf>(rows.scores[r] + n * WIDTH) : all(HIDDEN_SCORE);
    largest_score = maximum(largest_score, scores[n]);
  }
  const float top = std::floor(largest(largest_score)) + 1.0f;
  vi share = {}, largest_bits = {};
  for (int n = 0; n < BLOCK_VECTORS; ++n) {
    const vf p = exp2_of(scores[n] - top);
    share = share + rint_int(p * (float)(1 << DENOMINATOR_BITS));
    scores[n] = p * load<vf>(blocks.value_scales + index * KEY_BLOCK + n * WIDTH);
    largest_bits = maximum(largest_bits, bits(scores[n]));
  }
  const int exponent =
      std::max(exponent_of_bits(largest(largest_bits)), SMALLEST_PRODUCT_EXPONENT) - (INTEGER_BITS - 1);
  const float scale = power_of_two(-exponent);
  for (int n = 0; n < BLOCK_VECTORS; ++n)
    store(rows.weights[r] + n * WIDTH,
          __builtin_convertvector(rint_int(scores[n] * scale), int16_t __attribute__((vector_size(2 * WIDTH)))));
  const float running_top = std::max(rows.top[r], top);
  rows.old[r] = factor(rows.top[r] - running_top), rows.fresh[r] = factor(top - running_top);
  rows.top[r] = running_top;
  const float denominator = (float)sum(share) * (1.0f / (1 << DENOMINATOR_BITS));
  rows.denominator[r] = rows.denominator[r] * rows.old[r] + denominator * rows.fresh[r];
  return power_of_two(exponent);
}

// Adds a block's weighted values to components [first, first + N WIDTH) of each row.
template <int N>
static void add_values(const Blocks& blocks, int64_t index, const float* units, Rows& rows, int64_t first) {
  const int16_t* values = blocks.values + index * KEY_BLOCK * blocks.width + 2 * first;
  vi dots[ROWS_AT_ONCE][N] = {};
  for (int k = 0; k < KEY_BLOCK / 2; ++k) {
    vi v[N];
    for (int n = 0; n < N; ++n) v[n] = in_register(load<vi>(values + (k * blocks.width + n * WIDTH) * 2));
#pragma GCC unroll 6
    for (int r = 0; r < ROWS_AT_ONCE; ++r) {
      vi pair = pair_everywhere(rows.weights[r] + 2 * k);
      for (int n = 0; n < N; ++n) dots[r][n] = dot_pairs(dots[r][n], pair, v[n]);
    }
  }
  for (int r = 0; r < rows.count; ++r) {
    float* to = rows.weighted + r * blocks.width + first;
    for (int n = 0; n < N; ++n) {
      vf block = to_float(dots[r][n]) * units[r];
      store(to + n * WIDTH, load<vf>(to + n * WIDTH) * rows.old[r] + block * rows.fresh[r]);
    }
  }
}

static void attend_block(const Attention& a, const Blocks& blocks, int64_t block, Rows& rows) {
  const int64_t index = rows.kv_head * blocks.count + block;
  for (int64_t first = 0; first < KEY_BLOCK; first += VECTORS_AT_ONCE * WIDTH) score_keys(a, blocks, index, rows, first);
  float units[ROWS_AT_ONCE];
  for (int r = 0; r < rows.count; ++r) units[r] = weigh_row(a, blocks, index, a.base() + block * KEY_BLOCK, rows, r);
  int64_t first = 0;
  for (; first + VECTORS_AT_ONCE * WIDTH <= blocks.width; first += VECTORS_AT_ONCE * WIDTH)
    add_values<VECTORS_AT_ONCE>(blocks, index, units, rows, first);
  switch ((blocks.width - first) / WIDTH) {
    case 3: return add_values<3>(blocks, index, units, rows, first);
    case 2: return add_values<2>(blocks, index, units, rows, first);
    case 1: return add_values<1>(blocks, index, units, rows, first);
  }
}

static void attend_rows(const Attention& a, const Blocks& blocks, Rows& rows) {
  take_queries(a, blocks, rows);
  const int64_t low = a.window ? std::max(a.start + rows.query(0) - a.window + 1, a.first) : a.first;
  const int64_t high = a.start + rows.query(rows.count - 1);
  for (int64_t block = (low - a.base()) / KEY_BLOCK; block <= (high - a.base()) / KEY_BLOCK; ++block)
    attend_block(a, blocks, block, rows);
  for (int64_t r = 0; r < rows.count; ++r) {
    float* to = a.to + (rows.query(r) * a.query_heads + rows.head(r)) * a.head_dim;
    const float inverse = 1.0f / rows.denominator[r];
    for (int64_t i = 0; i < a.head_dim; ++i) to[i] = rows.weighted[r * blocks.width + i] * inverse;
  }
}

// Writes what the planes' rows, of positions from `first` = `start`, come to into `integers`, whose first block is that of
// position `origin`.
static void derive(const Attention& a, int64_t origin, int threads) {
  Blocks blocks(a);
  blocks.skip(a, (a.base() - origin) / KEY_BLOCK);
  const int64_t touched = Blocks::blocks_of(a);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> head(a.head_dim);
    std::vector<int16_t> integers(a.head_dim);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < a.kv_heads * touched; ++task)
      derive_block(a, blocks, task / touched, task % touched, head.data(), integers.data());
  }
}

static void attention(const Attention& a, int threads) {
  Blocks blocks(a);
  const int64_t repeats = a.query_heads / a.kv_heads, all_rows = repeats * a.tokens;
  const int64_t tiles = (all_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> head(a.head_dim), scales(ROWS_AT_ONCE * blocks.groups);
    std::vector<int16_t> integers(a.head_dim), queries(ROWS_AT_ONCE * a.head_dim);
    std::vector<vf> weighted(ROWS_AT_ONCE * blocks.width / WIDTH);
    if (!a.integers) {
#pragma omp for schedule(static)
      for (int64_t task = 0; task < a.kv_heads * blocks.count; ++task)
        derive_block(a, blocks, task / blocks.count, task % blocks.count, head.data(), integers.data());
    }
    Rows rows;
    rows.queries = queries.data(), rows.query_scales = scales.data(), rows.weighted = (float*)weighted.data();
    rows.repeats = repeats;
    // Later rows see more keys: they go first.
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = a.kv_heads * tiles - 1; task >= 0; --task) {
      rows.kv_head = task % a.kv_heads;
      rows.first = task / a.kv_heads * ROWS_AT_ONCE;
      rows.count = std::min<int64_t>(ROWS_AT_ONCE, all_rows - rows.first);
      attend_rows(a, blocks, rows);
    }
  }
}
