// sum_p r_p sum_qb c_qb byte_b(x_pq) mod 2^64, of model_loader/digest.py: r odd, bytes and c signed.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "rows.h"

constexpr long DIGEST_BYTES = 32768;  // along q, whose products fit in 32 bits
constexpr long COPIED_BYTES = 1024;   // before they are summed up: the sums wait for no memory that the copy does not
constexpr long DIGEST_ROWS = 8192;    // sums of p that are worked on together
constexpr long TURNED = 64;           // of p and of q, whose elements go from along to across together

struct DigestSlice {
  const int8_t* x;
  long stride, rows, columns;  // stride in bytes, rows over p, columns over q
  const int8_t* c;
  const uint64_t* r;
  const int8_t* from;  // q contiguous, copied to `to` on the way, where there is one; x is one of both, to if across
  int8_t* to;
  long from_stride, to_stride;
  bool is_summed;  // else it is only copied
};

// Of 128 more than each byte of x: processors multiply unsigned bytes by signed ones.
static inline int32_t dot_unsigned(const int8_t* x, const int8_t* c, long size) {
  int32_t sum = 0;
  long i = 0;
#if defined(__AVX512VNNI__)  // the compiler's loop has one sum, and waits for it
  __m512i sums[4] = {};
  const __m512i sign = _mm512_set1_epi8((char)0x80);
  for (; i + 256 <= size; i += 256)
    for (long k = 0; k < 4; ++k) {
      const __m512i v = _mm512_xor_si512(_mm512_loadu_si512(x + i + 64 * k), sign);
      sums[k] = _mm512_dpbusd_epi32(sums[k], v, _mm512_loadu_si512(c + i + 64 * k));
    }
  sum = _mm512_reduce_add_epi32(
      _mm512_add_epi32(_mm512_add_epi32(sums[0], sums[1]), _mm512_add_epi32(sums[2], sums[3])));
#endif
  for (; i < size; ++i) sum += (uint8_t)(x[i] ^ 0x80) * c[i];
  return sum;
}

static int64_t dot_bytes(const int8_t* x, const int8_t* c, long size) {
  int64_t sum = 0;
  for (long i = 0; i < size; i += DIGEST_BYTES) sum += dot_unsigned(x + i, c + i, std::min(size - i, DIGEST_BYTES));
  return sum;
}

static void copy_bytes(int8_t* __restrict to, const int8_t* __restrict from, long size) {
  long i = 0;
  for (; i + 64 <= size; i += 64) std::memcpy(to + i, from + i, 64);
  std::memcpy(to + i, from + i, size - i);
}

// q contiguous; what the bytes have been raised by is taken off at the end
template <int BYTES>
static uint64_t digest_along(const DigestSlice& s) {
  const long size = s.columns * BYTES, step = s.to ? COPIED_BYTES : size;
  uint64_t total = 0, sum_r = 0, sum_c = 0;
#pragma omp parallel for reduction(+ : total, sum_r) num_threads(threads_for(s.rows * size / 8))
  for (long p = 0; p < s.rows; ++p) {
    int64_t sum = 0;
    for (long i = 0; i < size; i += step) {
      const long n = std::min(step, size - i);
      if (s.to) copy_bytes(s.to + p * s.to_stride + i, s.from + p * s.from_stride + i, n);
      if (s.is_summed) sum += dot_bytes(s.x + p * s.stride + i, s.c + i, n);
    }
    total += s.r[p] * (uint64_t)sum;
    sum_r += s.r[p];
  }
  for (long i = 0; i < size; ++i) sum_c += (uint64_t)(int64_t)s.c[i];
  return total - 128 * sum_c * sum_r;
}

template <class U, int COLUMNS>
static inline void add_columns(const U* const* x, const int8_t* c, long n, int32_t* sums) {
  for (long p = 0; p < n; ++p) {
    int32_t sum = sums[p];
    for (int q = 0; q < COLUMNS; ++q)
      for (size_t b = 0; b < sizeof(U); ++b) sum += (int8_t)(x[q][p] >> (8 * b)) * c[q * sizeof(U) + b];
    sums[p] = sum;
  }
}

