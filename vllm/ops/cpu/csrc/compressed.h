// Bfloat16 matrices in three quarters of their bytes, bit for bit: weights of a layer have few different exponents.
//
// The low byte of a value is stored as it is: the mantissa and, above it, the lowest bit of the exponent. The sign and
// three more bits of the exponent, relative to the block's lowest exponent, take half a byte, so a block covers sixteen
// exponents. A block of 16 rows by 128 has room for fifteen values with other exponents; a matrix with more of them in some
// block is not compressed. DFloat11 (arXiv:2504.11651) had the idea to code exponents by their entropy and to decompress
// weights where they are multiplied; codes of one width need only a few vector instructions.
#pragma once
#include <omp.h>

#include <algorithm>

#include "vec.h"

typedef uint8_t vb __attribute__((vector_size(64)));

constexpr long COMPRESSED_ROWS = 16;      // rows of a tile; a row is contiguous along k
constexpr long COMPRESSED_K = 32;         // elements of a row in a tile; tiles follow one another along k
constexpr long COMPRESSED_TILE = COMPRESSED_ROWS * COMPRESSED_K;
constexpr long COMPRESSED_TILE_BYTES = COMPRESSED_TILE * 3 / 2;  // per 4 rows two vectors of low bytes, one of halves
constexpr long BLOCK_TILES = 4;
constexpr long MAX_OUTLIERS = 15;
constexpr long COMPRESSED_PREFETCH = 4096;  // bytes ahead of decompression

struct alignas(64) BlockHeader {  // the tiles of the block follow
  uint16_t others, lowest;      // number of values with other exponents; the lowest of the sixteen exponents
  struct {
    uint16_t at, value;
  } other[MAX_OUTLIERS];
};
static_assert(sizeof(BlockHeader) == 64);

// Bytes of 16 compressed rows; k is a multiple of COMPRESSED_K.
static inline long compressed_bytes(long k) {
  const long tiles = k / COMPRESSED_K;
  return tiles * COMPRESSED_TILE_BYTES + (tiles + BLOCK_TILES - 1) / BLOCK_TILES * (long)sizeof(BlockHeader);
}

// Within each lane of 16 bytes: interleave the first or the last eight bytes of both vectors; low_bytes undoes it.
#define EIGHT(X, l, f) X(l, f), X(l, f + 1), X(l, f + 2), X(l, f + 3), X(l, f + 4), X(l, f + 5), X(l, f + 6), X(l, f + 7)
#define OF_LANES(X, f) EIGHT(X, 0, f), EIGHT(X, 16, f), EIGHT(X, 32, f), EIGHT(X, 48, f)
#define IN_TURNS(l, i) l + i, 64 + l + i
#define EVERY_OTHER(l, f) \
  l + f, l + f + 2, l + f + 4, l + f + 6, l + f + 8, l + f + 10, l + f + 12, l + f + 14, 64 + l + f, 64 + l + f + 2, \
  64 + l + f + 4, 64 + l + f + 6, 64 + l + f + 8, 64 + l + f + 10, 64 + l + f + 12, 64 + l + f + 14
static inline vhh first_words(vb low, vb high) { return (vhh)__builtin_shufflevector(low, high, OF_LANES(IN_TURNS, 0)); }
static inline vhh last_words(vb low, vb high) { return (vhh)__builtin_shufflevector(low, high, OF_LANES(IN_TURNS, 8)); }
static inline vb low_bytes(vhh first, vhh last) {
  return __builtin_shufflevector((vb)first, (vb)last, EVERY_OTHER(0, 0), EVERY_OTHER(16, 0), EVERY_OTHER(32, 0),
                                 EVERY_OTHER(48, 0));
}
#undef EIGHT
#undef OF_LANES
#undef IN_TURNS
#undef EVERY_OTHER

