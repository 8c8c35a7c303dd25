// Matrix products of few rows with weights in either memory order, in tiles that fit registers.
//
// Every output is one sum over k in order, whatever the number of rows or threads: a row's result is the same in any
// batch. Operands are packed as 32-bit words: a float, or with bfloat16 instructions a pair of neighbours along k.
// Bfloat16 weights that are widened are loaded two columns to a word: a shift gives the even columns of 32, a mask the odd
// ones, in two registers; sums keep this order until a row is finished (`in_order`, `store_columns`). Panels hold pairs along k
// whatever multiplies them.
#pragma once
#include "compressed.h"
#include "threads.h"

constexpr long TILE = 14;    // rows of x in one packed tile
constexpr long PANEL = 32;   // columns of the weight at a time
constexpr long CHUNK = 112;  // rows packed at a time, whole tiles
// With few rows the time is that of reading the weight, which is read in memory order: PANELS side by side, DEPTH (even)
// steps along k at a time, so that whole pages come in order. With many rows one panel after the other is packed.
constexpr long PANELS = 8;
constexpr long DEPTH = 32;
constexpr long FIRST_BYTES = 8 << 10;  // of a weight, prefetched before rows are packed
// Words: a panel of at most so many is prefetched whole during the one before, of larger ones what is AHEAD.
constexpr long MOST_AHEAD = 4 << 10, AHEAD = 2 << 10;
constexpr long SMALL_PRODUCT = 1 << 18;  // multiplications; below this one thread is faster than two that synchronise
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
template <class M>
constexpr bool is_split = sizeof(typename M::T) == 2 && !M::is_dot;
struct Dot {  // bfloat16 tensors and instructions
  typedef bf16 T;
  static constexpr bool is_dot = true;
};

template <class M>
constexpr long words(long k) { return M::is_dot ? (k + 1) / 2 : k; }

template <class M>
static inline vf load_words(const typename M::T* p, long left) {  // 16 words of a row that has `left` elements, bf16 in pairs
  if constexpr (sizeof(typename M::T) == 2) {
    return (vf)(left >= 2 * LANES ? load_bits<vhh>(p) : load_halves(p, left));
  } else {
    return load_n(p, left);
  }
}

static inline void interleave(vhh even, vhh odd, vf& low, vf& high) {  // rows k, k + 1 to words of 2 x 16 columns
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
    return sum + even_of(a) * even_of(b) + odd_of(a) * odd_of(b);
#endif
  } else {
    return sum + a * b;
  }
}

static inline void split(vu pairs, vf& even, vf& odd) { even = even_of((vf)pairs), odd = odd_of((vf)pairs); }

// Transposes the words of 16 rows, which hold their next `kept` elements, to out[word][row].
template <class M>
static inline void store_block(const vf* block, long kept, float* out, long stride) {
  if constexpr (is_split<M>) {
    for (long i = 0; i < kept; i += 2, out += 2 * stride) {
      vf even, odd;
      split((vu)block[i / 2], even, odd);
      store(out, even);
      if (i + 1 < kept) store(out + stride, odd);
    }
  } else {
    for (long i = 0; i < words<M>(kept); ++i) store(out + i * stride, block[i]);
  }
}

// Packs elements [start, start + step) of ROWS rows in registers.
template <class M, int ROWS>
static inline void pack_block(const typename M::T* const* rows, long start, float* out, long stride) {
  vf block[LANES] = {};
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) block[i] = (vf)load_bits<vu>(rows[i] + start);
  transpose16(block);
  if constexpr (is_split<M>) {
    store_block<M>(block, 2 * LANES, out, stride);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) store(out + i * stride, block[i]);
  }
}

