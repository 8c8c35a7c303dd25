// Row-wise ops of the training engine and their gradients, each in one pass over memory; called through ctypes by rows.py.
// Letters: T tokens, D columns of a row, F half of a row, N heads, R rotary size, K experts of a token, H hidden.
#include <cmath>

#include "values.h"

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Calls f with each row, divided among threads; few values are one thread's.
template <class F>
static inline void for_rows(long count, long values, int threads, F f) {
#pragma omp parallel for schedule(static) num_threads(threads) if (count * values >= 16384)
  for (long t = 0; t < count; ++t) f(t);
}

template <class T>
static void rms_norm(const T* x, const T* weight, T* y, float* inverse, long rows, long D, long stride, float eps, int threads) {
  for_rows(rows, D, threads, [&](long t) {
    const T* xt = x + t * stride;
    T* yt = y + t * D;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long d = 0; d < D; ++d) sum += wide(xt[d]) * wide(xt[d]);
    const float factor = 1.0f / std::sqrt(sum / D + eps);
    inverse[t] = factor;
#pragma omp simd
    for (long d = 0; d < D; ++d) yt[d] = narrow<T>(rounded<T>(wide(xt[d]) * factor) * wide(weight[d]));
  });
}

// parts [threads, 2, D], zeros: each thread's sum of the weight's gradient, and that of the rows it is at, a few at a time so
// that rounding does not grow with their number.
template <class T>
static void rms_norm_grad(const T* grad, const T* x, const T* weight, const float* inverse, T* grad_x, float* parts, long rows,
                          long D, long stride, int threads) {
  constexpr long FEW = 32;
#pragma omp parallel num_threads(threads) if (rows * D >= 16384)
  {
    float *part = parts + omp_get_thread_num() * 2 * D, *few = part + D;
#pragma omp for schedule(static)
    for (long first = 0; first < rows; first += FEW) {
      std::memset(few, 0, D * sizeof(float));
      for (long t = first; t < rows && t < first + FEW; ++t) {
        const T *gt = grad + t * D, *xt = x + t * stride;
        T* out = grad_x + t * D;
        const float factor = inverse[t];
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (long d = 0; d < D; ++d) {
          const float g = wide(gt[d]), normed = wide(xt[d]) * factor;
          few[d] += g * rounded<T>(normed);
          dot += g * wide(weight[d]) * normed;
        }
        const float mean = dot / D;
#pragma omp simd
        for (long d = 0; d < D; ++d) out[d] = narrow<T>(factor * (wide(gt[d]) * wide(weight[d]) - wide(xt[d]) * factor * mean));
      }
#pragma omp simd
      for (long d = 0; d < D; ++d) part[d] += few[d];
    }
  }
}

template <class T>
static void swiglu(const T* x, T* y, long rows, long F, int threads) {
  for_rows(rows, F, threads, [&](long t) {
    const T *gate = x + t * 2 * F, *up = gate + F;
    T* yt = y + t * F;
#pragma omp simd
    for (long f = 0; f < F; ++f) {
      const float g = wide(gate[f]);
      yt[f] = narrow<T>(g * sigmoid(g) * wide(up[f]));
    }
  });
}

template <class T>
static void swiglu_grad(const T* grad, const T* x, T* grad_x, long rows, long F, int threads) {
  for_rows(rows, F, threads, [&](long t) {
    const T *gate = x + t * 2 * F, *up = gate + F, *gt = grad + t * F;
    T *grad_gate = grad_x + t * 2 * F, *grad_up = grad_gate + F;
#pragma omp simd
    for (long f = 0; f < F; ++f) {
      const float g = wide(gate[f]), s = sigmoid(g), out = wide(gt[f]);
      grad_gate[f] = narrow<T>(out * wide(up[f]) * s * (1.0f + g * (1.0f - s)));
      grad_up[f] = narrow<T>(out * g * s);
    }
  });
}

// x: strides of a token and of a head; y [T, N, R]. sign -1: the rotation back, which is the gradient.
template <class T>
static void rotary(const T* x, const float* cosine, const float* sine, T* y, long tokens, long heads, long R, long token_stride,
                   long head_stride, float sign, int threads) {
  for_rows(tokens, heads * R, threads, [&](long t) {
    const float *c = cosine + t * (R / 2), *s = sine + t * (R / 2);
    for (long n = 0; n < heads; ++n) {
      const T* from = x + t * token_stride + n * head_stride;
      T* to = y + (t * heads + n) * R;
#pragma omp simd
      for (long i = 0; i < R / 2; ++i) {
        const float a = wide(from[2 * i]), b = wide(from[2 * i + 1]), turn = sign * s[i];
        to[2 * i] = narrow<T>(a * c[i] - b * turn);
        to[2 * i + 1] = narrow<T>(a * turn + b * c[i]);
      }
    }
  });
}