// Writes the 16 rows of 32 values of a tile, one after the other.
static inline void decompress_tile(const uint8_t* compressed, vhh lowest, bf16* out) {
#pragma GCC unroll 4
  for (long four = 0; four < COMPRESSED_ROWS / 4; ++four, compressed += 192, out += 4 * COMPRESSED_K) {
    const vb low[2] = {load_bits<vb>(compressed), load_bits<vb>(compressed + 64)};
    const vb halves = load_bits<vb>(compressed + 128);  // sign and exponent; those of low[0] in the upper halves
    const vb above = (vb)((vhh)halves >> 4), below = (vb)((vhh)halves << 4);
    const vb high[2] = {(halves & 0x80) | (above & 0x07), (below & 0x80) | (halves & 0x07)};
    for (long i = 0; i < 2; ++i) {
      store_bits(out + 2 * i * COMPRESSED_K, first_words(low[i], high[i]) + lowest);
      store_bits(out + (2 * i + 1) * COMPRESSED_K, last_words(low[i], high[i]) + lowest);
    }
  }
}

// Decompresses sixteen rows, one tile of 16 by 32 after the other.
class CompressedTiles {
 public:
  CompressedTiles(const uint8_t* compressed, long k) : at_(compressed), tiles_(k / COMPRESSED_K) {}

  // Decompresses the next tile, if there is one.
  void decompress(bf16* out) {
    if (done_ == tiles_) return;
    const long of_block = done_++ % BLOCK_TILES;
    if (of_block == 0) {
      head_ = (const BlockHeader*)at_;
      lowest_ = vhh{} + (uint16_t)(head_->lowest << 7);
      other_ = 0;
      at_ += sizeof(BlockHeader);
    }
    for (long i = 0; i <= COMPRESSED_TILE_BYTES; i += 64) __builtin_prefetch(at_ + COMPRESSED_PREFETCH + i, 0, 2);
    decompress_tile(at_, lowest_, out);
    at_ += COMPRESSED_TILE_BYTES;
    for (; other_ < head_->others && head_->other[other_].at < (of_block + 1) * COMPRESSED_TILE; ++other_)
      out[head_->other[other_].at - of_block * COMPRESSED_TILE] = head_->other[other_].value;
  }

 private:
  const uint8_t* at_;
  const BlockHeader* head_ = nullptr;
  vhh lowest_ = {};
  long tiles_, done_ = 0, other_ = 0;
};

// Returns the lowest of the sixteen consecutive exponents that cover the most values.
static inline long best_lowest(const bf16* values, long count) {
  long of_exponent[256] = {}, among = 0, best = 0, most = -1;
  for (long i = 0; i < count; ++i) ++of_exponent[values[i] >> 7 & 0xff];
  for (long e = 0; e < 256; ++e) {
    among += of_exponent[e] - (e >= 16 ? of_exponent[e - 16] : 0);
    if (e >= 15 && among > most) most = among, best = e - 15;
  }
  return best;
}

// Writes four rows in the form that decompress_tile reads.
static inline void compress_four_rows(const bf16* rows, uint16_t lowest, uint8_t* compressed) {
  vb high[2];
  for (long i = 0; i < 2; ++i) {
    const vhh first = load_bits<vhh>(rows + 2 * i * COMPRESSED_K), last = load_bits<vhh>(rows + (2 * i + 1) * COMPRESSED_K);
    const vhh a = (first & 0x7fff) - lowest, b = (last & 0x7fff) - lowest;
    store_bits(compressed + i * 64, low_bytes(a, b));
    high[i] = low_bytes((first >> 8 & 0x80) | (a >> 8 & 0x07), (last >> 8 & 0x80) | (b >> 8 & 0x07));
  }
  const vb above = (vb)((vhh)high[0] << 4), below = (vb)((vhh)high[1] >> 4);
  store_bits(compressed + 128, (high[0] & 0x80) | (above & 0x70) | (below & 0x08) | (high[1] & 0x07));
}

