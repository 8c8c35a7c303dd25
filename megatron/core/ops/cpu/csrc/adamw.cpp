// One AdamW step over tensors as they are stored: each value is read and written once; called through ctypes by adamw.py.
#include <cmath>

#include "values.h"

static constexpr long BLOCK = 1024;  // elements of which a thread has all values in float32 at once

struct Stored {
  void* values;
  bool is_half;
};

static inline void load(const Stored& from, long first, long count, float* to) {
  if (from.is_half) {
    const bf16* x = (const bf16*)from.values + first;
#pragma omp simd
    for (long i = 0; i < count; ++i) to[i] = wide(x[i]);
  } else {
    std::memcpy(to, (const float*)from.values + first, count * sizeof(float));
  }
}

static inline void store(const float* from, long first, long count, const Stored& to) {
  if (to.is_half) {
    bf16* x = (bf16*)to.values + first;
#pragma omp simd
    for (long i = 0; i < count; ++i) x[i] = narrow<bf16>(from[i]);
  } else {
    std::memcpy((float*)to.values + first, from, count * sizeof(float));
  }
}

extern "C" {

// halves: which are bfloat16, the bits from the lowest on: grad, mean, square, weight (null: there is none). rate: of the mean
// over the root, step included; root: what the root is multiplied by; keep: what is left of the parameter after its decay.
void cpu_adamw(float* param, const void* grad, void* mean, void* square, void* weight, long count, long halves, float grad_scale,
               float new_mean, float old_square, float new_square, float rate, float root, float eps, float keep, long,
               int threads) {
  const Stored g{(void*)grad, (halves & 1) != 0}, m{mean, (halves & 2) != 0};
  const Stored v{square, (halves & 4) != 0}, w{weight, (halves & 8) != 0};
#pragma omp parallel for schedule(static) num_threads(threads) if (count >= 65536)
  for (long first = 0; first < count; first += BLOCK) {
    const long size = count - first < BLOCK ? count - first : BLOCK;
    float grads[BLOCK], means[BLOCK], squares[BLOCK];
    float* p = param + first;
    load(g, first, size, grads);
    load(m, first, size, means);
    load(v, first, size, squares);
#pragma omp simd
    for (long i = 0; i < size; ++i) {
      const float x = grads[i] * grad_scale;
      means[i] += new_mean * (x - means[i]);
      squares[i] = old_square * squares[i] + new_square * (x * x);
      p[i] = p[i] * keep - rate * means[i] / (std::sqrt(squares[i]) * root + eps);
    }
    store(means, first, size, m);
    store(squares, first, size, v);
    if (weight) store(p, first, size, w);
  }
}

}  // extern "C"
