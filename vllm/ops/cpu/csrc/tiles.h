// Products by the processor's matrix tiles (AMX): sixteen columns of a weight by sixteen rows, 32 elements along k at once.
//
// A weight whose columns are contiguous along k, as in checkpoints, is loaded into tiles in memory order, so a product of few
// rows takes no longer than reading the weight. The rows are packed as words of pairs along k, as the instructions want one
// operand, and the sums are transposed.
//
// As elsewhere every output is one sum over k in order: an instruction adds the products of its 32 elements to a sum in
// order, and no row or column influences another.
#pragma once
#include <type_traits>

#include "gemm.h"

struct NoScope {
  ~NoScope() {}
};

#if defined(__AMX_BF16__) && defined(__linux__)
#include "tile_registers.h"
#define HAS_TILES 1

struct Tiles {  // bfloat16 tensors, products by matrix tiles
  typedef bf16 T;
  static constexpr bool is_dot = true;
};

// Sixteen columns of a weight: tile s begins at data + s * step, its rows (columns of the weight) are `stride` apart.
struct ColumnTiles {
  const bf16* data;
  long step, stride;
};

// Gives the tiles of a plain weight one after the other, in place.
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

// Gives those of a compressed weight.
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

// Prefetches a range into the second-level cache a little at a time during other work. Tiles that are read column by column
// are too many short streams for the processor to prefetch, and it would stall at every gap.
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

// Rows of x that one thread packs once, inside a TileScope, and multiplies with many panels of weights contiguous along k.
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

  // Few where the weight is prefetched: it arrives early enough, and little time is spent on waiting for the first ones.
  long panels_at_once(const Weight<bf16>&) const {
    return uses_prefetch() ? std::clamp(PREFETCH_BYTES / (PANEL * 2 * k_), 1L, PANELS) : PANELS;
  }

  // out[panel][rows_apart()][32] = x times columns [first, first + columns) of w, at most PANELS panels; `next` is what is
  // read next.
  void multiply(const Weight<bf16>& w, long first, long columns, float* out, MemoryRange next) {
    Prefetcher prefetcher(uses_prefetch() ? next : MemoryRange{});
    const float* sums = sums_of(w, first, columns, prefetcher);
    for (long c = 0; c * LANES < columns; ++c)
      for (long t = 0; t < tiles_; ++t)
        store_rows(sums + (c * tiles_ + t) * TILE_WORDS, out + (c / 2 * rows_apart() + t * LANES) * PANEL + c % 2 * LANES);
  }

  // The same, rounded and stored to to(row)[column].
  template <class To>
  void multiply_to(const Weight<bf16>& w, long first, long columns, To to, MemoryRange next) {
    Prefetcher prefetcher(uses_prefetch() ? next : MemoryRange{});
    // One panel at a time where nothing has to be read twice for it, so that its sums stay in the first-level cache.
    const long at_once = tiles_ <= FEW_TILES && steps_ <= NEAR_TILES / tiles_ ? PANEL : columns;
    for (long start = 0; start < columns; start += at_once) {
      const long count = std::min(at_once, columns - start);
      round_to(sums_of(w, first + start, count, prefetcher), count, [&](long i) { return to(i) + start; });
    }
  }

 private:
  static constexpr long PREFETCH_BYTES = 1 << 16;

  // Rounds the sums of `columns` and stores them to to(row)[column].
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

  // The processor prefetches longer columns as well itself, and better where there are few rows.
  bool uses_prefetch() const { return k_ <= (tiles_ > 1 ? 1024 : 256); }

  static constexpr long FEW_TILES = 4;  // tiles of rows whose sums stay in registers: the weight is read once
  static constexpr long NEAR_TILES = 32;  // tiles of rows that stay in the first-level cache
  static constexpr long NEAR_STEPS = 16;  // steps along k of two tiles of columns that stay there too

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

  // In place, decompressed, or, where tiles would not be whole, copied and padded with zeros.
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

  // Multiplies sixteen columns with up to four tiles of rows, `steps` along k.
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
    if (start == 0)
      zero_tiles<4>();
    else
      unroll<ROWS>([&](auto row) { load_tile<row>(sums + row * TILE_WORDS, TILE_BYTES); });
    for (long s = 0; s < steps; ++s, x += TILE_WORDS) {
      prefetcher.fetch<16>();
      load_tile<4>(w.next(), stride);
      unroll<ROWS>([&](auto row) {
        constexpr int operand = 5 + row % 3;
        load_tile<operand>(x + row * next, TILE_BYTES);
        multiply_tiles<row, 4, operand>();
      });
    }
    unroll<ROWS>([&](auto row) { store_tile<row>(sums + row * TILE_WORDS, TILE_BYTES); });
  }

  // Multiplies two columns of tiles with ROWS tiles of rows: reading memory at two places at once is faster.
  template <int ROWS>
  void two_columns(CompressedColumn& low, CompressedColumn& high, float* low_sums, float* high_sums) const {
    const float* x = data_;
    const long next = steps_ * TILE_WORDS;
    zero_tiles<4>();
    for (long s = 0; s < steps_; ++s, x += TILE_WORDS) {
      load_tile<4>(low.next(), low.stride());
      unroll<ROWS>([&](auto row) {
        load_tile<5 + row>(x + row * next, TILE_BYTES);
        multiply_tiles<row, 4, 5 + row>();
      });
      load_tile<7>(high.next(), high.stride());
      unroll<ROWS>([&](auto row) { multiply_tiles<2 + row, 7, 5 + row>(); });
    }
    unroll<ROWS>([&](auto row) { store_tile<row>(low_sums + row * TILE_WORDS, TILE_BYTES); });
    unroll<ROWS>([&](auto row) { store_tile<2 + row>(high_sums + row * TILE_WORDS, TILE_BYTES); });
  }

  // Multiplies one or two columns of tiles (`apart` floats between their sums) with one or two tiles of rows. Without a
  // second one, the first takes its place and the same sums are stored twice.
  void many_rows(const ColumnTiles& low, const ColumnTiles& high, long tile, long start, long steps, float* sums,
                 long apart, Prefetcher& prefetcher) const {
    const long next = tile + 1 < tiles_ ? TILE_WORDS : 0;
    const float* x = data_ + (tile * steps_ + start) * TILE_WORDS;
    const float* second = next ? x + steps_ * TILE_WORDS : x;
    const long low_stride = low.stride * sizeof(bf16), high_stride = high.stride * sizeof(bf16);
    auto sums_at = [&](int i) { return sums + i % 2 * apart + i / 2 * next; };
    if (start == 0)
      zero_tiles<4>();
    else
      unroll<4>([&](auto i) { load_tile<i>(sums_at(i), TILE_BYTES); });
    for (long s = start; s < start + steps; ++s, x += TILE_WORDS, second += TILE_WORDS) {
      prefetcher.fetch<4>();
      load_tile<4>(low.data + s * low.step, low_stride);
      load_tile<5>(x, TILE_BYTES);
      multiply_tiles<0, 4, 5>();
      load_tile<6>(high.data + s * high.step, high_stride);
      multiply_tiles<1, 6, 5>();
      load_tile<7>(second, TILE_BYTES);
      multiply_tiles<2, 4, 7>();
      multiply_tiles<3, 6, 7>();
    }
    unroll<4>([&](auto i) { store_tile<i>(sums_at(i), TILE_BYTES); });
  }

  // Transposes sums[column][row] to out[row][column].
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
