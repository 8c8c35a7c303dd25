// Attention of tiles of sixteen queries to a span of the context by matrix tiles; a query is one token and one head.
//
// Scores are sixteen tokens' rows, read from the page, times the queries as words of pairs. Weighted sums are the queries'
// weights of 32 tokens times the columns of these tokens as words of pairs, packed once for all tiles of queries.
#pragma once
#include "span_vectors.h"
#include "tiles.h"

#if HAS_TILES
// Prefetches the rows of the next span into the second-level cache, as `Prefetcher` does with a range.
class RowPrefetcher {
 public:
  RowPrefetcher() = default;
  RowPrefetcher(const bf16* const* rows, long count, long size) : rows_(rows), end_of_rows_(rows + count), size_(size) {}
  void fetch(long times) {
    for (; times > 0; --times) {
      if (at_ >= end_ && !next_run()) return;
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) _mm_prefetch(at_ + i * 64, _MM_HINT_T1);
      at_ += 8 * 64;
    }
  }

 private:
  bool next_run() {  // the next rows that are contiguous
    if (rows_ == end_of_rows_) return false;
    const bf16* first = *rows_;
    const bf16* last = first;
    for (++rows_; rows_ != end_of_rows_ && *rows_ == last + size_; ++rows_) last = *rows_;
    at_ = (const char*)first, end_ = (const char*)(last + size_);
    return true;
  }

  const bf16* const* rows_ = nullptr;
  const bf16* const* end_of_rows_ = nullptr;
  long size_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
};

// What one thread does inside a TileScope: it sets tiles of up to sixteen queries, then attends to one span after another.
class TileSpan {
 public:
  static constexpr long QUERIES = LANES, TILES = 4;
  typedef RowPrefetcher Fetched;

  // Sets the elements [latent, then rope] of each query of a tile.
  template <class Latent, class Rope>
  void take_queries(long tile, Latent latent_of, Rope rope_of, long count, long latent, long rope) {
    size_ = latent + rope, steps_ = (size_ + TILE_K - 1) / TILE_K, num_queries_[tile] = count;
    float* queries = query_buffer_.get(TILES * steps_ * TILE_WORDS) + tile * steps_ * TILE_WORDS;
    if (latent % 2 == 0) {
      pack_rows<Dot>(latent_of, count, latent, queries, LANES);
      pack_rows<Dot>(rope_of, count, rope, queries + latent / 2 * LANES, LANES);
    } else {  // a pair has one element of each query
      bf16* whole = row_buffer_.get<bf16>(QUERIES * size_);
      for (long i = 0; i < count; ++i) {
        std::memcpy(whole + i * size_, latent_of(i), latent * sizeof(bf16));
        std::memcpy(whole + i * size_ + latent, rope_of(i), rope * sizeof(bf16));
      }
      pack_rows<Dot>([&](long i) { return whole + i * size_; }, count, size_, queries, LANES);
    }
    std::fill(queries + words<Dot>(size_) * LANES, queries + steps_ * TILE_WORDS, 0.0f);
  }