// out[t] = sum over k of probs[t, k] (1 without probs) times row map[t, k].
template <class T>
static void add_rows(const T* rows, const int64_t* map, const float* probs, T* out, long tokens, long K, long H, int threads) {
  for_rows(tokens, K * H, threads, [&](long t) {
    constexpr long BLOCK = 256;
    for (long first = 0; first < H; first += BLOCK) {
      const long count = H - first < BLOCK ? H - first : BLOCK;
      float sum[BLOCK] = {};
      for (long k = 0; k < K; ++k) {
        const T* row = rows + map[t * K + k] * H + first;
        const float p = probs ? probs[t * K + k] : 1.0f;
#pragma omp simd
        for (long h = 0; h < count; ++h) sum[h] += p * wide(row[h]);
      }
      T* to = out + t * H + first;
#pragma omp simd
      for (long h = 0; h < count; ++h) to[h] = narrow<T>(sum[h]);
    }
  });
}

template <class T>
static void weighted_rows_grad(const T* grad, const T* rows, const int64_t* map, const float* probs, T* grad_rows,
                               float* grad_probs, long tokens, long K, long H, int threads) {
  for_rows(tokens, K * H, threads, [&](long t) {
    const T* gt = grad + t * H;
    for (long k = 0; k < K; ++k) {
      const T* row = rows + map[t * K + k] * H;
      T* to = grad_rows + map[t * K + k] * H;
      const float p = probs[t * K + k];
      float dot = 0;
#pragma omp simd reduction(+ : dot)
      for (long h = 0; h < H; ++h) {
        dot += wide(row[h]) * wide(gt[h]);
        to[h] = narrow<T>(p * wide(gt[h]));
      }
      grad_probs[t * K + k] = dot;
    }
  });
}

extern "C" {

void cpu_rms_norm(const void* x, const void* weight, void* y, float* inverse, long rows, long D, long stride, float eps, long dtype,
                  int threads) {
  with_dtype(dtype, [&](auto type) { rms_norm(IN(x), IN(weight), OUT(y), inverse, rows, D, stride, eps, threads); });
}

void cpu_rms_norm_grad(const void* grad, const void* x, const void* weight, const float* inverse, void* grad_x, float* parts,
                       long rows, long D, long stride, long dtype, int threads) {
  with_dtype(dtype, [&](auto type) {
    rms_norm_grad(IN(grad), IN(x), IN(weight), inverse, OUT(grad_x), parts, rows, D, stride, threads);
  });
}

void cpu_swiglu(const void* x, void* y, long rows, long F, long dtype, int threads) {
  with_dtype(dtype, [&](auto type) { swiglu(IN(x), OUT(y), rows, F, threads); });
}

void cpu_swiglu_grad(const void* grad, const void* x, void* grad_x, long rows, long F, long dtype, int threads) {
  with_dtype(dtype, [&](auto type) { swiglu_grad(IN(grad), IN(x), OUT(grad_x), rows, F, threads); });
}

void cpu_rotary(const void* x, const float* cosine, const float* sine, void* y, long tokens, long heads, long R, long token_stride,
                long head_stride, float sign, long dtype, int threads) {
  with_dtype(dtype, [&](auto type) {
    rotary(IN(x), cosine, sine, OUT(y), tokens, heads, R, token_stride, head_stride, sign, threads);
  });
}

void cpu_add_rows(const void* rows, const int64_t* map, const float* probs, void* out, long tokens, long K, long H, long dtype,
                  int threads) {
  with_dtype(dtype, [&](auto type) { add_rows(IN(rows), map, probs, OUT(out), tokens, K, H, threads); });
}

void cpu_weighted_rows_grad(const void* grad, const void* rows, const int64_t* map, const float* probs, void* grad_rows,
                            float* grad_probs, long tokens, long K, long H, long dtype, int threads) {
  with_dtype(dtype, [&](auto type) {
    weighted_rows_grad(IN(grad), IN(rows), map, probs, OUT(grad_rows), grad_probs, tokens, K, H, threads);
  });
}

}  // extern "C"
