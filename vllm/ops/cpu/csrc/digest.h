// sum_p r_p sum_qb c_qb byte_b(x_pq) mod 2^64, of model_loader/digest.py: r odd, c signed.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "rows.h"

constexpr long DIGEST_BYTES = 32768;  // along q; the sum of their products fits in 32 bits
constexpr long DIGEST_ROWS = 8192;    // p whose sums are kept at a time
constexpr long SQUARE = 64;           // p and q whose sums stay in registers
constexpr long TOGETHER = 16;      // q that are read in parallel where p is contiguous; processors prefetch as many streams

struct Factors {
  const int8_t* c;    // coefficients of the bytes along q
  const uint64_t* r;  // coefficients of the p
};

#if defined(__AVX512VNNI__)
constexpr bool HAS_DOTS = true;
typedef __m512i Partial;  // partial sums; their total is the sum
static inline Partial no_sum() { return _mm512_setzero_si512(); }
static inline Partial plus(Partial a, Partial b) { return _mm512_add_epi32(a, b); }
static inline int32_t whole(Partial a) { return _mm512_reduce_add_epi32(a); }

// Returns sum + x . c and copies x to `to`.
template <bool IS_COPIED>
static inline Partial dot(Partial sum, const uint8_t* x, const int8_t* c, long size, uint8_t* to) {
  Partial sums[4] = {sum, no_sum(), no_sum(), no_sum()};  // with one, each addition would wait for the previous one
  long i = 0;
  for (; i + 256 <= size; i += 256)
    for (long k = 0; k < 4; ++k) {
      const __m512i v = _mm512_loadu_si512(x + i + 64 * k);
      if constexpr (IS_COPIED) _mm512_storeu_si512(to + i + 64 * k, v);
      sums[k] = _mm512_dpbusd_epi32(sums[k], v, _mm512_loadu_si512(c + i + 64 * k));
    }
  for (; i < size; i += 64) {
    const __mmask64 here = size - i < 64 ? ~0ull >> (64 - (size - i)) : ~0ull;
    const __m512i v = _mm512_maskz_loadu_epi8(here, x + i);
    if constexpr (IS_COPIED) _mm512_mask_storeu_epi8(to + i, here, v);
    sums[0] = _mm512_dpbusd_epi32(sums[0], v, _mm512_maskz_loadu_epi8(here, c + i));
  }
  return plus(plus(sums[0], sums[1]), plus(sums[2], sums[3]));
}

// sums[p] += row p of x . c
static inline void dot_rows(const uint8_t* x, long stride, const int8_t* c, long rows, long size, Partial* sums) {
  for (long i = 0; i < size; i += 64) {
    const __mmask64 here = size - i < 64 ? ~0ull >> (64 - (size - i)) : ~0ull;
    const __m512i factors = _mm512_maskz_loadu_epi8(here, c + i);
    for (long p = 0; p < rows; ++p)
      sums[p] = _mm512_dpbusd_epi32(sums[p], _mm512_maskz_loadu_epi8(here, x + p * stride + i), factors);
  }
}
#else
constexpr bool HAS_DOTS = false;
typedef int32_t Partial;
static inline Partial no_sum() { return 0; }
static inline int32_t whole(Partial a) { return a; }

template <bool IS_COPIED>
static inline Partial dot(Partial sum, const uint8_t* x, const int8_t* c, long size, uint8_t* to) {
  if constexpr (IS_COPIED) std::memcpy(to, x, size);
  for (long i = 0; i < size; ++i) sum += x[i] * c[i];
  return sum;
}

static inline void dot_rows(const uint8_t* x, long stride, const int8_t* c, long rows, long size, Partial* sums) {
  for (long p = 0; p < rows; ++p) sums[p] = dot<false>(sums[p], x + p * stride, c, size, nullptr);
}
#endif

template <class U, int COLUMNS>
static inline void add_columns(const U* const* x, const int8_t* c, long n, int32_t* sums) {
  for (long p = 0; p < n; ++p) {
    int32_t sum = sums[p];
    for (int q = 0; q < COLUMNS; ++q)
      for (size_t b = 0; b < sizeof(U); ++b) sum += (uint8_t)(x[q][p] >> (8 * b)) * c[q * sizeof(U) + b];
    sums[p] = sum;
  }
}

// p contiguous: sums[p] of `n` p
template <class U>
static void add_all_columns(const uint8_t* x, long stride, const int8_t* c, long columns, long n, int32_t* sums) {
  auto column = [&](long q) { return (const U*)(x + q * stride); };
  long q = 0;
  for (; q + 4 <= columns; q += 4) {
    const U* four[] = {column(q), column(q + 1), column(q + 2), column(q + 3)};
    add_columns<U, 4>(four, c + q * sizeof(U), n, sums);
  }
  for (; q < columns; ++q) {
    const U* one[] = {column(q)};
    add_columns<U, 1>(one, c + q * sizeof(U), n, sums);
  }
}

#if defined(__AVX512VNNI__)
// The p of sums[i] of `add_square`: each quarter of vector i / 16 holds four neighbouring p.
template <class U>
static inline long place(long i) {
  constexpr long QS = 4 / sizeof(U), PS = 16 * QS;
  return i / PS * PS + i % 16 / 4 * 4 * QS + i % PS / 16 * 4 + i % 4;
}