template <class U>
static void add_all_columns(const int8_t* x, long stride, const int8_t* c, long columns, long n, int32_t* sums) {
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
constexpr bool HAS_QUADS = true;

// The p that sums[i] is of: vector i / 16 of a group has four neighbours in each of its quarters.
template <class U>
static inline long place(long i) {
  constexpr long QS = 4 / sizeof(U), PS = 16 * QS;
  return i / PS * PS + i % 16 / 4 * 4 * QS + i % PS / 16 * 4 + i % 4;
}

// 64 bytes of 4 / sizeof(U) q: a product takes four bytes of a p.
template <class U>
static inline void add_quads(const int8_t* x, long stride, const int8_t* c, int32_t* sums) {
  constexpr long QS = 4 / sizeof(U);
  __m512i v[QS];
  for (long q = 0; q < QS; ++q)
    v[q] = _mm512_xor_si512(_mm512_loadu_si512(x + q * stride), _mm512_set1_epi8((char)0x80));
  if constexpr (QS == 2) {
    const __m512i low = _mm512_unpacklo_epi16(v[0], v[1]);
    v[1] = _mm512_unpackhi_epi16(v[0], v[1]), v[0] = low;
  } else if constexpr (QS == 4) {
    const __m512i low[] = {_mm512_unpacklo_epi8(v[0], v[1]), _mm512_unpacklo_epi8(v[2], v[3])};
    const __m512i high[] = {_mm512_unpackhi_epi8(v[0], v[1]), _mm512_unpackhi_epi8(v[2], v[3])};
    v[0] = _mm512_unpacklo_epi16(low[0], low[1]), v[1] = _mm512_unpackhi_epi16(low[0], low[1]);
    v[2] = _mm512_unpacklo_epi16(high[0], high[1]), v[3] = _mm512_unpackhi_epi16(high[0], high[1]);
  }
  int32_t four;
  std::memcpy(&four, c, 4);
  for (long i = 0; i < QS; ++i)
    _mm512_storeu_si512(
        sums + 16 * i, _mm512_dpbusd_epi32(_mm512_loadu_si512(sums + 16 * i), v[i], _mm512_set1_epi32(four)));
}

// Whole groups of p and q: sums[i] is of p = place(i).
template <class U>
static void add_grouped(const int8_t* x, long stride, const int8_t* c, long columns, long n, int32_t* sums) {
  constexpr long QS = 4 / sizeof(U), PS = 16 * QS;
  int32_t bias = 0;
  for (long i = 0; i < columns * (long)sizeof(U); ++i) bias += c[i] * 128;
  for (long p = 0; p < n; ++p) sums[p] -= bias;
  for (long q = 0; q < columns; q += QS)
    for (long p = 0; p < n; p += PS)
      add_quads<U>(x + q * stride + p * sizeof(U), stride, c + q * sizeof(U), sums + p);
}
#else
constexpr bool HAS_QUADS = false;

template <class U>
static inline long place(long i) { return i; }

template <class U>
static void add_grouped(const int8_t*, long, const int8_t*, long, long, int32_t*) {}
#endif

template <class U>
struct Vector16 {
  typedef U type __attribute__((vector_size(16 * sizeof(U))));
};

// Of two rows of a square the elements whose places differ in one bit.
template <int BIT, class V, size_t... J>
static inline void swap_halves(V& a, V& b, std::index_sequence<J...>) {
  const V first = __builtin_shufflevector(a, b, (J & BIT ? 16 + J - BIT : J)...);
  b = __builtin_shufflevector(a, b, (J & BIT ? 16 + J : J + BIT)...);
  a = first;
}

template <int BIT, class V>
static inline void swap_all(V* rows) {
  for (int i = 0; i < 16; ++i)
    if (!(i & BIT)) swap_halves<BIT>(rows[i], rows[i + BIT], std::make_index_sequence<16>());
}

// to[q][p] = from[p][q], strides in bytes
template <class U>
static inline void turn_square(int8_t* to, long to_stride, const int8_t* from, long from_stride) {
  typename Vector16<U>::type rows[16];
  for (int i = 0; i < 16; ++i) std::memcpy(&rows[i], from + i * from_stride, sizeof(rows[i]));
  swap_all<1>(rows), swap_all<2>(rows), swap_all<4>(rows), swap_all<8>(rows);
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_stride, &rows[i], sizeof(rows[i]));
}

