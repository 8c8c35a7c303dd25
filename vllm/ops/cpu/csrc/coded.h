// Bfloat16 matrices in three quarters of their bytes, bit for bit: weights of a layer have few different exponents.
//
// Of a value the low byte stays as it is, with the lowest bit of the exponent on top of the mantissa; sign and three bits
// more of the exponent, counted from the block's lowest, are half a byte: sixteen exponents in all. A block of 16 rows by
// 128 has room for fifteen values with other exponents; a matrix that needs more in some block is not coded. To store
// weights by the entropy of their exponents and widen them where they are multiplied is the idea of DFloat11
// (arXiv:2504.11651); of codes of one width a few vector instructions make values.
#pragma once
#include <omp.h>

#include <algorithm>

#include "vec.h"

typedef uint8_t vb __attribute__((vector_size(64)));

constexpr long CODED_ROWS = 16;      // of a matrix whose rows lie along k
constexpr long CODED_K = 32;         // a tile's, in tiles one after the other along k
constexpr long CODED_TILE = CODED_ROWS * CODED_K;
constexpr long CODED_TILE_BYTES = CODED_TILE * 3 / 2;  // of 4 rows at a time: two vectors of low bytes, one of halves
constexpr long TILES_OF_BLOCK = 4;
constexpr long MOST_OTHERS = 15;
constexpr long CODED_AHEAD = 4096;  // bytes that are fetched before they are decoded

struct alignas(64) CodedHead {  // of a block; its tiles follow
  uint16_t others, lowest;      // how many values there are with other exponents; the lowest exponent of sixteen
  struct {
    uint16_t at, value;
  } other[MOST_OTHERS];
};
static_assert(sizeof(CodedHead) == 64);

// Of 16 rows; k a multiple of CODED_K.
static inline long coded_bytes(long k) {
  const long tiles = k / CODED_K;
  return tiles * CODED_TILE_BYTES + (tiles + TILES_OF_BLOCK - 1) / TILES_OF_BLOCK * (long)sizeof(CodedHead);
}

// Of each lane of 16 bytes: those of a and b in turns, the first eight or the last eight of both; and back.
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

// A tile's 16 rows of 32, one after the other.
static inline void decode_tile(const uint8_t* coded, vhh lowest, bf16* out) {
#pragma GCC unroll 4
  for (long four = 0; four < CODED_ROWS / 4; ++four, coded += 192, out += 4 * CODED_K) {
    const vb low[2] = {load_bits<vb>(coded), load_bits<vb>(coded + 64)};
    const vb halves = load_bits<vb>(coded + 128);  // sign and exponent: of the first vector above, of the second below
    const vb above = (vb)((vhh)halves >> 4), below = (vb)((vhh)halves << 4);
    const vb high[2] = {(halves & 0x80) | (above & 0x07), (below & 0x80) | (halves & 0x07)};
    for (long i = 0; i < 2; ++i) {
      store_bits(out + 2 * i * CODED_K, first_words(low[i], high[i]) + lowest);
      store_bits(out + (2 * i + 1) * CODED_K, last_words(low[i], high[i]) + lowest);
    }
  }
}

// Sixteen rows, a tile of 16 by 32 after the other.
class CodedTiles {
 public:
  CodedTiles(const uint8_t* coded, long k) : at_(coded), tiles_(k / CODED_K) {}

  // The next tile, if there is one.
  void decode(bf16* out) {
    if (done_ == tiles_) return;
    const long of_block = done_++ % TILES_OF_BLOCK;
    if (of_block == 0) {
      head_ = (const CodedHead*)at_;
      lowest_ = vhh{} + (uint16_t)(head_->lowest << 7);
      other_ = 0;
      at_ += sizeof(CodedHead);
    }
    for (long i = 0; i <= CODED_TILE_BYTES; i += 64) __builtin_prefetch(at_ + CODED_AHEAD + i, 0, 2);
    decode_tile(at_, lowest_, out);
    at_ += CODED_TILE_BYTES;
    for (; other_ < head_->others && head_->other[other_].at < (of_block + 1) * CODED_TILE; ++other_)
      out[head_->other[other_].at - of_block * CODED_TILE] = head_->other[other_].value;
  }

 private:
  const uint8_t* at_;
  const CodedHead* head_ = nullptr;
  vhh lowest_ = {};
  long tiles_, done_ = 0, other_ = 0;
};

// Which sixteen exponents leave out the fewest of the values: the lowest of them.
static inline long best_lowest(const bf16* values, long count) {
  long of_exponent[256] = {}, among = 0, best = 0, most = -1;
  for (long i = 0; i < count; ++i) ++of_exponent[values[i] >> 7 & 0xff];
  for (long e = 0; e < 256; ++e) {
    among += of_exponent[e] - (e >= 16 ? of_exponent[e - 16] : 0);
    if (e >= 15 && among > most) most = among, best = e - 15;
  }
  return best;
}

