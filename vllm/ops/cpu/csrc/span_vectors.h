// Attention of a few heads to a span of the context by vectors: a register holds some tokens' scores, then columns of latents.
#pragma once
#include <cmath>

#include "linear.h"

constexpr long SPAN = 512;  // tokens; a multiple of a tile
template <int HEADS>  // 4 or 8, of which a register holds so many tokens' scores
constexpr int TOKENS = LANES / HEADS;

// Tokens of one sequence after those that all sequences share: rows [at, at + count), padded to whole steps.
struct Own {
  long at = 0, count = 0;
};
struct OwnOfLanes {  // `lanes` lanes of a tile from `first` on attend to it
  Own own;
  long first, lanes;
};

// What a tile of queries attends to in a span: the rows of `count` shared tokens, then each sequence's own.
template <class T>
struct Seen {
  const T* const* rows;
  long count, num_rows;  // num_rows in whole steps, with rows of other tiles
  const OwnOfLanes* owns;
  long num_owns;
};

// Elements of a query or a cached row in one step of a score, and the number of words they take.
template <class M>
constexpr long STEP = sizeof(typename M::T) == 2 ? 2 * LANES : LANES;
template <class M>
constexpr long STEP_WORDS = is_split<M> ? 2 * LANES : LANES;

// Computes scores[token][HEADS] of `count` tokens; queries are words [HEADS][steps][STEP_WORDS], padded with zeros.
template <class M, int HEADS>
static void score_tokens(const float* q, const typename M::T* const* rows, long count, long size, float scale,
                         float* scores) {
  constexpr long step = STEP<M>;
  const long whole = size / step, stride = (size + step - 1) / step * STEP_WORDS<M>;
  for (long s = 0; s < count; s += TOKENS<HEADS>) {
    const typename M::T *now[TOKENS<HEADS>], *next[TOKENS<HEADS>];
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS<HEADS>; ++t) {
      now[t] = rows[std::min(s + t, count - 1)];
      next[t] = rows[std::min(s + TOKENS<HEADS> + t, count - 1)];
    }
    vf sums[LANES] = {};
    auto add = [&](const float* words, const vf* keys) {
#pragma GCC unroll 8
      for (int h = 0; h < HEADS; ++h) {
        const vf query = load(words + h * stride);
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS<HEADS>; ++t) sums[t * HEADS + h] = multiply_add<M>(sums[t * HEADS + h], query, keys[t]);
      }
    };
    auto add_step = [&](long i, long left) {
      const float* words = q + i * STEP_WORDS<M>;
      vf first[TOKENS<HEADS>], second[TOKENS<HEADS>];
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS<HEADS>; ++t) {
        if constexpr (is_split<M>)
          load_columns_n(now[t] + i * step, left, first[t], second[t]);
        else
          first[t] = load_words<M>(now[t] + i * step, left);
      }
      add(words, first);
      if constexpr (is_split<M>) add(words + LANES, second);
    };
    for (long i = 0; i < whole; ++i) {
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS<HEADS>; ++t) __builtin_prefetch(next[t] + i * step);
      add_step(i, step);
    }
    if (whole * step < size) add_step(whole, size - whole * step);
    store(scores + s * HEADS, row_sums(sums) * scale);
  }
}

