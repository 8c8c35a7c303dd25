// Products by the processor's matrix tiles (AMX): sixteen columns of a weight by sixteen rows, 32 elements along k at once.
//
// A weight whose columns lie along k, as in checkpoints, goes into tiles as it lies, in the order of memory: few rows then
// take no longer than reading it. The rows are packed as words of pairs along k, the operand that instructions want so, and
// sums come out with columns and rows exchanged.
//
// As elsewhere every output is one sum over k in order: an instruction adds the products of its 32 elements to a sum in
// order, and neither rows nor columns meet.
#pragma once
#include <type_traits>

#include "gemm.h"

struct NoScope {
  ~NoScope() {}
};

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1

struct Tiles {  // bfloat16 tensors and tiles
  typedef bf16 T;
  static constexpr bool is_dot = true;
};

constexpr long TILE_K = 32;                       // elements along k of one instruction
constexpr long TILE_WORDS = LANES * TILE_K / 2;  // of one tile, of operands as of sums
constexpr long TILE_BYTES = 64;                   // of a row of a tile

// Tile registers are the process's to ask for, once: the kernel then saves them with every thread.
static inline bool may_use_tiles() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

class TileScope {  // all eight registers as 16 rows of 64 bytes, for one thread
 public:
  TileScope() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" : : "r"(&config) : "memory");  // g++ takes the instruction to read 8 bytes, and may not write the others
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
};

// Sixteen columns of a weight: tile s begins at data + s * step, its rows (columns of the weight) are `stride` apart.
struct ColumnTiles {
  const bf16* data;
  long step, stride;
};

// These tiles one after the other as they lie.
class PlainColumn {
 public:
  PlainColumn(const ColumnTiles& tiles, long start)  // from tile `start` on
      : at_(tiles.data + start * tiles.step), step_(tiles.step), stride_(tiles.stride) {}
  long stride() const { return stride_ * sizeof(bf16); }
  const bf16* next() {
    const bf16* tile = at_;
    at_ += step_;
    return tile;
  }

 private:
  const bf16* at_;
  long step_, stride_;
};

// Or decompressed.
class CompressedColumn {
 public:
  CompressedColumn(const uint8_t* compressed, long k) : tiles_(compressed, k) {}
  long stride() const { return COMPRESSED_K * sizeof(bf16); }
  const bf16* next() {
    tiles_.decompress(tile_);
    return tile_;
  }

 private:
  CompressedTiles tiles_;
  alignas(64) bf16 tile_[COMPRESSED_TILE];
};

// Fetches a range into the second-level cache a little at a time while other work goes on. Where tiles are read one column
// after the other the processor sees too many short streams to fetch them itself, and stops at every gap.
class Prefetcher {
 public:
  explicit Prefetcher(MemoryRange range) : at_((const char*)range.begin), end_(at_ + range.bytes) {}
  template <int LINES>
  void fetch() {
    if (at_ >= end_) return;
#pragma GCC unroll 16
    for (int i = 0; i < LINES; ++i) _mm_prefetch(at_ + i * 64, _MM_HINT_T1);
    at_ += LINES * 64;
  }

 private:
  const char *at_, *end_;
};

// Rows of x, packed once and multiplied with many panels of weights with columns along k; of one thread, inside a TileScope.
class TileRows {
 public:
  static constexpr long ROW_MULTIPLE = LANES;
  static constexpr long CHUNK_ROWS = 16 * LANES;
  static constexpr long SUMS = CHUNK_ROWS * PANEL * PANELS;
  long rows_apart() const { return tiles_ * LANES; }

  template <class X = Tiles, class Row>
  void pack(Row row, long rows, long k, MemoryRange next) {
    Prefetcher prefetcher(next);
    rows_ = rows, k_ = k, tiles_ = (rows + LANES - 1) / LANES, steps_ = (k + TILE_K - 1) / TILE_K;
    data_ = buffer_.get<float>(tiles_ * steps_ * TILE_WORDS);
    const long known = words<Dot>(k) * LANES;
    for (long t = 0; t < tiles_; ++t) {
      float* to = data_ + t * steps_ * TILE_WORDS;
      pack_rows<Dot>([&](long i) { return row(t * LANES + i); }, std::min(LANES, rows - t * LANES), k, to, LANES,
                     [&] { prefetcher.fetch<16>(); });
      std::fill(to + known, to + steps_ * TILE_WORDS, 0.0f);
    }
  }