// What decode_tile reads of four rows.
static inline void encode_four(const bf16* rows, uint16_t lowest, uint8_t* coded) {
  vb high[2];
  for (long i = 0; i < 2; ++i) {
    const vhh first = load_bits<vhh>(rows + 2 * i * CODED_K), last = load_bits<vhh>(rows + (2 * i + 1) * CODED_K);
    const vhh a = (first & 0x7fff) - lowest, b = (last & 0x7fff) - lowest;
    store_bits(coded + i * 64, low_bytes(a, b));
    high[i] = low_bytes((first >> 8 & 0x80) | (a >> 8 & 0x07), (last >> 8 & 0x80) | (b >> 8 & 0x07));
  }
  const vb above = (vb)((vhh)high[0] << 4), below = (vb)((vhh)high[1] >> 4);
  store_bits(coded + 128, (high[0] & 0x80) | (above & 0x70) | (below & 0x08) | (high[1] & 0x07));
}

// One block of tiles; false where more than MOST_OTHERS values have other exponents.
static inline bool encode_block(const bf16* tiles, long count, uint8_t* coded) {
  CodedHead head = {};
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
  if (others > MOST_OTHERS) others = num_others(best_lowest(tiles, count));
  if (others > MOST_OTHERS) return false;
  for (long i = 0; others > head.others && i < count; ++i)
    if (is_other(tiles[i])) head.other[head.others++] = {(uint16_t)i, tiles[i]};
  std::memcpy(coded, &head, sizeof(head));
  coded += sizeof(head);
  for (long i = 0; i < count; i += 4 * CODED_K, coded += 192) encode_four(tiles + i, head.lowest << 7, coded);
  return true;
}

static inline bool is_code_of(const uint8_t* coded, const bf16* tiles, long count) {
  CodedTiles decoded(coded, count * CODED_K);
  alignas(64) bf16 tile[CODED_TILE];
  for (long t = 0; t < count; ++t) {
    decoded.decode(tile);
    if (std::memcmp(tile, tiles + t * CODED_TILE, sizeof(tile)) != 0) return false;
  }
  return true;
}

static inline int coding_threads(long rows, long k) { return rows * k < 1 << 16 ? 1 : omp_get_max_threads(); }

// rows x k values to their code; whether it gives them back. Rows are `stride` elements apart and a multiple of CODED_ROWS.
static bool encode(const bf16* values, long stride, long rows, long k, uint8_t* coded) {
  const long size = coded_bytes(k), tiles = k / CODED_K;
  bool fits = true;
#pragma omp parallel for reduction(&& : fits) num_threads(coding_threads(rows, k))
  for (long first = 0; first < rows; first += CODED_ROWS) {
    alignas(64) bf16 block[TILES_OF_BLOCK * CODED_TILE];
    uint8_t* to = coded + first / CODED_ROWS * size;
    for (long start = 0; fits && start < tiles; start += TILES_OF_BLOCK) {
      const long count = std::min(TILES_OF_BLOCK, tiles - start);
      for (long i = 0; i < CODED_ROWS; ++i)
        for (long t = 0; t < count; ++t)
          std::memcpy(block + t * CODED_TILE + i * CODED_K, values + (first + i) * stride + (start + t) * CODED_K,
                      CODED_K * sizeof(bf16));
      fits = encode_block(block, count * CODED_TILE, to) && is_code_of(to, block, count);
      to += sizeof(CodedHead) + count * CODED_TILE_BYTES;
    }
  }
  return fits;
}

// The values that were coded, to rows one after the other.
static void decode(const uint8_t* coded, long rows, long k, bf16* values) {
  const long size = coded_bytes(k), tiles = k / CODED_K;
#pragma omp parallel for num_threads(coding_threads(rows, k))
  for (long first = 0; first < rows; first += CODED_ROWS) {
    alignas(64) bf16 block[TILES_OF_BLOCK * CODED_TILE];
    const uint8_t* from = coded + first / CODED_ROWS * size;
    for (long start = 0; start < tiles; start += TILES_OF_BLOCK) {
      const long count = std::min(TILES_OF_BLOCK, tiles - start);
      CodedTiles decoded(from, count * CODED_K);
      for (long t = 0; t < count; ++t) decoded.decode(block + t * CODED_TILE);
      from += coded_bytes(count * CODED_K);
      for (long i = 0; i < CODED_ROWS; ++i)
        for (long t = 0; t < count; ++t)
          std::memcpy(values + (first + i) * k + (start + t) * CODED_K, block + t * CODED_TILE + i * CODED_K,
                      CODED_K * sizeof(bf16));
    }
  }
}
