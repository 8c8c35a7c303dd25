// Attention of packed sequences in float32; a thread takes a head of the sequences that begin with one prompt.
// Letters: L tokens that attend to themselves and to P before them, N query heads, M heads of keys and values, D and E
// their head sizes.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "values.h"

constexpr long QUERIES = 64;  // whose scores are in memory at a time
constexpr long ROWS = LANES == 16 ? 8 : 4;  // of a product at a time, whose sums are registers

static inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
static inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof(v)); }
static inline long whole(long n) { return (n + LANES - 1) / LANES * LANES; }

// R x (COLUMNS * LANES) of c = a b, or with ADDS of c += a b; a's element (i, k) is at i * row_step + k * step.
template <bool ADDS, int R, int COLUMNS>
static inline void product_block(const float* a, long row_step, long step, const float* b, long b_row, float* c, long c_row, long K) {
  vf sum[R][COLUMNS] = {};
  if constexpr (ADDS)
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < COLUMNS; ++j) sum[i][j] = load(c + i * c_row + j * LANES);
  for (long k = 0; k < K; ++k)
    for (int j = 0; j < COLUMNS; ++j) {
      const vf right = load(b + k * b_row + j * LANES);
      for (int i = 0; i < R; ++i) sum[i][j] += a[i * row_step + k * step] * right;
    }
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < COLUMNS; ++j) store(c + i * c_row + j * LANES, sum[i][j]);
}

// The same for c [rows, columns]; columns is a multiple of LANES.
template <bool ADDS>
static inline void product(long rows, const float* a, long row_step, long step, const float* b, long b_row, float* c, long c_row,
                           long columns, long K) {
  for (long j = 0; j < columns; j += 2 * LANES) {
    const bool is_pair = columns - j > LANES;
    for (long i = 0; i < rows;) {
      const float* from = a + i * row_step;
      float* to = c + i * c_row + j;
      if (rows - i >= ROWS) {
        is_pair ? product_block<ADDS, ROWS, 2>(from, row_step, step, b + j, b_row, to, c_row, K)
                : product_block<ADDS, ROWS, 1>(from, row_step, step, b + j, b_row, to, c_row, K);
        i += ROWS;
      } else if (rows - i >= 4) {
        is_pair ? product_block<ADDS, 4, 2>(from, row_step, step, b + j, b_row, to, c_row, K)
                : product_block<ADDS, 4, 1>(from, row_step, step, b + j, b_row, to, c_row, K);
        i += 4;
      } else {
        is_pair ? product_block<ADDS, 1, 2>(from, row_step, step, b + j, b_row, to, c_row, K)
                : product_block<ADDS, 1, 1>(from, row_step, step, b + j, b_row, to, c_row, K);
        ++i;
      }
    }
  }
}

// One head of one sequence as float32 rows of a multiple of LANES, zeros at the end.
template <class T>
static inline void take(const T* x, long token_stride, long L, long D, float* rows) {
  for (long t = 0; t < L; ++t) {
    for (long d = 0; d < D; ++d) rows[t * whole(D) + d] = wide(x[t * token_stride + d]);
    for (long d = D; d < whole(D); ++d) rows[t * whole(D) + d] = 0;
  }
}
template <class T>
static inline void put(const float* rows, long L, long D, T* x, long token_stride) {
  for (long t = 0; t < L; ++t)
    for (long d = 0; d < D; ++d) x[t * token_stride + d] = narrow<T>(rows[t * whole(D) + d]);
}
// [L, D] -> the columns from P on of [D, columns_row], with zeros up to a multiple of LANES.
static inline void transpose(const float* rows, long L, long D, float* columns, long columns_row, long P) {
  for (long d = 0; d < D; ++d) {
    float* to = columns + d * columns_row + P;
    for (long t = 0; t < L; ++t) to[t] = rows[t * whole(D) + d];
    for (long t = L; t < whole(P + L) - P; ++t) to[t] = 0;
  }
}

static inline vf splat(float x) { return vf{} + x; }
// Lane i of v is lane i ^ FLIP. As constants: a loop over lanes would be run.
template <int FLIP, size_t... I>
static inline vf flipped(vf v, std::index_sequence<I...>) {
  return __builtin_shuffle(v, vi{(int32_t)(I ^ FLIP)...});
}
template <size_t... I>
static inline vi numbers_of_lanes(std::index_sequence<I...>) {
  return vi{(int32_t)I...};
}
typedef std::make_index_sequence<LANES> Lanes;
// All lanes in one, halves first.
template <int HALF = LANES / 2, class F>
static inline float over_lanes(vf v, F join) {
  v = join(v, flipped<HALF>(v, Lanes()));
  if constexpr (HALF > 1)
    return over_lanes<HALF / 2>(v, join);
  else
    return v[0];
}
static inline float sum_of(vf v) {
  return over_lanes(v, [](vf a, vf b) { return a + b; });
}
static inline float largest_of(vf v) {
  return over_lanes(v, [](vf a, vf b) { return a > b ? a : b; });
}