  // With what is fetched ahead few: it comes early enough, and of the first ones little is waited for.
  long panels_at_once(const Weight<bf16>&) const {
    return uses_prefetch() ? std::clamp(PREFETCH_BYTES / (PANEL * 2 * k_), 1L, PANELS) : PANELS;
  }

  // out[panel][rows_apart()][32] = x times columns [first, first + columns) of w, at most PANELS panels; `next` is
  // what will be read then.
  void multiply(const Weight<bf16>& w, long first, long columns, float* out, MemoryRange next) {
    Prefetcher prefetcher(uses_prefetch() ? next : MemoryRange{});
    const float* sums = sums_of(w, first, columns, prefetcher);
    for (long c = 0; c * LANES < columns; ++c)
      for (long t = 0; t < tiles_; ++t)
        store_rows(sums + (c * tiles_ + t) * TILE_WORDS, out + (c / 2 * rows_apart() + t * LANES) * PANEL + c % 2 * LANES);
  }

  // The same rounded, to to(row)[column].
  template <class To>
  void multiply_to(const Weight<bf16>& w, long first, long columns, To to, MemoryRange next) {
    Prefetcher prefetcher(uses_prefetch() ? next : MemoryRange{});
    // Where nothing is read twice for it, a panel at a time: its sums then are in the nearest cache, too.
    const long at_once = tiles_ <= FEW_TILES && steps_ <= NEAR_TILES / tiles_ ? PANEL : columns;
    for (long start = 0; start < columns; start += at_once) {
      const long count = std::min(at_once, columns - start);
      round_to(sums_of(w, first + start, count, prefetcher), count, [&](long i) { return to(i) + start; });
    }
  }

 private:
  static constexpr long PREFETCH_BYTES = 1 << 16;

  // Sums of `columns`, rounded, to to(row)[column].
  template <class To>
  void round_to(const float* sums, long columns, To to) const {
    for (long c = 0; c * LANES < columns; c += 2)
      for (long t = 0; t < tiles_; ++t) {
        const float* low = sums + (c * tiles_ + t) * TILE_WORDS;
        const float* high = (c + 1) * LANES < columns ? low + tiles_ * TILE_WORDS : low;
        vf block[LANES];  // words of two columns by rows
        for (long i = 0; i < LANES / 2; ++i) {
          block[i] = word_columns(low + 2 * i * LANES);
          block[LANES / 2 + i] = word_columns(high + 2 * i * LANES);
        }
        transpose16(block);
        const long left = std::min(PANEL, columns - c * LANES), rows = std::min(LANES, rows_ - t * LANES);
        for (long i = 0; i < rows; ++i) {
          bf16* row = to(t * LANES + i) + c * LANES;
          if (left == PANEL)
            store_bits(row, block[i]);
          else
            std::memcpy(row, &block[i], left * sizeof(bf16));
        }
      }
  }

  // Longer columns the processor fetches as well alone, and better where few rows leave it the time.
  bool uses_prefetch() const { return k_ <= (tiles_ > 1 ? 1024 : 256); }

  static constexpr long FEW_TILES = 4;  // of rows: sums of a tile of columns stay in registers, the weight is read once
  static constexpr long NEAR_TILES = 32;  // of those rows: they stay in the nearest cache
  static constexpr long NEAR_STEPS = 16;  // along k of two tiles of columns: so do they

