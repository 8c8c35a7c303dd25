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

// What a register holds: a compiler takes operations on wider vectors apart, lane by lane.
#if defined(__AVX512F__)
constexpr long LANES = 16;
#elif defined(__AVX__)
constexpr long LANES = 8;
#else
constexpr long LANES = 4;
#endif
typedef float vf __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t vi __attribute__((vector_size(LANES * sizeof(float))));

static inline int32_t whole_numbers(float x) { return (int32_t)x; }
static inline vi whole_numbers(vf x) { return __builtin_convertvector(x, vi); }

// e^x for x within 80 of 0 (beyond, e^80 or e^-80), relative error below 2e-7: x = n ln 2 + r, a polynomial of r (Cephes),
// then 2^n by its exponent bits. With wider bounds products with the bounds' values, which compilers compute for all lanes,
// would be denormal and take hundreds of cycles. V: float or vf.
template <class V>
static inline V exponential(V x) {
  const V most = V{} + 80.0f;
  x = x < -most ? -most : x > most ? most : x;
  const V n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V y = V{} + 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const auto bits = (whole_numbers(n) + 127) << 23;
  V scale;
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