  // Computes the unnormalised weights of all tokens that the tile attends to. Of the `count` tokens that all its sequences
  // share, a query attends to the first `visible`. Lanes of peak and total are queries. Padding rows hold any finite values.
  void score(long tile, const Seen<bf16>& seen, vi visible, float scale, vf& peak, vf& total, RowPrefetcher& prefetcher) {
    rows_ = seen.rows, num_rows_ = seen.num_rows;
    const float* queries = query_buffer_.get(TILES * steps_ * TILE_WORDS) + tile * steps_ * TILE_WORDS;
    Steps& steps = tile_steps_[tile];
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float* scores = score_buffer_.get(num_rows_ * QUERIES);
    long padded = 0;  // tokens in the order of scores, rounded up to whole steps
    peak = splat(-INFINITY), total = vf{};
    auto add = [&](const Own& own, vi visible) {
      score_rows(queries, own.at, own.count, scores + padded * QUERIES, prefetcher);
      for (long i = 0; i < own.count; ++i) {
        float* to = scores + (padded + i) * QUERIES;
        const vf score = select(visible > (int)i, load(to) * scale, splat(-INFINITY));
        peak = maximum(peak, score);
        store(to, score);
      }
      for (long s = 0; s < own.count; s += TILE_K, padded += TILE_K) steps.row[padded / TILE_K] = own.at + s;
    };
    auto weigh = [&](const Own& own, float* scores) {
      for (long i = 0; i < own.count; ++i) {
        const vf weight = exp(load(scores + i * QUERIES) - peak);
        total += weight;
        if (i % 4 == 0) prefetcher.fetch(1);
        store(scores + i * QUERIES, weight);
      }
      const long whole = (own.count + TILE_K - 1) / TILE_K * TILE_K;
      std::fill(scores + own.count * QUERIES, scores + whole * QUERIES, 0.0f);
      return scores + whole * QUERIES;
    };
    const Own all{0, seen.count};
    add(all, visible);
    for (long i = 0; i < seen.num_owns; ++i) {
      const OwnOfLanes& of = seen.owns[i];
      add(of.own, ((lane >= (int)of.first) & (lane < (int)(of.first + of.lanes))) & (int)of.own.count);
    }
    float* after = weigh(all, scores);
    for (long i = 0; i < seen.num_owns; ++i) after = weigh(seen.owns[i].own, after);
    steps.count = padded / TILE_K;
    // transposes [token][query] to tiles [query][32 tokens]
    bf16* weights = weights_of(tile);
    for (long i = 0; i < padded; i += TILE_K) {
      vf block[LANES];
      for (long pair = 0; pair < LANES; ++pair) {
        const float* two = scores + (i + 2 * pair) * QUERIES;
        block[pair] = (vf)(round_bits(load(two)) >> 16 | (round_bits(load(two + QUERIES)) & 0xffff0000u));
      }
      transpose16(block);
      for (long q = 0; q < QUERIES; ++q) store_bits(weights + i * QUERIES + q * TILE_K, block[q]);
    }
  }

  // Calls take(tile, first, columns, sums) for every 32 columns of the rows and every tile: sums[query] = weights times
  // columns [first, first + columns).
  template <class Take>
  void weigh(long tiles, long latent, RowPrefetcher& prefetcher, Take take) {
    const long size = num_rows_ / TILE_K * TILE_WORDS * 2;
    float* paired = pair_buffer_.get(2 * size);
    for (long s = 0; s < num_rows_; s += TILE_K) pair_tokens(s, 0, std::min(PANEL, latent), paired + s * PANEL / 2);
    for (long first = 0; first < latent; first += PANEL) {
      // The next columns are packed meanwhile, because a tile load just after the stores is slow.
      const float* now = paired + first / PANEL % 2 * size;
      const long next = first + PANEL, left = std::min(PANEL, latent - next);
      float* to = paired + next / PANEL % 2 * size;
      long to_pair = left > 0 ? 0 : num_rows_;
      for (long tile = 0; tile < tiles; ++tile) {
        const bf16* weights = weights_of(tile);
        const Steps& steps = tile_steps_[tile];
        zero_tiles<2>();
        for (long i = 0; i < steps.count; ++i, weights += TILE_K * QUERIES) {
          const float* tokens = now + steps.row[i] * PANEL / 2;
          prefetcher.fetch(2);
          if (to_pair <= steps.row[i]) pair_tokens(to_pair, next, left, to + to_pair * PANEL / 2), to_pair += TILE_K;
          load_tile<4>(weights, TILE_BYTES);
          unroll<2>([&](auto half) {
            load_tile<5 + half>(tokens + half * LANES, PANEL * sizeof(float));
            multiply_tiles<half, 4, 5 + half>();
          });
        }
        vf sums[QUERIES][2];
        unroll<2>([&](auto half) { store_tile<half>(&sums[0][half], sizeof(sums[0])); });
        for (long q = 0; q < num_queries_[tile]; ++q) columns_in_order(sums[q][0], sums[q][1]);
        take(tile, first, std::min(PANEL, latent - first), sums);
      }
    }
  }

 private:
  struct Steps {  // the first rows of the steps of 32 that a tile of queries attends to
    long count, row[SPAN / TILE_K * (1 + QUERIES)];
  };

  // [steps][16 queries][32 tokens]
  bf16* weights_of(long tile) { return weight_buffer_.get<bf16>(TILES * num_rows_ * QUERIES) + tile * num_rows_ * QUERIES; }