// Turns scores[token][HEADS] into unnormalised weights; the first lanes of peak and total are the heads.
template <int HEADS>
static void softmax_span(float* scores, long count, vf& peak, vf& total) {
  auto over_tokens = [](vf v, auto join) {
    v = join(v, LANES_OF(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    if constexpr (HEADS == 4) v = join(v, LANES_OF(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    return v;
  };
  const long vectors = (count + TOKENS<HEADS> - 1) / TOKENS<HEADS>;
  for (long i = count * HEADS; i < vectors * LANES; ++i) scores[i] = -INFINITY;
  peak = splat(-INFINITY), total = vf{};
  for (long i = 0; i < vectors; ++i) peak = maximum(peak, load(scores + i * LANES));
  peak = over_tokens(peak, [](vf a, vf b) { return maximum(a, b); });
  for (long i = 0; i < vectors; ++i) {
    vf weight = exp(load(scores + i * LANES) - peak);
    total += weight;
    store(scores + i * LANES, weight);
  }
  total = over_tokens(total, [](vf a, vf b) { return a + b; });
}

// sums[HEADS][32 columns] = weights[token][HEADS] times the rows' columns
template <class M, int HEADS, bool IS_WHOLE>
static void weigh_columns(const float* weights, const typename M::T* const* rows, long count, long first, long columns,
                          vf (*sums)[2]) {
  typedef typename M::T T;
  for (int h = 0; h < HEADS; ++h) sums[h][0] = sums[h][1] = vf{};
  for (long s = 0; s < count; s += M::is_dot ? 2 : 1) {
    vf low, high;
    const T* row = rows[s] + first;
    if constexpr (M::is_dot) {
      vhh pair[2] = {};
      std::memcpy(&pair[0], row, (IS_WHOLE ? PANEL : columns) * sizeof(T));
      if (s + 1 < count) std::memcpy(&pair[1], rows[s + 1] + first, (IS_WHOLE ? PANEL : columns) * sizeof(T));
      interleave(pair[0], pair[1], low, high);
    } else {
      load_columns_n(row, IS_WHOLE ? PANEL : columns, low, high);
    }
    const float* weight = weights + s / (M::is_dot ? 2 : 1) * HEADS;
#pragma GCC unroll 8
    for (int h = 0; h < HEADS; ++h) {
      vf w = splat(weight[h]);
      sums[h][0] = multiply_add<M>(sums[h][0], w, low);
      sums[h][1] = multiply_add<M>(sums[h][1], w, high);
    }
  }
  for (int h = 0; h < HEADS; ++h) in_order<M>(sums[h][0], sums[h][1]);
}

// Rounds the weights to bfloat16 pairs in place: [token][HEADS] floats to [pair][HEADS] words.
template <int HEADS>
static void pair_weights(float* weights, long count) {
  for (long i = 0; i < (count + TOKENS<HEADS> - 1) / TOKENS<HEADS>; ++i) {
    const vh halves = narrow(load(weights + i * LANES));
    uint32_t words[LANES / 2];
    for (int w = 0; w < LANES / 2; ++w) {
      const int first = w / HEADS * 2 * HEADS + w % HEADS;
      words[w] = halves[first] | (uint32_t)halves[first + HEADS] << 16;
    }
    std::memcpy(weights + i * (LANES / 2), words, sizeof(words));
  }
}

// What one thread does: it sets queries of up to HEADS heads, then attends to one span after another.
template <class M, int HEADS>
class VectorSpan {
 public:
  typedef typename M::T T;
  static constexpr long QUERIES = HEADS, TILES = 1;
  struct Fetched {  // nothing: the processor prefetches rows as well itself
    Fetched() = default;
    Fetched(const T* const*, long, long) {}
  };

  // Sets the elements [latent, then rope] of each head's query.
  template <class Latent, class Rope>
  void take_queries(long, Latent latent_of, Rope rope_of, long heads, long latent, long rope) {
    size_ = latent + rope;
    const long steps = (size_ + STEP<M> - 1) / STEP<M>, words = steps * STEP_WORDS<M>;
    queries_ = query_buffer_.get(QUERIES * words);
    T* query = row_buffer_.get<T>(steps * STEP<M>);
    std::fill(query + size_, query + steps * STEP<M>, T(0));
    std::memset(queries_ + heads * words, 0, (QUERIES - heads) * words * sizeof(float));
    for (long h = 0; h < heads; ++h) {
      std::memcpy(query, latent_of(h), latent * sizeof(T));
      std::memcpy(query + latent, rope_of(h), rope * sizeof(T));
      float* to = queries_ + h * words;
      for (long i = 0; i < steps; ++i, to += STEP_WORDS<M>) {
        if constexpr (is_split<M>) {
          vf even, odd;
          load_columns(query + i * STEP<M>, even, odd);
          store(to, even);
          store(to + LANES, odd);
        } else {
          std::memcpy(to, query + i * STEP<M>, STEP<M> * sizeof(T));
        }
      }
    }
  }

  // Computes the unnormalised weights of the tokens; lane h of peak and total is head h. All heads attend to all tokens.
  void score(long, const Seen<T>& seen, vi, float scale, vf& peak, vf& total, Fetched&) {
    weights_ = score_buffer_.get((SPAN + TOKENS<HEADS>) * QUERIES), rows_ = seen.rows, count_ = seen.count;
    score_tokens<M, HEADS>(queries_, rows_, count_, size_, scale, weights_);
    softmax_span<HEADS>(weights_, count_, peak, total);
    if constexpr (M::is_dot) pair_weights<HEADS>(weights_, count_);
  }

  // Calls take(0, first, columns, sums) for every 32 columns of the rows: sums[head] = weights times columns
  // [first, first + columns).
  template <class Take>
  void weigh(long, long latent, Fetched&, Take take) const {
    for (long first = 0; first < latent; first += PANEL) {
      const long columns = std::min(PANEL, latent - first);
      vf sums[QUERIES][2];
      if (columns == PANEL)
        weigh_columns<M, HEADS, true>(weights_, rows_, count_, first, columns, sums);
      else
        weigh_columns<M, HEADS, false>(weights_, rows_, count_, first, columns, sums);
      take(0, first, columns, sums);
    }
  }

 private:
  Buffer query_buffer_, row_buffer_, score_buffer_;
  float *queries_ = nullptr, *weights_ = nullptr;
  const T* const* rows_ = nullptr;
  long size_ = 0, count_ = 0;
};
