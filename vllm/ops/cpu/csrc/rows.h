// Kernels that work on one row at a time: norms, rotary positions, gates, cache writes and sampling.
#pragma once
#include <cmath>

#include "linear.h"

template <class T>
static float mean_square(const T* x, long size) {
  vf total = {};
  for (long i = 0; i < size; i += LANES) {
    vf v = load_n(x + i, size - i);
    total += v * v;
  }
  return sum(total) / size;
}

template <class T>
static void norm_row(const T* x, const T* weight, long size, float eps, T* out) {
  const float factor = 1.0f / std::sqrt(mean_square(x, size) + eps);
  for (long i = 0; i < size; i += LANES)
    store_n(out + i, load_n(x + i, size - i) * factor * load_n(weight + i, size - i), size - i);
}

// Gathers the first `count` even elements of x, followed by the odd ones.
static inline void load_pairs(const bf16* x, long count, vf& even, vf& odd) { split((vu)load_words<Dot>(x, 2 * count), even, odd); }
static inline void load_pairs(const float* x, long count, vf& even, vf& odd) {
  even = load_n(x, std::min(2 * count, LANES)), odd = load_n(x + LANES, std::max(2 * count - LANES, 0L));
  out_of_order(even, odd);
}

// Rotates pairs (x[2i], x[2i + 1]) by angle i; writes all first members, then all second ones.
template <class T>
static void turn_row(const T* x, const float* cos, const float* sin, long size, T* out) {
  const long half = size / 2;
  for (long start = 0; start < half; start += LANES) {
    const long count = std::min(LANES, half - start);
    vf a, b;
    load_pairs(x + 2 * start, count, a, b);
    const vf c = load_n(cos + start, count), s = load_n(sin + start, count);
    store_n(out + start, a * c - b * s, count);
    store_n(out + half + start, b * c + a * s, count);
  }
}

template <class T>
static void rms_norm(const T* x, long stride, long tokens, long size, const T* weight, float eps, T* out) {
#pragma omp parallel for num_threads(threads_for(tokens * size))
  for (long t = 0; t < tokens; ++t) norm_row(x + t * stride, weight, size, eps, out + t * size);
}

// x += residual
template <class T>
static void add_rms_norm(T* x, const T* residual, long tokens, long size, const T* weight, float eps, T* out) {
#pragma omp parallel for num_threads(threads_for(tokens * size))
  for (long t = 0; t < tokens; ++t) {
    T* row = x + t * size;
    for (long i = 0; i < size; i += LANES)
      store_n(row + i, load_n(row + i, size - i) + load_n(residual + t * size + i, size - i), size - i);
    norm_row(row, weight, size, eps, out + t * size);
  }
}

template <class T>
static void add(const T* a, const T* b, long count, T* out) {
#pragma omp parallel for num_threads(threads_for(count))
  for (long i = 0; i < count; i += LANES) store_n(out + i, load_n(a + i, count - i) + load_n(b + i, count - i), count - i);
}

static void widen_all(const bf16* x, long count, float* out) {
#pragma omp parallel for num_threads(threads_for(count))
  for (long i = 0; i < count; i += LANES) store_n(out + i, load_n(x + i, count - i), count - i);
}

static void take_rows(const char* table, long row_bytes, const int64_t* ids, long rows, char* out) {
  for (long i = 0; i < rows; ++i) std::memcpy(out + i * row_bytes, table + ids[i] * row_bytes, row_bytes);
}

// The same from panels of pairs: `place` is the address of the matrix [.., k] plus 2, as in Weight::at.
static void take_panel_rows(const int64_t* place, long k, const int64_t* ids, long rows, uint32_t* out) {
  constexpr long PANEL_ROWS = 2 * LANES;
  const uint32_t* panels = (const uint32_t*)(*place - 2);
#pragma omp parallel for num_threads(threads_for(rows * k))
  for (long i = 0; i < rows; ++i) {
    const uint32_t* pairs = panels + ids[i] / PANEL_ROWS * PANEL_ROWS * k / 2 + ids[i] % PANEL_ROWS;
    for (long j = 0; j < k / 2; ++j) out[i * k / 2 + j] = pairs[j * PANEL_ROWS];
  }
}

template <class T>
static void silu_and_mul(const T* x, long stride, long tokens, long width, T* out) {
#pragma omp parallel for num_threads(threads_for(tokens * width))
  for (long t = 0; t < tokens; ++t)
    for (long i = 0; i < width; i += LANES)
      store_n(out + t * width + i,
              silu(load_n(x + t * stride + i, width - i)) * load_n(x + t * stride + width + i, width - i), width - i);
}

template <class T>
static void rotary(const T* x, long x_token, long x_head, long tokens, long heads, long size, const float* cos,
                   const float* sin, T* out) {
#pragma omp parallel for num_threads(threads_for(tokens * heads * size))
  for (long t = 0; t < tokens; ++t)
    for (long h = 0; h < heads; ++h)
      turn_row(x + t * x_token + h * x_head, cos + t * size, sin + t * size, size,
               out + (t * heads + h) * size);
}

