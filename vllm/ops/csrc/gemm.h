// Products of small row counts with weights in either memory order, in tiles that fit registers.
//
// Every output is one sum over k in order, whatever the number of rows or threads: a row's result is the same in any
// batch. Operands are packed as 32-bit words: a float, or with bfloat16 instructions a pair of neighbours along k.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "vec.h"

constexpr long TILE = 14;    // rows of x in one packed tile
constexpr long PANEL = 32;   // columns of the weight at a time
constexpr long CHUNK = 112;  // rows packed at a time, whole tiles
constexpr long SMALL_PRODUCT = 1 << 18;  // multiplications that one thread makes sooner than two could meet
#if defined(__AVX512F__)
constexpr long REGISTER_ROWS = TILE;  // 28 sums, 2 weights, 1 x: all registers
#else
constexpr long REGISTER_ROWS = 2;
#endif

struct Float32 {  // float32 tensors
  typedef float T;
  static constexpr bool is_dot = false;
};
struct Widened {  // bfloat16 tensors, products in float32
  typedef bf16 T;
  static constexpr bool is_dot = false;
};
struct Dot {  // bfloat16 tensors and instructions
  typedef bf16 T;
  static constexpr bool is_dot = true;
};

class Buffer {  // grows, never shrinks; of one thread
 public:
  ~Buffer() { std::free(memory_); }
  template <class T = float>
  T* get(long count) {
    size_t bytes = (count * sizeof(T) + 127) / 64 * 64;
    if (bytes > bytes_) {
      std::free(memory_);
      memory_ = std::aligned_alloc(64, bytes);
      if (!memory_) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

template <class M>
constexpr long words(long k) { return M::is_dot ? (k + 1) / 2 : k; }

template <class M>
static inline vf load_words(const typename M::T* p, long left) {  // 16 words of a row with `left` elements
  if constexpr (M::is_dot) {
    if (left >= 2 * LANES) return (vf)load_bits<vhh>(p);
    bf16 lanes[2 * LANES] = {};
    std::memcpy(lanes, p, left * sizeof(bf16));
    return (vf)load_bits<vhh>(lanes);
  } else {
    return load_n(p, left);
  }
}

static inline void interleave(vhh even, vhh odd, vf& low, vf& high) {  // rows k and k + 1 to words of 2 x 16 columns
  low = (vf)__builtin_shufflevector(even, odd, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10,
                                    42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
  high = (vf)__builtin_shufflevector(even, odd, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56,
                                     25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
}

template <class M>
static inline vf multiply_add(vf sum, vf a, vf b) {
  if constexpr (M::is_dot) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    vu x = (vu)a, y = (vu)b;
    sum += (vf)(x << 16) * (vf)(y << 16);
    return sum + (vf)(x & 0xffff0000u) * (vf)(y & 0xffff0000u);
#endif
  } else {
    return sum + a * b;
  }
}

// Up to 16 rows, contiguous along k, to out[word][row]; absent rows are zeros.
template <class M, class Row>
static inline void pack_rows(Row row, long count, long k, float* out, long stride) {
  constexpr long step = M::is_dot ? 2 * LANES : LANES;
  for (long start = 0; start < k; start += step) {
    vf block[LANES] = {};
    for (long i = 0; i < count; ++i) block[i] = load_words<M>(row(i) + start, k - start);
    transpose16(block);
    long first = start / step * LANES, kept = std::min(LANES, words<M>(k) - first);
    for (long i = 0; i < kept; ++i) store(out + (first + i) * stride, block[i]);
  }
}

template <class T>
struct Weight {  // w(k, n) = data[k * k_stride + n * n_stride], one of the strides is 1
  const T* data;
  long k_stride, n_stride;
};

template <class M>
static inline vf load_columns(const typename M::T* p, long n) { return load_n(p, n < 0 ? 0 : n); }

// Columns [first, first + columns) to out[word][32], zeros behind.
template <class M>
static void pack_panel(const Weight<typename M::T>& w, long first, long columns, long k, float* out) {
  if (w.n_stride != 1) {
    for (long g = 0; g < PANEL; g += LANES)
      pack_rows<M>([&](long i) { return w.data + (first + g + i) * w.n_stride; },
                   std::clamp(columns - g, 0L, LANES), k, out + g, PANEL);
    return;
  }
  const typename M::T* row = w.data + first;
  if constexpr (M::is_dot) {
    for (long i = 0; i < k; i += 2, row += 2 * w.k_stride, out += PANEL) {
      bf16 pair[2][PANEL] = {};
      std::memcpy(pair[0], row, columns * sizeof(bf16));
      if (i + 1 < k) std::memcpy(pair[1], row + w.k_stride, columns * sizeof(bf16));
      vf low, high;
      interleave(load_bits<vhh>(pair[0]), load_bits<vhh>(pair[1]), low, high);
      store(out, low);
      store(out + LANES, high);
    }
  } else {
    for (long i = 0; i < k; ++i, row += w.k_stride, out += PANEL) {
      __builtin_prefetch(row + 16 * w.k_stride);
      store(out, load_columns<M>(row, columns));
      store(out + LANES, load_columns<M>(row + LANES, columns - LANES));
    }
  }
}

// out[ROWS][32] = x tile (words [k][16]) times a panel: packed words, or rows of the weight as they lie in memory.
template <class M, int ROWS, bool IS_PACKED>
static void kernel(const float* x, const void* panel, long stride, long k, float* out) {
  vf sums[ROWS][2] = {};
  const float* packed = static_cast<const float*>(panel);
  const typename M::T* row = static_cast<const typename M::T*>(panel);
  const long steps = words<M>(k);
  for (long i = 0; i < steps; ++i, x += LANES) {
    vf low, high;
    if constexpr (IS_PACKED) {
      low = load(packed), high = load(packed + LANES);
      packed += PANEL;
    } else if constexpr (M::is_dot) {
      __builtin_prefetch(row + 16 * stride);
      __builtin_prefetch(row + 17 * stride);
      interleave(load_bits<vhh>(row), 2 * i + 1 < k ? load_bits<vhh>(row + stride) : vhh{}, low, high);
      row += 2 * stride;
    } else {
      __builtin_prefetch(row + 16 * stride);
      low = load(row), high = load(row + LANES);
      row += stride;
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      vf a = splat(x[r]);
      sums[r][0] = multiply_add<M>(sums[r][0], a, low);
      sums[r][1] = multiply_add<M>(sums[r][1], a, high);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    store(out + r * PANEL, sums[r][0]);
    store(out + r * PANEL + LANES, sums[r][1]);
  }
}

template <class M, bool IS_PACKED, int ROWS = REGISTER_ROWS>
static void run_kernel(long rows, const float* x, const void* panel, long stride, long k, float* out) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return run_kernel<M, IS_PACKED, ROWS - 1>(rows, x, panel, stride, k, out);
  }
  kernel<M, ROWS, IS_PACKED>(x, panel, stride, k, out);
}

// Rows of x, packed once and multiplied with many panels; of one thread.
template <class M>
class PackedRows {
 public:
  template <class X = M, class Row>
  void pack(Row row, long rows, long k) {
    rows_ = rows, k_ = k;
    tiles_ = (rows + TILE - 1) / TILE;
    base_ = tiles_ ? rows / tiles_ : 0, longer_ = tiles_ ? rows % tiles_ : 0;
    data_ = buffer_.template get<float>(tiles_ * words<M>(k) * LANES);
    for (long t = 0; t < tiles_; ++t) {
      long first = first_of(t);
      pack_rows<X>([&](long i) { return row(first + i); }, first_of(t + 1) - first, k, tile(t), LANES);
    }
  }

  // out[rows][32] = x times columns [first, first + columns) of w
  void multiply(const Weight<typename M::T>& w, long first, long columns, float* out) {
    bool is_direct = w.n_stride == 1 && columns == PANEL && tiles_ <= 2;
    float* packed = nullptr;
    if (!is_direct) {
      packed = panel_.template get<float>(words<M>(k_) * PANEL);
      pack_panel<M>(w, first, columns, k_, packed);
    }
    for (long t = 0; t < tiles_; ++t) {
      long start = first_of(t), count = first_of(t + 1) - start;
      for (long r = 0; r < count; r += REGISTER_ROWS) {
        long rows = std::min(REGISTER_ROWS, count - r);
        float* to = out + (start + r) * PANEL;
        if (is_direct)
          run_kernel<M, false>(rows, tile(t) + r, w.data + first, w.k_stride, k_, to);
        else
          run_kernel<M, true>(rows, tile(t) + r, packed, 0, k_, to);
      }
    }
  }

 private:
  long first_of(long t) const { return t * base_ + std::min(t, longer_); }
  float* tile(long t) { return data_ + t * words<M>(k_) * LANES; }
  Buffer buffer_, panel_;
  float* data_ = nullptr;
  long rows_ = 0, k_ = 0, tiles_ = 0, base_ = 0, longer_ = 0;
};

template <class T>
struct Batch {  // x[t, n] = data + t * token_stride + n * head_stride
  T* data;
  long token_stride, head_stride;
};

// out[t, n, :] = x[t, n, :] w[n]
template <class M>
static void head_linear(Batch<const typename M::T> x, long tokens, long heads, Weight<typename M::T> w,
                        long w_head_stride, long k, long n, Batch<typename M::T> out) {
  typedef typename M::T T;
  const long panels = (n + PANEL - 1) / PANEL;
  const int threads = tokens * heads * k * n < SMALL_PRODUCT ? 1 : omp_get_max_threads();
  long chunk = CHUNK;
  while (chunk > TILE && (tokens + chunk - 1) / chunk * heads * panels < 2 * threads)
    chunk = (chunk / 2 + TILE - 1) / TILE * TILE;
  const long chunks = (tokens + chunk - 1) / chunk, items = heads * chunks * panels;
#pragma omp parallel num_threads(threads)
  {
    static thread_local PackedRows<M> rows;
    static thread_local Buffer tile_buffer;
    float* tile = tile_buffer.get(CHUNK * PANEL);
    const long part = omp_get_thread_num(), parts = omp_get_num_threads();
    long packed_for = -1;
    for (long item = items * part / parts; item < items * (part + 1) / parts; ++item) {
      const long group = item / panels, head = group / chunks, start = group % chunks * chunk;
      const long count = std::min(chunk, tokens - start), first = item % panels * PANEL;
      if (packed_for != group) {
        rows.pack([&](long i) { return x.data + (start + i) * x.token_stride + head * x.head_stride; }, count, k);
        packed_for = group;
      }
      const long columns = std::min(PANEL, n - first);
      rows.multiply({w.data + head * w_head_stride, w.k_stride, w.n_stride}, first, columns, tile);
      for (long i = 0; i < count; ++i) {
        T* to = out.data + (start + i) * out.token_stride + head * out.head_stride + first;
        store_n(to, load(tile + i * PANEL), columns);
        if (columns > LANES) store_n(to + LANES, load(tile + i * PANEL + LANES), columns - LANES);
      }
    }
  }
}