  // [tile of columns][tile of rows], columns by rows
  const float* sums_of(const Weight<bf16>& w, long first, long columns, Prefetcher& prefetcher) {
    const long count = (columns + LANES - 1) / LANES;
    float* sums = sum_buffer_.get(count * tiles_ * TILE_WORDS);
    auto sums_at = [&](long c) { return sums + c * tiles_ * TILE_WORDS; };
    const bool is_few = tiles_ <= FEW_TILES;
    if (is_few && w.compressed) {
      auto compressed_at = [&](long c) { return w.compressed + (first / LANES + c) * compressed_bytes(k_); };
      const long half = tiles_ <= 2 ? count / 2 : 0;
      for (long c = 0; c < half; ++c) {
        CompressedColumn one(compressed_at(c), k_), other(compressed_at(half + c), k_);
        if (tiles_ == 1)
          two_columns<1>(one, other, sums_at(c), sums_at(half + c));
        else
          two_columns<2>(one, other, sums_at(c), sums_at(half + c));
      }
      for (long c = 2 * half; c < count; ++c) few_rows(CompressedColumn(compressed_at(c), k_), 0, steps_, sums_at(c), prefetcher);
      return sums;
    }
    const long copy_size = steps_ * 2 * TILE_WORDS;
    bf16* copies = copy_buffer_.get<bf16>((is_few ? count : 2) * copy_size);
    auto tiles_at = [&](long c, bf16* copy) {
      return tiles_of(w, first + c * LANES, std::min(LANES, columns - c * LANES), copy);
    };
    if (is_few) {
      ColumnTiles tiles[PANELS * PANEL / LANES];
      for (long c = 0; c < count; ++c) tiles[c] = tiles_at(c, copies + c * copy_size);
      const long near = NEAR_TILES / tiles_;
      for (long s = 0; s < steps_; s += near)
        for (long c = 0; c < count; ++c)
          few_rows(PlainColumn(tiles[c], s), s, std::min(near, steps_ - s), sums_at(c), prefetcher);
      return sums;
    }
    for (long c = 0; c < count; c += 2) {
      const ColumnTiles low = tiles_at(c, copies), high = c + 1 < count ? tiles_at(c + 1, copies + copy_size) : low;
      for (long s = 0; s < steps_; s += NEAR_STEPS)
        for (long t = 0; t < tiles_; t += 2)
          many_rows(low, high, t, s, std::min(NEAR_STEPS, steps_ - s), sums_at(c) + t * TILE_WORDS,
                    c + 1 < count ? tiles_ * TILE_WORDS : 0, prefetcher);
    }
    return sums;
  }

  // Two columns of sums, rounded, as words.
  static vf word_columns(const float* sums) {
    const vhh halves = narrow(load(sums), load(sums + LANES));
    return (vf)__builtin_shufflevector(halves, halves, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9,
                                       25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }

  // As they lie, decompressed, or where tiles would not be whole, copied with zeros behind.
  ColumnTiles tiles_of(const Weight<bf16>& w, long first, long columns, bf16* copy) const {
    if (w.compressed) {
      CompressedTiles decompressed(w.compressed + first / LANES * compressed_bytes(k_), k_);
      for (long s = 0; s < steps_; ++s) decompressed.decompress(copy + s * COMPRESSED_TILE);
      return {copy, COMPRESSED_TILE, COMPRESSED_K};
    }
    const bf16* from = w.data + first * w.n_stride;
    if (columns == LANES && k_ % TILE_K == 0) return {from, TILE_K, w.n_stride};
    bf16* to = copy;
    for (long s = 0; s < steps_; ++s)
      for (long i = 0; i < LANES; ++i, to += TILE_K)
        store_bits(to, i < columns ? load_words<Tiles>(from + i * w.n_stride + s * TILE_K, k_ - s * TILE_K) : vf{});
    return {copy, 2 * TILE_WORDS, TILE_K};
  }

  // Sixteen columns with up to four tiles of rows, `steps` along k.
  template <class Column>
  void few_rows(Column w, long start, long steps, float* sums, Prefetcher& prefetcher) const {
    switch (tiles_) {
      case 1: return one_column<1>(w, start, steps, sums, prefetcher);
      case 2: return one_column<2>(w, start, steps, sums, prefetcher);
      case 3: return one_column<3>(w, start, steps, sums, prefetcher);
      default: return one_column<4>(w, start, steps, sums, prefetcher);
    }
  }

  template <int ROWS, class Column>
  void one_column(Column& w, long start, long steps, float* sums, Prefetcher& prefetcher) const {
    const float* x = data_ + start * TILE_WORDS;
    const long next = steps_ * TILE_WORDS, stride = w.stride();
    if (start == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, sums, TILE_BYTES);
      if constexpr (ROWS > 1) _tile_loadd(1, sums + TILE_WORDS, TILE_BYTES);
      if constexpr (ROWS > 2) _tile_loadd(2, sums + 2 * TILE_WORDS, TILE_BYTES);
      if constexpr (ROWS > 3) _tile_loadd(3, sums + 3 * TILE_WORDS, TILE_BYTES);
    }
    for (long s = 0; s < steps; ++s, x += TILE_WORDS) {
      prefetcher.fetch<16>();
      _tile_loadd(4, w.next(), stride);
      _tile_loadd(5, x, TILE_BYTES);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (ROWS > 1) {
        _tile_loadd(6, x + next, TILE_BYTES);
        _tile_dpbf16ps(1, 4, 6);
      }
      if constexpr (ROWS > 2) {
        _tile_loadd(7, x + 2 * next, TILE_BYTES);
        _tile_dpbf16ps(2, 4, 7);
      }
      if constexpr (ROWS > 3) {
        _tile_loadd(5, x + 3 * next, TILE_BYTES);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, sums, TILE_BYTES);
    if constexpr (ROWS > 1) _tile_stored(1, sums + TILE_WORDS, TILE_BYTES);
    if constexpr (ROWS > 2) _tile_stored(2, sums + 2 * TILE_WORDS, TILE_BYTES);
    if constexpr (ROWS > 3) _tile_stored(3, sums + 3 * TILE_WORDS, TILE_BYTES);
  }

  // Twice sixteen columns with ROWS tiles of rows: memory is read the quicker at two addresses.
  template <int ROWS>
  void two_columns(CompressedColumn& low, CompressedColumn& high, float* low_sums, float* high_sums) const {
    const float* x = data_;
    const long next = steps_ * TILE_WORDS;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long s = 0; s < steps_; ++s, x += TILE_WORDS) {
      _tile_loadd(4, low.next(), low.stride());
      _tile_loadd(5, x, TILE_BYTES);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (ROWS > 1) {
        _tile_loadd(6, x + next, TILE_BYTES);
        _tile_dpbf16ps(1, 4, 6);
      }
      _tile_loadd(7, high.next(), high.stride());
      _tile_dpbf16ps(2, 7, 5);
      if constexpr (ROWS > 1) _tile_dpbf16ps(3, 7, 6);
    }
    _tile_stored(0, low_sums, TILE_BYTES);
    if constexpr (ROWS > 1) _tile_stored(1, low_sums + TILE_WORDS, TILE_BYTES);
    _tile_stored(2, high_sums, TILE_BYTES);
    if constexpr (ROWS > 1) _tile_stored(3, high_sums + TILE_WORDS, TILE_BYTES);
  }