template <class U>
static void turn(int8_t* to, long to_stride, const int8_t* from, long from_stride, long rows, long columns) {
  for (long p = 0; p < rows; p += 16)
    for (long q = 0; q < columns; q += 16) {
      int8_t* target = to + q * to_stride + p * sizeof(U);
      const int8_t* source = from + p * from_stride + q * sizeof(U);
      if (p + 16 <= rows && q + 16 <= columns) {
        turn_square<U>(target, to_stride, source, from_stride);
        continue;
      }
      for (long j = 0; j < std::min(16L, columns - q); ++j)
        for (long i = 0; i < std::min(16L, rows - p); ++i)
          std::memcpy(target + j * to_stride + i * sizeof(U), source + i * from_stride + j * sizeof(U), sizeof(U));
    }
}

// p contiguous; U has an element's bytes
template <class U>
static uint64_t digest_across(const DigestSlice& s) {
  constexpr long WIDTH = DIGEST_BYTES / sizeof(U), PS = 64 / sizeof(U), QS = 4 / sizeof(U);
  const long height = s.to ? TURNED : DIGEST_ROWS, width = s.to ? TURNED : WIDTH;
  uint64_t total = 0;
#pragma omp parallel for reduction(+ : total) num_threads(threads_for(s.rows * s.columns * sizeof(U) / 8))
  for (long first = 0; first < s.rows; first += height) {
    static thread_local int32_t sums[DIGEST_ROWS], grouped_sums[DIGEST_ROWS];
    const long n = std::min(s.rows - first, height), grouped = HAS_QUADS ? n / PS * PS : 0;
    for (long start = 0; start < s.columns; start += WIDTH) {
      const long stop = std::min(s.columns, start + WIDTH);
      std::memset(sums, 0, n * sizeof(int32_t));
      std::memset(grouped_sums, 0, grouped * sizeof(int32_t));
      for (long q = start; q < stop; q += width) {
        const long columns = std::min(width, stop - q), quads = grouped ? columns / QS * QS : 0;
        if (s.to)
          turn<U>(s.to + q * s.to_stride + first * sizeof(U), s.to_stride,
                  s.from + first * s.from_stride + q * sizeof(U), s.from_stride, n, columns);
        if (!s.is_summed) continue;
        const int8_t *x = s.x + q * s.stride + first * sizeof(U), *c = s.c + q * sizeof(U);
        add_grouped<U>(x, s.stride, c, quads, grouped, grouped_sums);
        add_all_columns<U>(x + quads * s.stride, s.stride, c + quads * sizeof(U), columns - quads, grouped, sums);
        add_all_columns<U>(x + grouped * sizeof(U), s.stride, c, columns, n - grouped, sums + grouped);
      }
      for (long p = 0; p < n; ++p) total += s.r[first + p] * (uint64_t)(int64_t)sums[p];
      for (long i = 0; i < grouped; ++i)
        total += s.r[first + place<U>(i)] * (uint64_t)(int64_t)grouped_sums[i];
    }
  }
  return total;
}

template <class U>
static uint64_t digest_of(const DigestSlice& s, bool is_across) {
  return is_across ? digest_across<U>(s) : digest_along<sizeof(U)>(s);
}