template <class T>
static void write_kv(T* pages, const T* kv, long stride, long tokens, long latent, long rope, const T* weight, float eps,
                     const float* cos, const float* sin, const int64_t* slots) {
#pragma omp parallel for num_threads(threads_for(tokens * (latent + rope)))
  for (long t = 0; t < tokens; ++t) {
    T* slot = pages + slots[t] * (latent + rope);
    norm_row(kv + t * stride, weight, latent, eps, slot);
    turn_row(kv + t * stride + latent, cos + t * rope, sin + t * rope, rope, slot + latent);
  }
}

// The noise of vllm/v1/sample/rng.py, uniform u in (0, 1), then Exp(1), which is never less than u.
static inline vf uniform_noise(int32_t a, int32_t b, vi vocab_keys) {
  vu x = ((vu)vocab_keys ^ (uint32_t)a) * 747796405u;
  x ^= x >> 15;
  x = (x + (uint32_t)b) * 277803737u;
  vi bits = (vi)x ^ ((vi)x >> 15);
  vf u = (to_floats(bits) + 0.5f) * 4.656612873077393e-10f;
  return minimum(splat(1.0f - 5.9604644775390625e-08f), u);
}
static inline vf exponential_noise(vf u) {
  vf w = 1.0f - u, rounded = w - 1.0f;  // log1p(-u) = log(w) * u / (1 - w), accurate where log(w) alone is not
  vi is_tiny = rounded == vf{};
  return select(is_tiny, u, log(w) * u / select(is_tiny, splat(1.0f), rounded));
}

static inline vi load_keys(const int32_t* keys, long count) {
  if (count >= LANES) return load_bits<vi>(keys);
  int32_t lanes[LANES] = {};
  std::memcpy(lanes, keys, count * sizeof(int32_t));
  return load_bits<vi>(lanes);
}

// Samples one row: the greedy token at temperature 0, else the winner of the exponential race. A row with NaN or infinity
// gets -1 (NOT_FINITE of the contract) and NaN.
// Draws a token, or takes the one that is given (-1: none is), and writes its log-prob.
static int64_t sample_row(const float* logits, long size, float temperature, const int32_t* keys,
                          const int32_t* vocab_keys, int64_t given_token, float* logprob) {
  const float factor = temperature > 0 ? temperature : 1.0f;
  const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vf peaks = splat(-INFINITY);
  vi is_wrong = {};
  long i = 0;
  auto given = [&](long at) { return load_n(logits + at, size - at); };
  auto scaled = [&](long at) {
    vf v = given(at);
    if (factor != 1.0f) v = v / factor;  // a division takes as long as ten sums
    return at + LANES > size ? select(lanes < (int)(size - at), v, splat(-INFINITY)) : v;
  };
  for (i = 0; i < size; i += LANES) {
    is_wrong = is_wrong | (((vi)given(i) & 0x7fffffff) >= 0x7f800000);
    peaks = maximum(peaks, scaled(i));
  }
  if (any(is_wrong)) {
    *logprob = NAN;
    return -1;
  }
  const float peak = largest(peaks);
  vf total = {}, best = splat(-1.0f);
  float to_beat = 0;  // a little less than the best score; the noise of lanes below it is not finished
  vi addresses = {};
  for (i = 0; i < size; i += LANES) {
    vf p = exp(scaled(i) - peak);
    total += p;
    if (given_token >= 0) continue;
    if (temperature > 0) {
      const vf u = uniform_noise(keys[0], keys[1], load_keys(vocab_keys + i, size - i));
      if (!any(p >= u * to_beat)) continue;
      p = p / exponential_noise(u);
    }
    vi is_better = p > best;
    best = select(is_better, p, best);
    to_beat = largest(best) * 0.9999f;
    addresses = (is_better & (lanes + (int)i)) | (~is_better & addresses);
  }
  int winner = 0;
  for (int lane = 1; lane < LANES; ++lane)
    if (best[lane] > best[winner] || (best[lane] == best[winner] && addresses[lane] < addresses[winner])) winner = lane;
  const int64_t token = given_token >= 0 ? given_token : addresses[winner];
  *logprob = logits[token] / factor - (std::log(sum(total)) + peak);
  return token;
}

static void sample_rows(const float* logits, long rows, long size, const float* temperature, const int32_t* keys,
                        const int32_t* vocab_keys, int64_t* tokens, float* logprobs) {
#pragma omp parallel for num_threads(threads_for(rows * size))
  for (long b = 0; b < rows; ++b)
    tokens[b] = sample_row(logits + b * size, size, temperature[b], keys + 2 * b, vocab_keys, -1, logprobs + b);
}

// The log-probs of tokens that were drawn elsewhere, as sample_rows computes them; NaN where there is none.
static void logprob_rows(const float* logits, long rows, long size, const float* temperature, const int64_t* tokens,
                         float* logprobs) {
#pragma omp parallel for num_threads(threads_for(rows * size))
  for (long b = 0; b < rows; ++b) {
    logprobs[b] = NAN;
    if (tokens[b] >= 0) sample_row(logits + b * size, size, temperature[b], nullptr, nullptr, tokens[b], logprobs + b);
  }
}
