// Copies weights and computes the digests of what was read and of what was written.
#pragma once
#include <utility>

#include "digest.h"

constexpr long COPIED_BYTES = 1024;  // copied before they are summed, so that the sums never wait for memory
constexpr long COPY_PREFETCH = 2048;   // bytes ahead; the sums fill the window in which a processor would look ahead itself
constexpr long TURNED_ROWS = 128;    // p of a transposed block; it has SQUARE q

struct CopiedSlice {
  const uint8_t* from;  // q contiguous
  uint8_t* to;          // q contiguous, or p where the copy transposes
  long from_stride, to_stride;  // bytes
  long rows, columns;           // number of p, number of q
  bool is_from_summed, is_to_summed;
};

struct CopiedSums {
  uint64_t from, to;
};

static void copy_bytes(uint8_t* __restrict to, const uint8_t* __restrict from, long size) {
  long i = 0;
  for (; i + 64 <= size; i += 64) std::memcpy(to + i, from + i, 64);
  std::memcpy(to + i, from + i, size - i);
}

// Prefetches what comes next into the second-level cache, to be read or, with TO_WRITE, written: processors do not predict
// short pieces of many rows.
template <bool TO_WRITE>
static inline void fetch(const uint8_t* x, long stride, long rows, long size) {
  for (long row = 0; row < rows; ++row)
    for (long i = 0; i < size; i += 64) __builtin_prefetch(x + row * stride + i, TO_WRITE, 2);
}

template <class U>
static CopiedSums copy_along(const CopiedSlice& s, Factors f) {
  const long size = s.columns * sizeof(U);
  // What wide stores have written can be read back at once.
  const bool is_dotted = s.is_from_summed || (HAS_DOTS && s.is_to_summed);
  uint64_t from_total = 0, to_total = 0;
#pragma omp parallel for reduction(+ : from_total, to_total) num_threads(threads_for(s.rows * size / 8))
  for (long p = 0; p < s.rows; ++p) {
    const uint8_t* from = s.from + p * s.from_stride;
    uint8_t* to = s.to + p * s.to_stride;
    for (long first = 0; first < size; first += DIGEST_BYTES) {
      Partial from_sum = no_sum(), to_sum = no_sum();
      const long stop = std::min(size, first + DIGEST_BYTES);
      for (long i = first; i < stop; i += COPIED_BYTES) {
        const long n = std::min(stop - i, COPIED_BYTES);
        for (long ahead = COPY_PREFETCH; ahead < COPY_PREFETCH + n; ahead += 64) __builtin_prefetch(from + i + ahead);
        if (is_dotted) from_sum = dot<true>(from_sum, from + i, f.c + i, n, to + i);
        else copy_bytes(to + i, from + i, n);
        if (s.is_to_summed) to_sum = dot<false>(to_sum, to + i, f.c + i, n, nullptr);
      }
      from_total += f.r[p] * (uint64_t)(int64_t)whole(from_sum);
      to_total += f.r[p] * (uint64_t)(int64_t)whole(to_sum);
    }
  }
  return {from_total, to_total};
}

template <class U>
struct Vector16 {
  typedef U type __attribute__((vector_size(16 * sizeof(U))));
};

// Exchanges the elements of two rows of a square whose indices differ in one bit.
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

// to[q][p] = from[p][q]; strides are in bytes
template <class U>
static inline void turn_square(uint8_t* to, long to_stride, const uint8_t* from, long from_stride) {
  typename Vector16<U>::type rows[16];
  for (int i = 0; i < 16; ++i) std::memcpy(&rows[i], from + i * from_stride, sizeof(rows[i]));
  swap_all<1>(rows), swap_all<2>(rows), swap_all<4>(rows), swap_all<8>(rows);
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_stride, &rows[i], sizeof(rows[i]));
}

// Transposes a block of at most TURNED_ROWS x SQUARE and adds what is read to the sums of p, unless these are null.
template <class U>
static void turn(uint8_t* to, long to_stride, const uint8_t* from, long from_stride, long rows, long columns,
                 const int8_t* c, Partial* sums) {
  constexpr long WIDTH = 64 / sizeof(U);  // elements that one product of dot_rows takes
  for (long p = 0; p < rows; p += 16)
    for (long q = 0; q < columns; q += 16) {
      uint8_t* target = to + q * to_stride + p * sizeof(U);
      const uint8_t* source = from + p * from_stride + q * sizeof(U);
      const long height = std::min(16L, rows - p), width = std::min(16L, columns - q);
      if (sums && q % WIDTH == 0) {
        const long size = std::min(columns - q, WIDTH) * sizeof(U);
        dot_rows(source, from_stride, c + q * sizeof(U), height, size, sums + p);
      }
      if (height == 16 && width == 16) {
        turn_square<U>(target, to_stride, source, from_stride);
        continue;
      }
      for (long j = 0; j < width; ++j)
        for (long i = 0; i < height; ++i)
          std::memcpy(target + j * to_stride + i * sizeof(U), source + i * from_stride + j * sizeof(U), sizeof(U));
    }
}

// Works on one block at a time, so that it is still in the cache when what was written is summed.
template <class U>
static CopiedSums copy_turned(const CopiedSlice& s, Factors f) {
  constexpr long WIDTH = DIGEST_BYTES / sizeof(U);
  uint64_t from_total = 0, to_total = 0;
#pragma omp parallel for reduction(+ : from_total, to_total) num_threads(threads_for(s.rows * s.columns * sizeof(U) / 8))
  for (long first = 0; first < s.rows; first += TURNED_ROWS) {
    const long n = std::min(s.rows - first, TURNED_ROWS);
    for (long start = 0; start < s.columns; start += WIDTH) {
      const AcrossSums<U> to_sums = AcrossSums<U>::cleared(n);
      Partial from_sums[TURNED_ROWS];
      std::fill(from_sums, from_sums + n, no_sum());
      const long stop = std::min(s.columns, start + WIDTH);
      for (long q = start; q < stop; q += SQUARE) {
        const long columns = std::min(stop - q, SQUARE);
        const uint8_t* from = s.from + first * s.from_stride + q * sizeof(U);
        uint8_t* to = s.to + q * s.to_stride + first * sizeof(U);
        const int8_t* c = f.c + q * sizeof(U);
        turn<U>(to, s.to_stride, from, s.from_stride, n, columns, c, s.is_from_summed ? from_sums : nullptr);
        if (q + 2 * SQUARE <= stop) {
          fetch<false>(from + SQUARE * sizeof(U), s.from_stride, n, SQUARE * sizeof(U));
          fetch<true>(to + SQUARE * s.to_stride, s.to_stride, SQUARE, n * sizeof(U));
        }
        if (s.is_to_summed) to_sums.add(to, s.to_stride, c, columns, n);
      }
      for (long p = 0; p < n; ++p) from_total += f.r[first + p] * (uint64_t)(int64_t)whole(from_sums[p]);
      to_total += to_sums.times(f.r + first, n);
    }
  }
  return {from_total, to_total};
}