// Compresses one block of tiles; returns false when more than MAX_OUTLIERS values have other exponents.
static inline bool compress_block(const bf16* tiles, long count, uint8_t* compressed) {
  BlockHeader head = {};
  auto is_other = [&](bf16 value) { return (uint16_t)((value & 0x7f80) - (head.lowest << 7)) >= 16 << 7; };
  auto num_others = [&](long lowest) {
    head.lowest = lowest;
    uint16_t others = 0;
    for (long i = 0; i < count; ++i) others += is_other(tiles[i]);
    return others;
  };
  uint16_t highest = 0;
  for (long i = 0; i < count; ++i) highest = std::max(highest, (uint16_t)(tiles[i] & 0x7f80));
  long others = num_others(std::max(0, (highest >> 7) - 15));
  if (others > MAX_OUTLIERS) others = num_others(best_lowest(tiles, count));
  if (others > MAX_OUTLIERS) return false;
  for (long i = 0; others > head.others && i < count; ++i)
    if (is_other(tiles[i])) head.other[head.others++] = {(uint16_t)i, tiles[i]};
  std::memcpy(compressed, &head, sizeof(head));
  compressed += sizeof(head);
  for (long i = 0; i < count; i += 4 * COMPRESSED_K, compressed += 192) compress_four_rows(tiles + i, head.lowest << 7, compressed);
  return true;
}

static inline bool is_exact(const uint8_t* compressed, const bf16* tiles, long count) {
  CompressedTiles decompressed(compressed, count * COMPRESSED_K);
  alignas(64) bf16 tile[COMPRESSED_TILE];
  for (long t = 0; t < count; ++t) {
    decompressed.decompress(tile);
    if (std::memcmp(tile, tiles + t * COMPRESSED_TILE, sizeof(tile)) != 0) return false;
  }
  return true;
}

static inline int compression_threads(long rows, long k) { return rows * k < 1 << 16 ? 1 : omp_get_max_threads(); }

// Compresses rows x k values and returns whether decompression gives them back. Rows are `stride` elements apart; their
// number is a multiple of COMPRESSED_ROWS.
static bool compress(const bf16* values, long stride, long rows, long k, uint8_t* compressed) {
  const long size = compressed_bytes(k), tiles = k / COMPRESSED_K;
  bool fits = true;
#pragma omp parallel for reduction(&& : fits) num_threads(compression_threads(rows, k))
  for (long first = 0; first < rows; first += COMPRESSED_ROWS) {
    alignas(64) bf16 block[BLOCK_TILES * COMPRESSED_TILE];
    uint8_t* to = compressed + first / COMPRESSED_ROWS * size;
    for (long start = 0; fits && start < tiles; start += BLOCK_TILES) {
      const long count = std::min(BLOCK_TILES, tiles - start);
      for (long i = 0; i < COMPRESSED_ROWS; ++i)
        for (long t = 0; t < count; ++t)
          std::memcpy(block + t * COMPRESSED_TILE + i * COMPRESSED_K, values + (first + i) * stride + (start + t) * COMPRESSED_K,
                      COMPRESSED_K * sizeof(bf16));
      fits = compress_block(block, count * COMPRESSED_TILE, to) && is_exact(to, block, count);
      to += sizeof(BlockHeader) + count * COMPRESSED_TILE_BYTES;
    }
  }
  return fits;
}

// Writes the values that were compressed to contiguous rows.
static void decompress(const uint8_t* compressed, long rows, long k, bf16* values) {
  const long size = compressed_bytes(k), tiles = k / COMPRESSED_K;
#pragma omp parallel for num_threads(compression_threads(rows, k))
  for (long first = 0; first < rows; first += COMPRESSED_ROWS) {
    alignas(64) bf16 block[BLOCK_TILES * COMPRESSED_TILE];
    const uint8_t* from = compressed + first / COMPRESSED_ROWS * size;
    for (long start = 0; start < tiles; start += BLOCK_TILES) {
      const long count = std::min(BLOCK_TILES, tiles - start);
      CompressedTiles decompressed(from, count * COMPRESSED_K);
      for (long t = 0; t < count; ++t) decompressed.decompress(block + t * COMPRESSED_TILE);
      from += compressed_bytes(count * COMPRESSED_K);
      for (long i = 0; i < COMPRESSED_ROWS; ++i)
        for (long t = 0; t < count; ++t)
          std::memcpy(values + (first + i) * k + (start + t) * COMPRESSED_K, block + t * COMPRESSED_TILE + i * COMPRESSED_K,
                      COMPRESSED_K * sizeof(bf16));
    }
  }
}