  // Sixteen columns or twice sixteen (`apart` between their sums) with one or two tiles of rows.
  void many_rows(const ColumnTiles& low, const ColumnTiles& high, long tile, long start, long steps, float* sums,
                 long apart, Prefetcher& prefetcher) const {
    const long next = tile + 1 < tiles_ ? TILE_WORDS : 0;
    const float* x = data_ + (tile * steps_ + start) * TILE_WORDS;
    const float* second = next ? x + steps_ * TILE_WORDS : x;
    const long low_stride = low.stride * sizeof(bf16), high_stride = high.stride * sizeof(bf16);
    if (start == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, sums, TILE_BYTES);
      _tile_loadd(1, sums + apart, TILE_BYTES);
      _tile_loadd(2, sums + next, TILE_BYTES);
      _tile_loadd(3, sums + apart + next, TILE_BYTES);
    }
    for (long s = start; s < start + steps; ++s, x += TILE_WORDS, second += TILE_WORDS) {
      prefetcher.fetch<4>();
      _tile_loadd(4, low.data + s * low.step, low_stride);
      _tile_loadd(5, x, TILE_BYTES);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, high.data + s * high.step, high_stride);
      _tile_dpbf16ps(1, 6, 5);
      _tile_loadd(7, second, TILE_BYTES);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 6, 7);
    }
    // Where there is no second one it is the first again.
    _tile_stored(0, sums, TILE_BYTES);
    _tile_stored(1, sums + apart, TILE_BYTES);
    _tile_stored(2, sums + next, TILE_BYTES);
    _tile_stored(3, sums + apart + next, TILE_BYTES);
  }

  // sums[column][row] to out[row][column]
  static void store_rows(const float* sums, float* out) {
    vf block[LANES];
    for (long i = 0; i < LANES; ++i) block[i] = load(sums + i * LANES);
    transpose16(block);
    for (long i = 0; i < LANES; ++i) store(out + i * PANEL, block[i]);
  }

  Buffer buffer_, copy_buffer_, sum_buffer_;
  float* data_ = nullptr;  // [tile of rows][step][16 words][16 rows]
  long rows_ = 0, k_ = 0, tiles_ = 0, steps_ = 0;
};

// The same with weights whose columns lie side by side: these are paired along k, and the rows go into tiles as they lie.
class TilePanels {
 public:
  static constexpr long CHUNK_ROWS = 16 * LANES;  // rows