// The first ``seen`` scores of a row become their softmax, the rest of the row zeros. Whole registers: a compiler would take
// the last values of a row one by one, which are most of a short row's time.
static inline void soften(float* row, long seen, long size, float scale) {
  const long last = whole(seen) - LANES;
  const vf end = numbers_of_lanes(Lanes()) < (int32_t)(seen - last) ? load(row + last) : splat(-INFINITY);
  vf most = end;
  for (long j = 0; j < last; j += LANES) {
    const vf w = load(row + j);
    most = w > most ? w : most;
  }
  const float peak = largest_of(most);
  vf sums = {};
  for (long j = 0; j <= last; j += LANES) {
    const vf w = ((j < last ? load(row + j) : end) - peak) * scale;
    const vf weight = w < -80.0f ? splat(0) : exponential(w);
    sums += weight;
    store(row + j, weight);
  }
  const float share = 1.0f / sum_of(sums);
  for (long j = 0; j <= last; j += LANES) store(row + j, load(row + j) * share);
  for (long j = last + LANES; j < size; j += LANES) store(row + j, vf{});
}

// weights [count, row]: softmax(q k^T scale) of the queries from ``first`` on, with zeros where a causal query sees no key.
static void weigh(const float* q, const float* k_columns, long row, long first, long count, long P, long L, long D, float scale,
                  bool causal, float* weights) {
  for (long i = 0; i < count; i += ROWS) {
    const long rows = std::min(count - i, ROWS), end = P + (causal ? first + i + rows : L);
    product<false>(rows, q + (first + i) * whole(D), whole(D), 1, k_columns, row, weights + i * row, row, whole(end), D);
    for (long r = i; r < i + rows; ++r) soften(weights + r * row, causal ? P + first + r + 1 : end, whole(end), scale);
  }
}

// A sequence: the rows of a prompt, which it may share with sequences beside it, and those of its own tokens.
struct Span {
  int64_t prompt, prompt_end, first, end;
  long prompt_length() const { return prompt_end - prompt; }
  long length() const { return end - first; }
};

struct Shape {
  const Span* spans;
  long sequences, N, M, D, E;
  const int64_t* strides;  // of a token and of a head: q, k, v
  float scale;
  bool causal;

  long longest() const {
    long most = 0;
    for (long i = 0; i < sequences; ++i) most = std::max(most, spans[i].prompt_length() + spans[i].length());
    return most;
  }
};

// Calls f(first span, end of the spans, head of keys, memory) for the sequences of each prompt and each head.
template <class F>
static void for_heads(const Shape& s, long floats, int threads, F f) {
  std::vector<long> prompts;
  for (long i = 0; i < s.sequences; ++i)
    if (i == 0 || s.spans[i].prompt_length() == 0 || s.spans[i].prompt != s.spans[i - 1].prompt) prompts.push_back(i);
  const long count = prompts.size() * s.M;
  prompts.push_back(s.sequences);
#pragma omp parallel num_threads(threads) if (count > 1)
  {
    std::unique_ptr<float[]> memory(new float[floats]);
#pragma omp for schedule(dynamic, 4)
    for (long i = 0; i < count; ++i) f(s.spans + prompts[i / s.M], s.spans + prompts[i / s.M + 1], i % s.M, memory.get());
  }
}

template <class T>
static void attend(const T* q, const T* k, const T* v, T* out, const Shape& s, int threads) {
  const long row = whole(s.longest()), D = whole(s.D), E = whole(s.E);
  for_heads(s, row * (2 * D + 2 * E + QUERIES), threads, [&](const Span* from, const Span* to, long m, float* memory) {
    float *rows_D = memory, *columns = rows_D + row * D, *values = columns + row * D, *results = values + row * E,
          *weights = results + row * E;
    const auto part = [&](long first, long length, long P) {
      take(k + first * s.strides[2] + m * s.strides[3], s.strides[2], length, s.D, rows_D);
      transpose(rows_D, length, s.D, columns, row, P);
      take(v + first * s.strides[4] + m * s.strides[5], s.strides[4], length, s.E, values + P * E);
      for (long n = m * (s.N / s.M); n < (m + 1) * (s.N / s.M); ++n) {
        take(q + first * s.strides[0] + n * s.strides[1], s.strides[0], length, s.D, rows_D);
        for (long begin = 0; begin < length; begin += QUERIES) {
          const long count = std::min(length - begin, QUERIES);
          weigh(rows_D, columns, row, begin, count, P, length, s.D, s.scale, s.causal, weights);
          for (long i = 0; i < count; i += ROWS) {
            const long rows = std::min(count - i, ROWS), end = P + (s.causal ? begin + i + rows : length);
            product<false>(rows, weights + i * row, row, 1, values, E, results + (begin + i) * E, E, E, end);
          }
        }
        put(results, length, s.E, out + (first * s.N + n) * s.E, s.N * s.E);
      }
    };
    part(from->prompt, from->prompt_length(), 0);
    for (const Span* span = from; span < to; ++span) part(span->first, span->length(), from->prompt_length());
  });
}

