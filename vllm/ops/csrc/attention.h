// Absorbed latent attention of single queries over a paged cache, a group of heads at a time.
//
// The context is cut into spans of fixed length; a span's softmax and its weighted sum of latents stay in cache, and
// spans are put together in order, so a query's result depends on nothing but its own context.
#pragma once
#include <atomic>
#include <cmath>

#include "span_tiles.h"
#include "span_vectors.h"

template <class T>
struct Pages {
  const T* data;            // [blocks, block_size, latent + rope]
  const int32_t* tables;    // [queries, table_width] block ids
  const int64_t* seq_lens;  // [queries] tokens that the query sees
  long table_width, block_size, latent, rope;

  // Rows of `count` tokens of a query's context; behind them, up to a multiple of 32, any of its pages'.
  void rows_of(long query, long begin, long count, const T** rows) const {
    const int32_t* table = tables + query * table_width;
    const long size = latent + rope, padded = (count + 31) / 32 * 32;
    long s = 0, block = begin / block_size, offset = begin % block_size;
    for (; s < count; ++block, offset = 0) {
      const T* row = data + (table[block] * block_size + offset) * size;
      for (; offset < block_size && s < padded; ++offset, row += size) rows[s++] = row;
    }
    for (; s < padded; ++s) rows[s] = rows[count - 1];
  }
};

// The context of a query that one group of heads attends to at a time.
template <class T>
struct SpanOf {
  long item = 0, query = 0, head = 0, count = 0;  // no tokens: there is none
  const T** rows = nullptr;
};

template <class M>
using Span = std::conditional_t<by_row<M>, TileSpan, VectorSpan<M>>;

template <class M>
static void mla_attention(Batch<const typename M::T> q_latent, Batch<const typename M::T> q_rope, long queries,
                          long heads, Pages<typename M::T> cache, float scale, Batch<typename M::T> out) {
  typedef typename M::T T;
  constexpr long HEADS = Span<M>::HEADS;
  const long size = cache.latent + cache.rope, groups = (heads + HEADS - 1) / HEADS;
  enum { ROWS, STARTS, PARTIALS };
  long* starts = own<Buffer, STARTS>().template get<long>(queries + 1);  // first item of each query: spans x groups of heads
  starts[0] = 0;
  for (long b = 0; b < queries; ++b) starts[b + 1] = starts[b] + (cache.seq_lens[b] + SPAN - 1) / SPAN * groups;
  const long items = starts[queries], partial_size = HEADS * (cache.latent + 2);
  const bool has_partials = items > queries * groups;
  float* partials = has_partials ? own<Buffer, PARTIALS>().get(items * partial_size) : nullptr;
  std::atomic<long> next{0};
#pragma omp parallel
  {
    Scope<M> scope;
    Span<M>& heads_of_span = own<Span<M>>();
    const T** rows = own<Buffer, ROWS>().template get<const T*>(2 * SPAN);
    const T** next_rows = rows + SPAN;
    SpanOf<T> now, following;
    long b = 0;
    auto take = [&](const T** to) -> SpanOf<T> {
      const long item = next++;
      if (item >= items) return {};
      while (starts[b + 1] <= item) ++b;
      const long part = item - starts[b], begin = part / groups * SPAN;
      SpanOf<T> found{item, b, part % groups * HEADS, std::min(SPAN, cache.seq_lens[b] - begin), to};
      cache.rows_of(b, begin, found.count, to);
      return found;
    };
    for (now = take(rows); now.count; now = following) {
      following = take(now.rows == rows ? next_rows : rows);
      const long b = now.query, item = now.item, head = now.head, count = now.count;
      const long num_heads = std::min(HEADS, heads - head);
      typename Span<M>::Fetched ahead;  // of prompts, the same sequence again: it is there
      if (following.count && following.rows[0] != now.rows[0]) ahead = {following.rows, following.count, size};
      heads_of_span.take_queries(
          [&](long h) { return q_latent.data + b * q_latent.token_stride + (head + h) * q_latent.head_stride; },
          [&](long h) { return q_rope.data + b * q_rope.token_stride + (head + h) * q_rope.head_stride; }, num_heads,
          cache.latent, cache.rope);
      vf peak, total;
      heads_of_span.score(now.rows, count, scale, peak, total, ahead);
      float* partial = has_partials ? partials + item * partial_size : nullptr;
      const bool is_alone = cache.seq_lens[b] <= SPAN;
      const vf factor = 1.0f / total;
      heads_of_span.weigh(cache.latent, ahead, [&](long first, long columns, const vf(*sums)[2]) {
        for (long h = 0; h < num_heads; ++h) {
          if (is_alone && columns == PANEL) {
            T* to = out.data + b * out.token_stride + (head + h) * out.head_stride + first;
            store_two(to, sums[h][0] * factor[h], sums[h][1] * factor[h]);
            continue;
          }
          for (long half = 0; half < 2 && half * LANES < columns; ++half) {
            const long at = first + half * LANES;
            if (is_alone)
              store_n(out.data + b * out.token_stride + (head + h) * out.head_stride + at,
                      sums[h][half] * factor[h], columns - half * LANES);
            else
              store_n(partial + h * cache.latent + at, sums[h][half], columns - half * LANES);
          }
        }
      });
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