// Packs up to 16 rows, contiguous along k, to out[word][row]; absent rows are zeros. `meanwhile` is called once per cache
// line of each row.
template <class M, class Row, class Meanwhile>
static inline void pack_rows(Row row, long count, long k, float* out, long stride, Meanwhile meanwhile) {
  constexpr long step = sizeof(typename M::T) == 2 ? 2 * LANES : LANES, step_words = is_split<M> ? step : LANES;
  const typename M::T* rows[LANES];
  for (long i = 0; i < count; ++i) rows[i] = row(i);
  long start = 0;
  for (; start + step <= k && (count == LANES || count == LANES / 2); start += step, out += step_words * stride) {
    meanwhile();
    if (count == LANES)
      pack_block<M, LANES>(rows, start, out, stride);
    else
      pack_block<M, LANES / 2>(rows, start, out, stride);
  }
  for (; start < k; start += step, out += step_words * stride) {
    meanwhile();
    vf block[LANES] = {};
    for (long i = 0; i < count; ++i) block[i] = load_words<M>(rows[i] + start, k - start);
    transpose16(block);
    store_block<M>(block, std::min(step, k - start), out, stride);
  }
}
template <class M, class Row>
static inline void pack_rows(Row row, long count, long k, float* out, long stride) {
  pack_rows<M>(row, count, k, out, stride, [] {});
}

template <class T>
struct Weight {  // w(k, n) = data[k * k_stride + n * n_stride], one of the strides is 1
  const T* data;
  long k_stride, n_stride;
  const uint8_t* compressed = nullptr;  // replaces `data`; the columns are the rows of compressed.h
  const float* panels = nullptr;        // replaces `data`: all columns as `pack_panel` packs them for pairs

  // `place` is the address of a compressed matrix or, by its lowest bits, 1: of a plain one stored by row, 2: of panels.
  static Weight at(int64_t place, long k) {
    if (place & 1) return {(const T*)(place - 1), 1, k};
    if (place & 2) return {nullptr, 1, k, nullptr, (const float*)(place - 2)};
    return {nullptr, 1, k, (const uint8_t*)place};
  }

  // The address of its columns, if these are contiguous.
  MemoryRange columns(long first, long count, long k) const {
    if (compressed) return {compressed + first / COMPRESSED_ROWS * compressed_bytes(k), count / COMPRESSED_ROWS * compressed_bytes(k)};
    if (panels) return {panels + first * words<Dot>(k), count * words<Dot>(k) * (long)sizeof(float)};
    if (k_stride != 1 || n_stride != k) return {};
    return {data + first * n_stride, count * k * (long)sizeof(T)};
  }
};

// Loads 32 columns of a row, in the order of the sums.
static inline void load_columns(const float* p, vf& low, vf& high) { low = load(p), high = load(p + LANES); }
static inline void load_columns(const bf16* p, vf& even, vf& odd) { split(load_bits<vu>(p), even, odd); }
// The first n, zeros behind.
static inline void load_columns_n(const float* p, long n, vf& low, vf& high) {
  low = load_n(p, n), high = n > LANES ? load_n(p + LANES, n - LANES) : vf{};
}
static inline void load_columns_n(const bf16* p, long n, vf& even, vf& odd) {
  split((vu)(n >= PANEL ? load_bits<vhh>(p) : load_halves(p, n)), even, odd);
}