// 64 bytes of 4 / sizeof(U) q: a product takes four bytes of a p.
template <class U>
static inline void add_quads(const uint8_t* x, long stride, __m512i c, __m512i* sums) {
  constexpr long QS = 4 / sizeof(U);
  __m512i v[QS];
  for (long q = 0; q < QS; ++q) v[q] = _mm512_loadu_si512(x + q * stride);
  if constexpr (QS == 2) {
    const __m512i low = _mm512_unpacklo_epi16(v[0], v[1]);
    v[1] = _mm512_unpackhi_epi16(v[0], v[1]), v[0] = low;
  } else if constexpr (QS == 4) {
    const __m512i low[] = {_mm512_unpacklo_epi8(v[0], v[1]), _mm512_unpacklo_epi8(v[2], v[3])};
    const __m512i high[] = {_mm512_unpackhi_epi8(v[0], v[1]), _mm512_unpackhi_epi8(v[2], v[3])};
    v[0] = _mm512_unpacklo_epi16(low[0], low[1]), v[1] = _mm512_unpackhi_epi16(low[0], low[1]);
    v[2] = _mm512_unpacklo_epi16(high[0], high[1]), v[3] = _mm512_unpackhi_epi16(high[0], high[1]);
  }
  for (long i = 0; i < QS; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], v[i], c);
}

// Adds SQUARE p and whole groups of q; sums[i] belongs to p = place(i).
template <class U>
static inline void add_square(const uint8_t* x, long stride, const int8_t* c, long columns, int32_t* sums) {
  constexpr long QS = 4 / sizeof(U), PS = 16 * QS;
  __m512i even[4], odd[4];
  for (long i = 0; i < 4; ++i) even[i] = _mm512_loadu_si512(sums + 16 * i), odd[i] = _mm512_setzero_si512();
  auto add_group = [&](long q, __m512i* to) {
    int32_t four;
    std::memcpy(&four, c + q * sizeof(U), 4);
    for (long p = 0; p < SQUARE; p += PS)
      add_quads<U>(x + q * stride + p * sizeof(U), stride, _mm512_set1_epi32(four), to + p / 16);
  };
  long q = 0;
  for (; q + 2 * QS <= columns; q += 2 * QS) add_group(q, even), add_group(q + QS, odd);
  if (q < columns) add_group(q, even);
  for (long i = 0; i < 4; ++i) _mm512_storeu_si512(sums + 16 * i, _mm512_add_epi32(even[i], odd[i]));
}
#else
template <class U>
static inline long place(long i) { return i; }

template <class U>
static inline void add_square(const uint8_t*, long, const int8_t*, long, int32_t*) {}
#endif

// Sums over at most DIGEST_BYTES along q, for at most DIGEST_ROWS contiguous p.
template <class U>
struct AcrossSums {
  int32_t* plain;
  int32_t* squares;  // sums of whole squares, each in the order of `place`

  static AcrossSums cleared(long n) {
    static thread_local int32_t sums[2][DIGEST_ROWS];
    for (auto& each : sums) std::memset(each, 0, n * sizeof(int32_t));
    return {sums[0], sums[1]};
  }

  void add(const uint8_t* x, long stride, const int8_t* c, long columns, long n) const {
    constexpr long QS = 4 / sizeof(U);
    const long squared = HAS_DOTS ? n / SQUARE * SQUARE : 0, quads = columns / QS * QS;
    for (long p = 0; p < squared; p += SQUARE) add_square<U>(x + p * sizeof(U), stride, c, quads, squares + p);
    if (quads < columns)
      add_all_columns<U>(x + quads * stride, stride, c + quads * sizeof(U), columns - quads, squared, plain);
    if (squared < n) add_all_columns<U>(x + squared * sizeof(U), stride, c, columns, n - squared, plain + squared);
  }

  uint64_t times(const uint64_t* r, long n) const {
    uint64_t total = 0;
    for (long p = 0; p < n; ++p) total += r[p] * (uint64_t)(int64_t)plain[p];
    const long squared = HAS_DOTS ? n / SQUARE * SQUARE : 0;
    for (long i = 0; i < squared; ++i) total += r[place<U>(i)] * (uint64_t)(int64_t)squares[i];
    return total;
  }
};

// q contiguous, `size` bytes of them
static uint64_t digest_along(const uint8_t* x, long stride, long rows, long size, Factors f) {
  uint64_t total = 0;
#pragma omp parallel for reduction(+ : total) num_threads(threads_for(rows * size / 8))
  for (long p = 0; p < rows; ++p) {
    int64_t sum = 0;
    for (long i = 0; i < size; i += DIGEST_BYTES)
      sum += whole(dot<false>(no_sum(), x + p * stride + i, f.c + i, std::min(size - i, DIGEST_BYTES), nullptr));
    total += f.r[p] * (uint64_t)sum;
  }
  return total;
}

// p contiguous; U has an element's bytes
template <class U>
static uint64_t digest_across(const uint8_t* x, long stride, long rows, long columns, Factors f) {
  constexpr long WIDTH = DIGEST_BYTES / sizeof(U);
  uint64_t total = 0;
#pragma omp parallel for reduction(+ : total) num_threads(threads_for(rows * columns * sizeof(U) / 8))
  for (long first = 0; first < rows; first += DIGEST_ROWS) {
    const long n = std::min(rows - first, DIGEST_ROWS);
    for (long start = 0; start < columns; start += WIDTH) {
      const AcrossSums<U> sums = AcrossSums<U>::cleared(n);
      const long stop = std::min(columns, start + WIDTH);
      for (long q = start; q < stop; q += TOGETHER)
        sums.add(x + q * stride + first * sizeof(U), stride, f.c + q * sizeof(U), std::min(stop - q, TOGETHER), n);
      total += sums.times(f.r + first, n);
    }
  }
  return total;
}