  // Computes scores[token][query] of rows [first, first + count).
  void score_rows(const float* queries, long first, long count, float* scores, RowPrefetcher& prefetcher) {
    const long end = first + count;
    long s = first;
    for (; s + 3 * LANES < end; s += 4 * LANES, scores += 4 * TILE_WORDS) score_tiles<4>(queries, s, end, scores, prefetcher);
    const long left = (end - s + LANES - 1) / LANES;
    if (left == 3) score_tiles<3>(queries, s, end, scores, prefetcher);
    if (left == 2) score_tiles<2>(queries, s, end, scores, prefetcher);
    if (left == 1) score_tiles<1>(queries, s, end, scores, prefetcher);
  }

  // Returns the rows of sixteen tokens, `stride` elements apart: in their page, or copied where they are not contiguous or not
  // whole tiles.
  const bf16* tokens_at(long s, long end, Buffer& scratch, long& stride) const {
    if (size_ % TILE_K == 0 && rows_[s + LANES - 1] == rows_[s] + (LANES - 1) * size_) {
      stride = size_;
      return rows_[s];
    }
    stride = steps_ * TILE_K;
    bf16* to = scratch.get<bf16>(LANES * stride);
    std::memset(to, 0, LANES * stride * sizeof(bf16));
    for (long i = 0; i < std::min(LANES, end - s); ++i) std::memcpy(to + i * stride, rows_[s + i], size_ * sizeof(bf16));
    return to;
  }

  // Computes the scores of COUNT tiles of tokens from row s on.
  template <int COUNT>
  void score_tiles(const float* queries, long s, long end, float* scores, RowPrefetcher& prefetcher) {
    const bf16* tokens[COUNT];
    long strides[COUNT];
    for (int i = 0; i < COUNT; ++i) {
      tokens[i] = tokens_at(s + i * LANES, end, copies_[i], strides[i]);
      strides[i] *= sizeof(bf16);
    }
    zero_tiles<4>();
    for (long step = 0; step < steps_; ++step) {
      prefetcher.fetch(1);
      load_tile<4>(queries + step * TILE_WORDS, TILE_BYTES);
      unroll<COUNT>([&](auto i) {
        constexpr int operand = 5 + i % 3;
        load_tile<operand>(tokens[i] + step * TILE_K, strides[i]);
        multiply_tiles<i, operand, 4>();
      });
    }
    unroll<COUNT>([&](auto i) { store_tile<i>(scores + i * TILE_WORDS, TILE_BYTES); });
  }

  // Packs columns of 32 tokens from token s on as words of pairs, [16][32 columns], in the order of `zip`.
  void pair_tokens(long s, long first, long columns, float* out) const {
    for (long i = s; i < s + TILE_K; i += 2, out += PANEL) {
      const bf16 *even = rows_[i] + first, *odd = rows_[i + 1] + first;
      vf low, high;
      if (columns == PANEL)
        zip(load_bits<vhh>(even), load_bits<vhh>(odd), low, high);
      else
        zip(load_columns_of(even, columns), load_columns_of(odd, columns), low, high);
      store(out, low);
      store(out + LANES, high);
    }
  }
  static vhh load_columns_of(const bf16* row, long columns) {
    vhh found = {};
    std::memcpy(&found, row, columns * sizeof(bf16));
    return found;
  }

  // Interleaves to words of pairs within lanes of 128 bits, which is fast: 4 columns in `low`, then 4 in `high`.
  static void zip(vhh even, vhh odd, vf& low, vf& high) {
    low = (vf)__builtin_shufflevector(even, odd, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17,
                                      49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
    high = (vf)__builtin_shufflevector(even, odd, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52,
                                       21, 53, 22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
  }
  static void columns_in_order(vf& low, vf& high) {
    const vf a = low, b = high;
    low = LANES_OF(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    high = LANES_OF(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  }

  // For each tile: queries [step][16 words][16 queries], and weights.
  Buffer query_buffer_, weight_buffer_;
  Buffer row_buffer_, score_buffer_, pair_buffer_, copies_[4];
  const bf16* const* rows_ = nullptr;
  long size_ = 0, steps_ = 0, num_rows_ = 0, num_queries_[TILES] = {};
  Steps tile_steps_[TILES];
};
#else
typedef VectorSpan<Dot, 8> TileSpan;
#endif
