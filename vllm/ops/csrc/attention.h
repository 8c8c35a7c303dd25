// Absorbed latent attention of single queries over a paged cache, eight heads at a time.
//
// The context is cut into spans of fixed length; a span's softmax and its weighted sum of latents stay in cache, and
// spans are put together in order, so a query's result depends on nothing but its own context.
#pragma once
#include <atomic>
#include <cmath>

#include "linear.h"

constexpr long HEADS = 8;
constexpr long SPAN = 512;  // even

template <class T>
struct Pages {
  const T* data;            // [blocks, block_size, latent + rope]
  const int32_t* tables;    // [queries, table_width] block ids
  const int64_t* seq_lens;  // [queries] tokens that the query sees
  long table_width, block_size, latent, rope;
};

// Elements of a query or a cached row that one step of a score takes, and words that they are.
template <class M>
constexpr long STEP = sizeof(typename M::T) == 2 ? 2 * LANES : LANES;
template <class M>
constexpr long STEP_WORDS = is_split<M> ? 2 * LANES : LANES;

// Scores of 8 heads and `count` tokens to scores[token][8]; queries are words [8][steps][STEP_WORDS], zeros behind.
template <class M>
static void score_tokens(const float* q, const typename M::T* const* rows, long count, long size, float scale,
                         float* scores) {
  constexpr long step = STEP<M>;
  const long whole = size / step, stride = (size + step - 1) / step * STEP_WORDS<M>;
  for (long s = 0; s < count; s += 2) {
    const typename M::T *first = rows[s], *second = rows[std::min(s + 1, count - 1)];
    const typename M::T *third = rows[std::min(s + 2, count - 1)], *fourth = rows[std::min(s + 3, count - 1)];
    vf sums[2 * HEADS] = {};
    auto add = [&](const float* words, vf a, vf b) {
#pragma GCC unroll 8
      for (int h = 0; h < HEADS; ++h) {
        vf query = load(words + h * stride);
        sums[h] = multiply_add<M>(sums[h], query, a);
        sums[HEADS + h] = multiply_add<M>(sums[HEADS + h], query, b);
      }
    };
    auto add_step = [&](long i, long left) {
      const float* words = q + i * STEP_WORDS<M>;
      if constexpr (is_split<M>) {
        vf a[2], b[2];
        load_columns_n(first + i * step, left, a[0], a[1]);
        load_columns_n(second + i * step, left, b[0], b[1]);
        add(words, a[0], b[0]);
        add(words + LANES, a[1], b[1]);
      } else {
        add(words, load_words<M>(first + i * step, left), load_words<M>(second + i * step, left));
      }
    };
    for (long i = 0; i < whole; ++i) {
      __builtin_prefetch(third + i * step);
      __builtin_prefetch(fourth + i * step);
      add_step(i, step);
    }
    if (whole * step < size) add_step(whole, size - whole * step);
    store(scores + s * HEADS, row_sums(sums) * scale);
  }
}

// scores[token][8] to unnormalised weights; lanes 0-7 of peak and total are the heads'.
static void softmax_span(float* scores, long count, vf& peak, vf& total) {
  auto fold = [](vf v) { return LANES_OF(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); };
  if (count % 2)
    for (long h = 0; h < HEADS; ++h) scores[count * HEADS + h] = -INFINITY;
  const long vectors = (count + 1) / 2;
  peak = splat(-INFINITY), total = vf{};
  for (long i = 0; i < vectors; ++i) peak = maximum(peak, load(scores + i * LANES));
  peak = maximum(peak, fold(peak));
  for (long i = 0; i < vectors; ++i) {
    vf weight = exp(load(scores + i * LANES) - peak);
    total += weight;
    store(scores + i * LANES, weight);
  }
  total += fold(total);
}

// out[8][32 columns] = weights[token][8] times the rows' columns
template <class M, bool IS_WHOLE>
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

// weights of two tokens to bfloat16 pairs, in place: [token][8] floats to [pair][8] words
static void pair_weights(float* weights, long count) {
  for (long i = 0; i < (count + 1) / 2; ++i) {
    vh halves = narrow(load(weights + i * LANES));
    uint32_t words[HEADS];
    for (int h = 0; h < HEADS; ++h) words[h] = halves[h] | (uint32_t)halves[HEADS + h] << 16;
    std::memcpy(weights + i * HEADS, words, sizeof(words));
  }
}