// Changes the order of the sums to that of the columns.
template <class M>
static inline void in_order(vf& low, vf& high) {
  if constexpr (is_split<M>) {
    vf even = low, odd = high;
    low = LANES_OF(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    high = LANES_OF(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
}

// Changes the order of the columns to that of the sums: the even ones of 32, then the odd ones.
static inline void out_of_order(vf& low, vf& high) {
  const vf first = low, second = high;
  low = LANES_OF(first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  high = LANES_OF(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// Packs columns [first, first + columns) to out[word][32] in the order of the sums, padded with zeros.
template <class M>
static void pack_panel(const Weight<typename M::T>& w, long first, long columns, long k, float* out) {
  if (w.n_stride != 1) {
    constexpr long step = is_split<M> ? 2 : 1;
    for (long half = 0; half < 2; ++half) {
      const long start = half * (is_split<M> ? 1 : LANES), left = (columns - start + step - 1) / step;
      auto row_of = [&](long i) { return w.data + (first + start + i * step) * w.n_stride; };
      long at = 0;
      auto prefetch_next_panel = [&] {
        for (long i = 0; i < LANES; ++i) __builtin_prefetch(row_of(i) + PANEL * w.n_stride + at, 0, 2);
        at += 64 / sizeof(typename M::T);
      };
      pack_rows<M>(row_of, std::clamp(left, 0L, LANES), k, out + half * LANES, PANEL, prefetch_next_panel);
    }
    return;
  }
  const typename M::T* row = w.data + first;
  if constexpr (M::is_dot) {
    const auto pack = [&](vhh even, vhh odd) {
      vf low, high;
      interleave(even, odd, low, high);
      store(out, low);
      store(out + LANES, high);
      row += 2 * w.k_stride, out += PANEL;
    };
    long i = 0;
    for (; columns == PANEL && i + 1 < k; i += 2) {
      __builtin_prefetch(row + 16 * w.k_stride);
      __builtin_prefetch(row + 17 * w.k_stride);
      pack(load_bits<vhh>(row), load_bits<vhh>(row + w.k_stride));
    }
    for (; i < k; i += 2) {
      bf16 pair[2][PANEL] = {};
      std::memcpy(pair[0], row, columns * sizeof(bf16));
      if (i + 1 < k) std::memcpy(pair[1], row + w.k_stride, columns * sizeof(bf16));
      pack(load_bits<vhh>(pair[0]), load_bits<vhh>(pair[1]));
    }
  } else {
    for (long i = 0; i < k; ++i, row += w.k_stride, out += PANEL) {
      __builtin_prefetch(row + 16 * w.k_stride);
      vf low, high;
      load_columns_n(row, columns, low, high);
      store(out, low);
      store(out + LANES, high);
    }
  }
}

// Stores 32 sums, given in their own order, to 32 columns.
template <class M>
static inline void store_panel(typename M::T* to, const float* sums) {
  vf low = load(sums), high = load(sums + LANES);
  if constexpr (is_split<M>)
    store_bits(to, round_bits(low) >> 16 | (round_bits(high) & 0xffff0000u));
  else
    store_two(to, low, high);
}

// The same where `to` has fewer than 32 columns.
template <class M>
static inline void store_columns(typename M::T* to, const float* sums, long columns) {
  typename M::T panel[PANEL];
  store_panel<M>(panel, sums);
  std::memcpy(to, panel, std::min(columns, PANEL) * sizeof(panel[0]));
}

// Where a kernel finds the words of its rows: side by side in a tile, [word][16], or each row where it lies.
struct TileWords {
  const float* x;
  float at(int row) const { return x[row]; }
  void advance() { x += LANES; }
};
template <int ROWS>
struct RowWords {
  const float* rows[ROWS];
  long i = 0;
  explicit RowWords(const float* const* x) {
    for (int r = 0; r < ROWS; ++r) rows[r] = x[r];
  }
  float at(int row) const { return rows[row][i]; }
  void advance() { ++i; }
};

// Where it finds 32 columns of a weight, half and half: `advance` takes the next words of memory, which hold
// PARTS words of the rows each.
template <class M>
struct PackedColumns {  // as `pack_panel` leaves them; `row` is what will be packed next
  static constexpr int PARTS = 1;
  const float* packed;
  const typename M::T* row;
  long stride;
  void begin() const {
    __builtin_prefetch(row, 0, 2);  // to the second-level cache: the first has too few reads under way
    if constexpr (M::is_dot) __builtin_prefetch(row + stride, 0, 2);
  }
  vf at(int, int half) const { return load(packed + half * LANES); }
  void advance() { packed += PANEL, row += (M::is_dot ? 2 : 1) * stride; }
};
template <class M>
struct PanelColumns {  // a panel of pairs, whatever the rows' words; `next` is read later
  static constexpr int PARTS = M::is_dot ? 1 : 2;
  const float *packed, *next;
  void begin() const {
    __builtin_prefetch(next, 0, 2);
    __builtin_prefetch(next + LANES, 0, 2);
  }
  vf at(int part, int half) const {
    const vf pairs = load(packed + half * LANES);
    return PARTS == 1 ? pairs : part == 0 ? even_of(pairs) : odd_of(pairs);
  }
  void advance() { packed += PANEL, next += PANEL; }
};
template <class M>
struct PlainColumns {  // stored by k, `left` steps from `row` on
  static constexpr int PARTS = 1;
  const typename M::T* row;
  long stride, left;
  vf words[2] = {};
  void begin() {
    __builtin_prefetch(row + (M::is_dot ? DEPTH : 16) * stride);
    if constexpr (M::is_dot) {
      __builtin_prefetch(row + (DEPTH + 1) * stride);
      interleave(load_bits<vhh>(row), left > 1 ? load_bits<vhh>(row + stride) : vhh{}, words[0], words[1]);
    }
  }
  vf at(int, int half) const {
    if constexpr (M::is_dot) return words[half];
    if constexpr (!is_split<M>) return load_bits<vf>(row + half * LANES);
    const vf pairs = load_bits<vf>(row);
    return half ? odd_of(pairs) : even_of(pairs);
  }
  void advance() { row += (M::is_dot ? 2 : 1) * stride, left -= 2; }
};

// out[ROWS][32] = rows of `steps` words times 32 columns, added to `out` where the product continues.
template <class M, int ROWS, class Words, class Columns>
static void kernel(Words x, Columns columns, long steps, bool goes_on, float* out) {
  vf sums[ROWS][2] = {};
  if (goes_on) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) sums[r][0] = load(out + r * PANEL), sums[r][1] = load(out + r * PANEL + LANES);
  }
  for (long step = 0; step < steps; step += Columns::PARTS, columns.advance()) {
    columns.begin();
#pragma GCC unroll 2
    for (int part = 0; part < Columns::PARTS; ++part, x.advance()) {
      vf low = columns.at(part, 0), high = columns.at(part, 1);
#if defined(__AVX512F__)  // the compiler would keep sums of both parts at a time, more than there are registers
      if constexpr (Columns::PARTS == 2 && ROWS == REGISTER_ROWS) asm volatile("" : "+v"(low), "+v"(high)::"memory");
#endif
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const vf a = splat(x.at(r));
        sums[r][0] = multiply_add<M>(sums[r][0], a, low);
        sums[r][1] = multiply_add<M>(sums[r][1], a, high);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    if constexpr (Columns::PARTS == 2) out_of_order(sums[r][0], sums[r][1]);
    store(out + r * PANEL, sums[r][0]);
    store(out + r * PANEL + LANES, sums[r][1]);
  }
}

template <class M, class Columns, int ROWS = REGISTER_ROWS>
static void run_kernel(long rows, const float* tile, Columns columns, long steps, bool goes_on, float* out) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return run_kernel<M, Columns, ROWS - 1>(rows, tile, columns, steps, goes_on, out);
  }
  kernel<M, ROWS>(TileWords{tile}, columns, steps, goes_on, out);
}

constexpr long FEW_ROWS = 8;
template <int ROWS = FEW_ROWS>
static void run_few_rows(long rows, const float* const* x, PanelColumns<Dot> columns, long steps, float* out) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return run_few_rows<ROWS - 1>(rows, x, columns, steps, out);
  }
  kernel<Dot, ROWS>(RowWords<ROWS>(x), columns, steps, false, out);
}

// Rows of x that one thread packs once and multiplies with many panels. A few rows of pairs stay where they lie until
// something else than panels of pairs is multiplied.
template <class M>
class PackedRows {
 public:
  static constexpr long ROW_MULTIPLE = 4;        // rows are divided among threads in multiples of it
  static constexpr long CHUNK_ROWS = CHUNK;  // rows that are packed at a time, whole tiles
  static constexpr long SUMS = CHUNK_ROWS * PANEL * PANELS;  // largest number that `multiply` computes
  long rows_apart() const { return rows_; }  // rows of one panel of the sums

  // Packs rows of x; what is multiplied first begins at `next`.
  template <class X = M, class Row>
  void pack(Row row, long rows, long k, MemoryRange next) {
    for (long i = 0; i < std::min(next.bytes, FIRST_BYTES); i += 64) __builtin_prefetch((const char*)next.begin + i, 0, 2);
    rows_ = rows, k_ = k;
    tiles_ = (rows + TILE - 1) / TILE;
    base_ = tiles_ ? rows / tiles_ : 0, longer_ = tiles_ ? rows % tiles_ : 0;
    stay_ = X::is_dot && rows > 0 && rows <= FEW_ROWS && k % 2 == 0;
    if (!stay_) return pack_tiles<X>(row);
    for (long i = 0; i < rows; ++i) rows_at_[i] = (const float*)row(i);
  }

  // The best number of panels for one `multiply`.
  long panels_at_once(const Weight<typename M::T>& w) const { return w.n_stride == 1 && tiles_ <= 2 ? PANELS : 1; }

  // out[panel][rows][32] = x times columns [first, first + columns) of w
  void multiply(const Weight<typename M::T>& w, long first, long columns, float* out, MemoryRange next) {
    if (sizeof(typename M::T) == sizeof(bf16) && w.panels) {
      const long size = words<Dot>(k_) * PANEL, ahead = size <= MOST_AHEAD ? size : AHEAD;
      for (long p = 0; p * PANEL < columns; ++p) {
        const float *packed = w.panels + (first / PANEL + p) * size, *then = packed + ahead;
        if (ahead == size && (p + 1) * PANEL >= columns && next.bytes) then = (const float*)next.begin;
        const PanelColumns<M> panel{packed, then};
        float* to = out + p * rows_ * PANEL;
        if constexpr (M::is_dot)
          if (stay_) {
            run_few_rows(rows_, rows_at_, panel, words<M>(k_), to);
            continue;
          }
        run(panel, 0, k_, to);
      }
      return;
    }
    if (stay_) pack_tiles<M>([&](long i) { return (const typename M::T*)rows_at_[i]; });
    stay_ = false;
    const long panels = (columns + PANEL - 1) / PANEL, direct = panels_at_once(w) > 1 ? columns / PANEL : 0;
    for (long start = 0; direct && start < k_; start += DEPTH)
      for (long p = 0; p < direct; ++p)
        run(PlainColumns<M>{w.data + start * w.k_stride + first + p * PANEL, w.k_stride, k_ - start}, start,
            std::min(DEPTH, k_ - start), out + p * rows_ * PANEL);
    for (long p = direct; p < panels; ++p) {
      float* packed = panel_.template get<float>(words<M>(k_) * PANEL);
      pack_panel<M>(w, first + p * PANEL, std::min(PANEL, columns - p * PANEL), k_, packed);
      // Weights that are contiguous along k are read in order anyway.
      const long next = w.n_stride == 1 ? w.k_stride : 0;
      run(PackedColumns<M>{packed, w.data + first + (p + 1) * PANEL, next}, 0, k_, out + p * rows_ * PANEL);
    }
  }

 private:
  template <class X, class Row>
  void pack_tiles(Row row) {
    data_ = buffer_.template get<float>(tiles_ * words<M>(k_) * LANES);
    for (long t = 0; t < tiles_; ++t) {
      long first = first_of(t);
      pack_rows<X>([&](long i) { return row(first + i); }, first_of(t + 1) - first, k_, tile(t), LANES);
    }
  }

  // Multiplies all rows with one panel, k steps from `start` on.
  template <class Columns>
  void run(Columns columns, long start, long k, float* out) {
    for (long t = 0; t < tiles_; ++t) {
      const long first = first_of(t), count = first_of(t + 1) - first;
      for (long r = 0; r < count; r += REGISTER_ROWS)
        run_kernel<M>(std::min(REGISTER_ROWS, count - r), tile(t) + words<M>(start) * LANES + r, columns, words<M>(k),
                      start > 0, out + (first + r) * PANEL);
    }
  }

  long first_of(long t) const { return t * base_ + std::min(t, longer_); }
  float* tile(long t) { return data_ + t * words<M>(k_) * LANES; }
  Buffer buffer_, panel_;
  float* data_ = nullptr;
  const float* rows_at_[FEW_ROWS];
  bool stay_ = false;
  long rows_ = 0, k_ = 0, tiles_ = 0, base_ = 0, longer_ = 0;
};