  template <class Row>
  void copy(Row row, long rows, long k) {
    rows_ = rows, k_ = k, steps_ = (k + TILE_K - 1) / TILE_K;
    data_ = row_buffer_.get<bf16>((rows + LANES) * steps_ * TILE_K);
    for (long i = 0; i < rows; ++i) {
      bf16* to = data_ + i * steps_ * TILE_K;
      std::memcpy(to, row(i), k * sizeof(bf16));
      std::fill(to + k, to + steps_ * TILE_K, bf16(0));
    }
  }

  // to(row)[column] = x times columns [first, first + columns) of w, at most PANELS * PANEL; rows like these begin at
  // `next` in what is read then.
  template <class To>
  void multiply(const Weight<bf16>& w, long first, long columns, const bf16* next, To to) {
    const long panels = (columns + PANEL - 1) / PANEL, apart = steps_ * 2 * TILE_WORDS;
    float* paired = pair_buffer_.get(panels * apart);
    for (long i = 0; i < steps_ * TILE_K; i += 2) {
      const bf16* row = w.data + i * w.k_stride + first;
      for (long p = 0; p < panels; ++p, row += PANEL) {
        const long left = std::min(PANEL, columns - p * PANEL);
        vhh even = {}, odd = {};
        if (left == PANEL && i + 1 < k_) {
          even = load_bits<vhh>(row), odd = load_bits<vhh>(row + w.k_stride);
        } else {
          if (i < k_) std::memcpy(&even, row, left * sizeof(bf16));
          if (i + 1 < k_) std::memcpy(&odd, row + w.k_stride, left * sizeof(bf16));
        }
        if (next) {
          _mm_prefetch(next + i * w.k_stride + p * PANEL, _MM_HINT_T1);
          _mm_prefetch(next + (i + 1) * w.k_stride + p * PANEL, _MM_HINT_T1);
        }
        vf low, high;
        interleave(even, odd, low, high);
        store(paired + p * apart + i / 2 * PANEL, low);
        store(paired + p * apart + i / 2 * PANEL + LANES, high);
      }
    }
    for (long row = 0; row < rows_; row += 2 * LANES)
      for (long p = 0; p < panels; ++p) {
        alignas(64) float sums[2 * LANES][PANEL];
        const long count = std::min(2 * LANES, rows_ - row);
        multiply_rows(row, count > LANES, paired + p * apart, sums);
        const long left = columns - p * PANEL;
        for (long i = 0; i < count; ++i)
          if (left >= PANEL)
            store_panel<Tiles>(to(row + i) + p * PANEL, sums[i]);
          else
            store_columns<Tiles>(to(row + i) + p * PANEL, sums[i], left);
      }
  }

 private:
  void multiply_rows(long row, bool has_second, const float* paired, float (*sums)[PANEL]) {
    const long stride = steps_ * TILE_K;
    const bf16 *x = data_ + row * stride, *second = has_second ? x + LANES * stride : x;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long s = 0; s < steps_; ++s, paired += 2 * TILE_WORDS) {
      _tile_loadd(4, x + s * TILE_K, stride * sizeof(bf16));
      _tile_loadd(5, paired, PANEL * sizeof(float));
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, paired + LANES, PANEL * sizeof(float));
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, second + s * TILE_K, stride * sizeof(bf16));
      _tile_dpbf16ps(2, 7, 5);
      _tile_dpbf16ps(3, 7, 6);
    }
    _tile_stored(0, sums[0], PANEL * sizeof(float));
    _tile_stored(1, sums[0] + LANES, PANEL * sizeof(float));
    _tile_stored(2, sums[LANES], PANEL * sizeof(float));
    _tile_stored(3, sums[LANES] + LANES, PANEL * sizeof(float));
  }

  Buffer row_buffer_, pair_buffer_;
  bf16* data_ = nullptr;  // [row][steps * 32]
  long rows_ = 0, k_ = 0, steps_ = 0;
};

template <class M>
using Rows = std::conditional_t<std::is_same_v<M, Tiles>, TileRows, PackedRows<M>>;
template <class M>
using Scope = std::conditional_t<std::is_same_v<M, Tiles>, TileScope, NoScope>;
template <class M>
constexpr bool by_row = std::is_same_v<M, Tiles>;  // experts' weights are [out, in] in memory, else [in, out]
#else
#define HAS_TILES 0
typedef Dot Tiles;
static inline bool may_use_tiles() { return false; }

template <class M>
using Rows = PackedRows<M>;
template <class M>
using Scope = NoScope;
template <class M>
constexpr bool by_row = false;
#endif