template <class M>
static void mla_attention(Batch<const typename M::T> q_latent, Batch<const typename M::T> q_rope, long queries,
                          long heads, Pages<typename M::T> cache, float scale, Batch<typename M::T> out) {
  typedef typename M::T T;
  const long size = cache.latent + cache.rope, groups = (heads + HEADS - 1) / HEADS;
  const long steps = (size + STEP<M> - 1) / STEP<M>, query_words = steps * STEP_WORDS<M>;
  static thread_local Buffer starts_buffer, partial_buffer;
  long* starts = starts_buffer.get<long>(queries + 1);  // first item of each query: spans x groups of heads
  starts[0] = 0;
  for (long b = 0; b < queries; ++b) starts[b + 1] = starts[b] + (cache.seq_lens[b] + SPAN - 1) / SPAN * groups;
  const long items = starts[queries], partial_size = HEADS * (cache.latent + 2);
  const bool has_partials = items > queries * groups;
  float* partials = has_partials ? partial_buffer.get(items * partial_size) : nullptr;
  std::atomic<long> next{0};
#pragma omp parallel
  {
    static thread_local Buffer buffer, row_buffer, query_buffer;
    float* scores = buffer.get((SPAN + 2) * HEADS + HEADS * query_words);
    float* q = scores + (SPAN + 2) * HEADS;
    const T** rows = row_buffer.get<const T*>(SPAN);
    T* query = query_buffer.get<T>(steps * STEP<M>);
    std::fill(query + size, query + steps * STEP<M>, T(0));
    long b = 0;
    for (long item = next++; item < items; item = next++) {
      while (starts[b + 1] <= item) ++b;
      const long span = (item - starts[b]) / groups, head = (item - starts[b]) % groups * HEADS;
      const long num_heads = std::min(HEADS, heads - head);
      const long begin = span * SPAN, count = std::min(SPAN, cache.seq_lens[b] - begin);
      const int32_t* table = cache.tables + b * cache.table_width;
      long s = 0, block = begin / cache.block_size, offset = begin % cache.block_size;
      for (; s < count; ++block, offset = 0) {
        const T* row = cache.data + (table[block] * cache.block_size + offset) * size;
        for (; offset < cache.block_size && s < count; ++offset, row += size) rows[s++] = row;
      }
      std::memset(q + num_heads * query_words, 0, (HEADS - num_heads) * query_words * sizeof(float));
      for (long h = 0; h < num_heads; ++h) {
        std::memcpy(query, q_latent.data + b * q_latent.token_stride + (head + h) * q_latent.head_stride,
                    cache.latent * sizeof(T));
        std::memcpy(query + cache.latent, q_rope.data + b * q_rope.token_stride + (head + h) * q_rope.head_stride,
                    cache.rope * sizeof(T));
        float* to = q + h * query_words;
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
      score_tokens<M>(q, rows, count, size, scale, scores);
      vf peak, total;
      softmax_span(scores, count, peak, total);
      if constexpr (M::is_dot) pair_weights(scores, count);
      float* partial = has_partials ? partials + item * partial_size : nullptr;
      const bool is_alone = cache.seq_lens[b] <= SPAN;
      for (long first = 0; first < cache.latent; first += PANEL) {
        const long columns = std::min(PANEL, cache.latent - first);
        vf sums[HEADS][2];
        if (columns == PANEL)
          weigh_columns<M, true>(scores, rows, count, first, columns, sums);
        else
          weigh_columns<M, false>(scores, rows, count, first, columns, sums);
        for (long h = 0; h < num_heads; ++h)
          for (long half = 0; half < 2 && half * LANES < columns; ++half) {
            const long at = first + half * LANES;
            if (is_alone)
              store_n(out.data + b * out.token_stride + (head + h) * out.head_stride + at,
                      sums[h][half] * (1.0f / total[h]), columns - half * LANES);
            else
              store_n(partial + h * cache.latent + at, sums[h][half], columns - half * LANES);
          }
      }
      if (!is_alone)
        for (long h = 0; h < HEADS; ++h) {
          partial[HEADS * cache.latent + h] = peak[h];
          partial[HEADS * cache.latent + HEADS + h] = total[h];
        }
    }
    if (has_partials) {
#pragma omp barrier
#pragma omp for schedule(dynamic)
      for (long each = 0; each < queries; ++each) {
        if (cache.seq_lens[each] <= SPAN) continue;
        for (long head = 0; head < heads; ++head) {
          const long spans = (starts[each + 1] - starts[each]) / groups, h = head % HEADS;
          auto part = [&](long span) { return partials + (starts[each] + span * groups + head / HEADS) * partial_size; };
          float peak = -INFINITY, total = 0;
          for (long s = 0; s < spans; ++s) peak = std::max(peak, part(s)[HEADS * cache.latent + h]);
          for (long s = 0; s < spans; ++s)
            total += part(s)[HEADS * cache.latent + HEADS + h] * std::exp(part(s)[HEADS * cache.latent + h] - peak);
          T* to = out.data + each * out.token_stride + head * out.head_stride;
          for (long i = 0; i < cache.latent; i += LANES) {
            vf sum = {};
            for (long s = 0; s < spans; ++s)
              sum += load_n(part(s) + h * cache.latent + i, cache.latent - i) *
                     (std::exp(part(s)[HEADS * cache.latent + h] - peak) / total);
            store_n(to + i, sum, cache.latent - i);
          }
        }
      }
    }
  }
}
