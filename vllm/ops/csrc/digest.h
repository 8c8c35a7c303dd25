// sum_p r_p sum_qb c_qb byte_b(x_pq) mod 2^64, of model_loader/digest.py: r odd, bytes and c signed.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "rows.h"

constexpr long DIGEST_BYTES = 32768;  // along q, whose products fit in 32 bits
constexpr long COPIED_BYTES = 16384;  // before they are summed up
constexpr long DIGEST_ROWS = 8192;    // sums of p that are worked on together

struct DigestSlice {
  const int8_t* x;
  long stride, rows, columns;  // stride in bytes, rows over p, columns over q
  const int8_t* c;
  const uint64_t* r;
  const int8_t* from;  // copied to `to` on the way, where there is one; x is one of both
  int8_t* to;
  long from_stride, to_stride;
};

static int64_t dot_bytes(const int8_t* x, const int8_t* c, long size) {
  int64_t sum = 0;
  for (long i = 0; i < size; i += DIGEST_BYTES) {
    const long n = std::min(size - i, DIGEST_BYTES);
    int32_t part = 0;
    for (long j = 0; j < n; ++j) part += (uint8_t)(x[i + j] ^ 0x80) * c[i + j];
    sum += part;
  }
  return sum;
}

// q contiguous; processors multiply unsigned bytes by signed ones, so 128 is added to each and taken off at the end
template <int BYTES>
static uint64_t digest_along(const DigestSlice& s) {
  const long size = s.columns * BYTES, step = std::max(1L, COPIED_BYTES / std::max(1L, size));
  uint64_t total = 0, sum_r = 0, sum_c = 0;
#pragma omp parallel for reduction(+ : total, sum_r) num_threads(threads_for(s.rows * size / 8))
  for (long first = 0; first < s.rows; first += step) {
    const long stop = std::min(s.rows, first + step);
    for (long p = first; s.to && p < stop; ++p)
      std::memcpy(s.to + p * s.to_stride, s.from + p * s.from_stride, size);
    for (long p = first; p < stop; ++p) {
      total += s.r[p] * (uint64_t)dot_bytes(s.x + p * s.stride, s.c, size);
      sum_r += s.r[p];
    }
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

// p contiguous; U has an element's bytes
template <class U>
static uint64_t digest_across(const DigestSlice& s) {
  constexpr long WIDTH = DIGEST_BYTES / sizeof(U);
  uint64_t total = 0;
#pragma omp parallel for reduction(+ : total) num_threads(threads_for(s.rows * s.columns * sizeof(U) / 8))
  for (long first = 0; first < s.rows; first += DIGEST_ROWS) {
    static thread_local int32_t sums[DIGEST_ROWS];
    const long n = std::min(s.rows - first, DIGEST_ROWS);
    auto column = [&](long q) { return (const U*)(s.x + q * s.stride) + first; };
    for (long start = 0; start < s.columns; start += WIDTH) {
      const long stop = std::min(s.columns, start + WIDTH);
      std::memset(sums, 0, n * sizeof(int32_t));
      long q = start;
      for (; q + 4 <= stop; q += 4) {
        const U* x[] = {column(q), column(q + 1), column(q + 2), column(q + 3)};
        add_columns<U, 4>(x, s.c + q * sizeof(U), n, sums);
      }
      for (; q < stop; ++q) {
        const U* x[] = {column(q)};
        add_columns<U, 1>(x, s.c + q * sizeof(U), n, sums);
      }
      for (long p = 0; p < n; ++p) total += s.r[first + p] * (uint64_t)(int64_t)sums[p];
    }
  }
  return total;
}

template <class U>
static uint64_t digest_of(const DigestSlice& s, bool is_across) {
  return is_across ? digest_across<U>(s) : digest_along<sizeof(U)>(s);
}
