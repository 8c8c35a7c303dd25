// Sixteen 32-bit lanes: a compiler vector where there are AVX-512 registers, else several smaller ones.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

typedef uint16_t bf16;  // the upper half of a float
typedef uint16_t vh __attribute__((vector_size(32)));   // 16 bf16
typedef uint16_t vhh __attribute__((vector_size(64)));  // 32 bf16
#if defined(__AVX512F__)
#include <immintrin.h>
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
static inline vf to_floats(vi v) { return __builtin_convertvector(v, vf); }
#else
#include "lanes.h"
typedef Lanes<float> vf;
typedef Lanes<int32_t> vi;
typedef Lanes<uint32_t> vu;
#define LANES_OF(a, b, ...) lanes_of<__VA_ARGS__>(a, b)
static inline vf to_floats(vi v) { return convert_lanes<float>(v); }
#endif

constexpr long LANES = 16;

static inline vf splat(float x) { return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// The halves of words of two bfloat16, as floats.
static inline vf even_of(vf pairs) { return (vf)((vu)pairs << 16); }
static inline vf odd_of(vf pairs) { return (vf)((vu)pairs & 0xffff0000u); }

template <class V>
constexpr bool is_lanes = std::is_same_v<V, vf> || std::is_same_v<V, vi> || std::is_same_v<V, vu>;
template <class V, class P>
static inline V load_bits(const P* p) {
#if !defined(__AVX512F__)
  if constexpr (is_lanes<V>) return V::load(p);
#endif
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
template <class V, class P>
static inline void store_bits(P* p, V v) {
#if !defined(__AVX512F__)
  if constexpr (is_lanes<V>) return v.store(p);
#endif
  std::memcpy(p, &v, sizeof(V));
}

#if defined(__AVX512F__)  // the compiler splits the builtin in two halves
static inline vu words_of(vh h) { return (vu)_mm512_cvtepu16_epi32((__m256i)h); }
static inline vh halves_of(vu words) { return __builtin_convertvector(words, vh); }
#else
typedef uint16_t PartOfHalves __attribute__((vector_size(REGISTER_BYTES / 2)));
static inline vu words_of(vh h) {
  PartOfHalves parts[vu::PARTS];
  std::memcpy(parts, &h, sizeof(parts));
  return vu::of_parts([&](int p) { return __builtin_convertvector(parts[p], vu::Register); });
}
static inline vh halves_of(vu words) {
  PartOfHalves parts[vu::PARTS];
  for (int p = 0; p < vu::PARTS; ++p) parts[p] = __builtin_convertvector(words.part[p], PartOfHalves);
  vh found;
  std::memcpy(&found, parts, sizeof(found));
  return found;
}
#endif
static inline vf widen(vh h) { return (vf)(words_of(h) << 16); }
static inline vu round_bits(vf v) {  // the nearest bf16 in the upper halves; the lower ones are undefined
  vu bits = (vu)v, rounded = bits + 0x7fff + ((bits >> 16) & 1);
  vi is_nan = v != v;
  return ((vu)is_nan & 0x7fc00000u) | (~(vu)is_nan & rounded);
}
#if defined(__AVX512BF16__)  // denormals become zero
static inline vh narrow(vf v) { return (vh)_mm512_cvtneps_pbh((__m512)v); }
static inline vhh narrow(vf low, vf high) { return (vhh)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
#else
static inline vh narrow(vf v) { return halves_of(round_bits(v) >> 16); }
static inline vhh narrow(vf low, vf high) {
  vh halves[2] = {narrow(low), narrow(high)};
  return load_bits<vhh>(halves);
}
#endif

static inline vf load(const float* p) { return load_bits<vf>(p); }
static inline vf load(const bf16* p) { return widen(load_bits<vh>(p)); }
static inline void store(float* p, vf v) { store_bits(p, v); }
static inline void store(bf16* p, vf v) { store_bits(p, narrow(v)); }
static inline void store_two(float* p, vf low, vf high) { store(p, low), store(p + LANES, high); }
static inline void store_two(bf16* p, vf low, vf high) { store_bits(p, narrow(low, high)); }

// The first n < LANES lanes, then zeros; of 32 bf16 the first n < 2 * LANES.
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__BMI2__)
static inline uint32_t lane_mask(long n) { return _bzhi_u32(~0u, (uint32_t)n); }
static inline vf load_part(const float* p, long n) { return (vf)_mm512_maskz_loadu_ps((__mmask16)lane_mask(n), p); }
static inline vf load_part(const bf16* p, long n) { return widen((vh)_mm256_maskz_loadu_epi16((__mmask16)lane_mask(n), p)); }
static inline vhh load_halves(const bf16* p, long n) { return (vhh)_mm512_maskz_loadu_epi16(lane_mask(n), p); }
static inline void store_part(float* p, vf v, long n) { _mm512_mask_storeu_ps(p, (__mmask16)lane_mask(n), (__m512)v); }
static inline void store_part(bf16* p, vf v, long n) { _mm256_mask_storeu_epi16(p, (__mmask16)lane_mask(n), (__m256i)narrow(v)); }
#else
template <class T>
static inline vf load_part(const T* p, long n) {
  T lanes[LANES] = {};
  std::memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}
static inline vhh load_halves(const bf16* p, long n) {
  bf16 lanes[2 * LANES] = {};
  std::memcpy(lanes, p, n * sizeof(bf16));
  return load_bits<vhh>(lanes);
}
template <class T>
static inline void store_part(T* p, vf v, long n) {
  T lanes[LANES];
  store(lanes, v);
  std::memcpy(p, lanes, n * sizeof(T));
}
#endif

template <class T>
static inline vf load_n(const T* p, long n) {  // the first n lanes, then zeros
  return n >= LANES ? load(p) : load_part(p, n);
}
template <class T>
static inline void store_n(T* p, vf v, long n) {
  n >= LANES ? store(p, v) : store_part(p, v, n);
}

static inline vf select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
#if defined(__AVX512F__)
static inline bool any(vi mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0; }
#else
static inline bool any(vi mask) {
  uint64_t halves[8], all = 0;
  std::memcpy(halves, &mask, sizeof(mask));
  for (uint64_t half : halves) all |= half;
  return all != 0;
}
#endif
#if defined(__AVX512F__)  // a comparison and a choice would become several instructions; these return b where one is NaN, too
static inline vf maximum(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
static inline vf minimum(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
static inline vf zero_where_less(vf a, vf b, vf x) {
  return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NLT_UQ), (__m512)x);
}
#else
static inline vf maximum(vf a, vf b) { return select(a > b, a, b); }
static inline vf minimum(vf a, vf b) { return select(a < b, a, b); }
static inline vf zero_where_less(vf a, vf b, vf x) { return select(a < b, vf{}, x); }
#endif

// Lane j of butterfly<S>(a, b): a[j] where bit S of j is clear, b[j ^ S] where it is set; crossed: a[j ^ S] and b[j].
template <int S>
static inline void butterfly(vf a, vf b, vf& straight, vf& crossed) {
  if constexpr (S == 1) {
    straight = LANES_OF(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    crossed = LANES_OF(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  } else if constexpr (S == 2) {
    straight = LANES_OF(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    crossed = LANES_OF(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  } else if constexpr (S == 4) {
    straight = LANES_OF(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    crossed = LANES_OF(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  } else {
    straight = LANES_OF(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    crossed = LANES_OF(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
}

template <int S>
static inline void transpose_stage(vf* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i)
    if (!(i & S)) butterfly<S>(rows[i], rows[i | S], rows[i], rows[i | S]);
}
static inline void transpose16(vf* rows) {  // rows[i][j] <-> rows[j][i]
  transpose_stage<1>(rows);
  transpose_stage<2>(rows);
  transpose_stage<4>(rows);
  transpose_stage<8>(rows);
}

template <int S>
static inline vf sum_stage(vf a, vf b) {
  vf straight, crossed;
  butterfly<S>(a, b, straight, crossed);
  return straight + crossed;
}
static inline float largest(vf v) {
  v = maximum(v, LANES_OF(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = maximum(v, LANES_OF(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = maximum(v, LANES_OF(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return v[0] > v[1] ? v[0] : v[1];
}
static inline vf row_sums(const vf* rows) {  // lane i = the sum of rows[i]
  vf half[8], quarter[4], two[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) half[i] = sum_stage<1>(rows[2 * i], rows[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) quarter[i] = sum_stage<2>(half[2 * i], half[2 * i + 1]);
  two[0] = sum_stage<4>(quarter[0], quarter[1]);
  two[1] = sum_stage<4>(quarter[2], quarter[3]);
  return sum_stage<8>(two[0], two[1]);
}
static inline float sum(vf v) {
  vf rows[LANES] = {v};
  return row_sums(rows)[0];
}

static inline vf exp(vf given) {  // about 1 unit in the last place; 0 below -87.3
  const vf x = minimum(splat(88.7f), maximum(splat(-87.3f), given));
  vf shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  vi n = (vi)shifted - 0x4b400000;
  vf r = x - (shifted - 12582912.0f) * 0.693359375f;
  r = r - (shifted - 12582912.0f) * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vf scaled = (vf)((vi)p + (n << 23));
  return zero_where_less(given, splat(-87.3f), scaled);
}

static inline vf log(vf x) {  // for positive normal numbers
  vi bits = (vi)x;
  vi exponent = ((bits >> 23) & 0xff) - 126;
  vf m = (vf)((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  vi is_low = m < splat(0.707106781186547524f);
  exponent = exponent + is_low;  // -1 where true
  m = m + select(is_low, m, vf{}) - 1.0f;
  vf e = to_floats(exponent), z = m * m;
  vf p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  vf y = p * m * z + e * -2.12194440e-4f - 0.5f * z;
  return m + y + e * 0.693359375f;
}
static inline vf silu(vf x) { return x / (exp(-x) + 1.0f); }
