// Values of tensors: float32 and bfloat16 in float32 arithmetic.
#pragma once
#include <cstdint>
#include <cstring>

#include <omp.h>

typedef uint16_t bf16;  // the upper half of a float

static inline float wide(float x) { return x; }
static inline float wide(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}
template <class T>
static inline T narrow(float x);
template <>
inline float narrow<float>(float x) {
  return x;
}
template <>
inline bf16 narrow<bf16>(float x) {  // to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bf16)(x != x ? 0x7fc0u : rounded);
}
template <class T>
static inline float rounded(float x) {
  return wide(narrow<T>(x));
}

// e^x for x within 80 of 0 (beyond, e^80 or e^-80), relative error below 2e-7: x = n ln 2 + r, a polynomial of r (Cephes),
// then 2^n by its exponent bits. With wider bounds products with the bounds' values, which compilers compute for all lanes,
// would be denormal and take hundreds of cycles.
static inline float exponential(float x) {
  x = x < -80.0f ? -80.0f : x > 80.0f ? 80.0f : x;
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const int32_t bits = ((int32_t)n + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return y * scale;
}
// dtype 0: float32, 1: bfloat16.
template <class F>
static inline void with_dtype(long dtype, F f) {
  dtype ? f(bf16()) : f(float());
}
#define IN(p) (const decltype(type)*)(p)
#define OUT(p) (decltype(type)*)(p)
