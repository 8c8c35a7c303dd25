// Sums over the logits of a token, and the gradient of its cross entropy, each in one pass over memory (a row stays in the
// caches); called through ctypes by vocab.py. Letters: T tokens, V vocabulary.
#include <cmath>

#include "values.h"

// e^x for x up to 80, 0 where it is below e^-80.
static inline float weight_of(float x) { return x < -80.0f ? 0.0f : exponential(x); }

// mean: null, or the mean of the logits under their softmax.
template <class T>
static void log_sum_exp(const T* logits, float* lse, float* mean, long rows, long V, long stride, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * V >= 16384)
  for (long t = 0; t < rows; ++t) {
    constexpr long BLOCK = 2048;  // values that are added up in float32 before they go to the sums of the row
    const T* x = logits + t * stride;
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (long v = 0; v < V; ++v) most = wide(x[v]) > most ? wide(x[v]) : most;
    double sum = 0, weighted = 0;
    for (long first = 0; first < V; first += BLOCK) {
      const long last = V < first + BLOCK ? V : first + BLOCK;
      float part = 0, part_weighted = 0;
      if (mean) {
#pragma omp simd reduction(+ : part, part_weighted)
        for (long v = first; v < last; ++v) {
          const float value = wide(x[v]), w = weight_of(value - most);
          part += w;
          part_weighted += w * value;
        }
      } else {
#pragma omp simd reduction(+ : part)
        for (long v = first; v < last; ++v) part += weight_of(wide(x[v]) - most);
      }
      sum += part;
      weighted += part_weighted;
    }
    lse[t] = std::isinf(most) ? most : (float)(most + std::log(sum));
    if (mean) mean[t] = (float)(weighted / sum);
  }
}

template <class T>
static void cross_entropy_grad(const T* logits, const float* lse, const int64_t* target, const float* grad, T* out, long rows,
                               long V, long stride, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * V >= 16384)
  for (long t = 0; t < rows; ++t) {
    const T* x = logits + t * stride;
    T* to = out + t * V;
    const float sum = lse[t], g = grad[t];
#pragma omp simd
    for (long v = 0; v < V; ++v) to[v] = narrow<T>(weight_of(wide(x[v]) - sum) * g);
    if (target[t] >= 0) to[target[t]] = narrow<T>((weight_of(wide(x[target[t]]) - sum) - 1.0f) * g);
  }
}

extern "C" {

void cpu_log_sum_exp(const void* logits, float* lse, float* mean, long rows, long V, long stride, long dtype, int threads) {
  with_dtype(dtype, [&](auto type) { log_sum_exp(IN(logits), lse, mean, rows, V, stride, threads); });
}

void cpu_cross_entropy_grad(const void* logits, const float* lse, const int64_t* target, const float* grad, void* out, long rows,
                            long V, long stride, long dtype, int threads) {
  with_dtype(dtype, [&](auto type) { cross_entropy_grad(IN(logits), lse, target, grad, OUT(out), rows, V, stride, threads); });
}

}  // extern "C"