template <class T>
static void attend_grad(const T* grad, const T* q, const T* k, const T* v, T* grad_q, T* grad_k, T* grad_v, const Shape& s,
                        int threads) {
  const long row = whole(s.longest()), D = whole(s.D), E = whole(s.E);
  for_heads(s, row * (5 * D + 4 * E + 2 * QUERIES), threads, [&](const Span* from, const Span* to, long m, float* memory) {
    float *keys = memory, *queries = keys + row * D, *key_columns = queries + row * D, *sum_q = key_columns + row * D,
          *sum_k = sum_q + row * D, *values = sum_k + row * D, *value_columns = values + row * E,
          *grads = value_columns + row * E, *sum_v = grads + row * E, *weights = sum_v + row * E, *scores = weights + row * QUERIES;
    const auto part = [&](long first, long length, long P) {
      take(k + first * s.strides[2] + m * s.strides[3], s.strides[2], length, s.D, keys + P * D);
      take(v + first * s.strides[4] + m * s.strides[5], s.strides[4], length, s.E, values + P * E);
      transpose(keys + P * D, length, s.D, key_columns, row, P);
      transpose(values + P * E, length, s.E, value_columns, row, P);
      std::memset(sum_k + P * D, 0, length * D * sizeof(float));
      std::memset(sum_v + P * E, 0, length * E * sizeof(float));
      for (long n = m * (s.N / s.M); n < (m + 1) * (s.N / s.M); ++n) {
        take(q + first * s.strides[0] + n * s.strides[1], s.strides[0], length, s.D, queries);
        take(grad + (first * s.N + n) * s.E, s.N * s.E, length, s.E, grads);
        for (long begin = 0; begin < length; begin += QUERIES) {
          const long count = std::min(length - begin, QUERIES);
          weigh(queries, key_columns, row, begin, count, P, length, s.D, s.scale, s.causal, weights);
          for (long i = 0; i < count; i += ROWS) {
            const long rows = std::min(count - i, ROWS), end = P + (s.causal ? begin + i + rows : length);
            product<false>(rows, grads + (begin + i) * E, E, 1, value_columns, row, scores + i * row, row, whole(end), s.E);
            for (long r = i; r < i + rows; ++r) {
              float *w = weights + r * row, *g = scores + r * row;
              vf dots = {};
              for (long j = 0; j < end; j += LANES) dots += load(w + j) * load(g + j);
              const float dot = sum_of(dots);
              for (long j = 0; j < end; j += LANES) store(g + j, load(w + j) * (load(g + j) - dot) * s.scale);
            }
            product<false>(rows, scores + i * row, row, 1, keys, D, sum_q + (begin + i) * D, D, D, end);
          }
          const auto sum_keys = [&](long key, long end, long shift) {  // the queries from j - shift on see key j
            for (long j = key; j < end; j += ROWS) {
              const long rows = std::min(end - j, ROWS), i = std::max(j - shift, 0L);
              product<true>(rows, weights + i * row + j, 1, row, grads + (begin + i) * E, E, sum_v + j * E, E, E, count - i);
              product<true>(rows, scores + i * row + j, 1, row, queries + (begin + i) * D, D, sum_k + j * D, D, D, count - i);
            }
          };
          sum_keys(0, P, P);
          sum_keys(P, P + (s.causal ? begin + count : length), s.causal ? P + begin : P + length);
        }
        put(sum_q, length, s.D, grad_q + (first * s.N + n) * s.D, s.N * s.D);
      }
    };
    const auto put_sums = [&](long first, long length, long P) {
      put(sum_k + P * D, length, s.D, grad_k + (first * s.M + m) * s.D, s.M * s.D);
      put(sum_v + P * E, length, s.E, grad_v + (first * s.M + m) * s.E, s.M * s.E);
    };
    part(from->prompt, from->prompt_length(), 0);
    for (const Span* span = from; span < to; ++span) {
      part(span->first, span->length(), from->prompt_length());
      put_sums(span->first, span->length(), from->prompt_length());
    }
    put_sums(from->prompt, from->prompt_length(), 0);
  });
}

extern "C" {

// spans [sequences, 4] is Span; sequences with one prompt lie beside each other. out, grads and gradients are contiguous.
void cpu_attention(const void* q, const void* k, const void* v, const int64_t* spans, const int64_t* strides, void* out,
                   long sequences, long N, long M, long D, long E, float scale, long causal, long dtype, int threads) {
  const Shape shape{(const Span*)spans, sequences, N, M, D, E, strides, scale, causal != 0};
  with_dtype(dtype, [&](auto type) { attend(IN(q), IN(k), IN(v), OUT(out), shape, threads); });
}

void cpu_attention_grad(const void* grad, const void* q, const void* k, const void* v, const int64_t* spans,
                        const int64_t* strides, void* grad_q, void* grad_k, void* grad_v, long sequences, long N, long M, long D,
                        long E, float scale, long causal, long dtype, int threads) {
  const Shape shape{(const Span*)spans, sequences, N, M, D, E, strides, scale, causal != 0};
  with_dtype(dtype, [&](auto type) {
    attend_grad(IN(grad), IN(q), IN(k), IN(v), OUT(grad_q), OUT(grad_k), OUT(grad_v), shape, threads);
  });
}

}  // extern "C"
