// Absorbed latent attention over a paged cache, a group of heads at a time.
//
// The context is cut into spans of fixed length; a span's softmax and its weighted sum of latents stay in cache, and
// spans are put together in order, so a query's result depends on nothing but its own context.
#pragma once
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

// Queries of one sequence, each of which sees one token more than the one before it, attended to at once. Its work is cut
// into items: spans by groups of heads.
struct Run {
  long query, count, tiles, spans;  // its first query, how many, and tiles that they are; spans of their contexts
  long item, partial;               // the first of its items, and of its tiles of partial results
};

template <class T>
static bool is_next(const Pages<T>& cache, long query) {  // of the sequence that the query before it belongs to
  const int64_t* seen = cache.seq_lens + query;
  const int32_t* table = cache.tables + query * cache.table_width;
  const long blocks = (seen[0] + cache.block_size - 1) / cache.block_size;
  return seen[0] == seen[-1] + 1 && std::equal(table, table + blocks, table - cache.table_width);
}

// Runs of tiles of `per_tile` queries, all with the same number of spans; returns how many. One more says where they end.
template <class T>
static long find_runs(const Pages<T>& cache, long queries, long per_tile, long max_tiles, long groups, Run* runs) {
  long found = 0;
  Run run{};
  for (long b = 0; b < queries; b = run.query) {
    run.spans = (cache.seq_lens[b] + SPAN - 1) / SPAN, run.count = 1;
    while (b + run.count < queries && run.count < per_tile * max_tiles && is_next(cache, b + run.count) &&
           cache.seq_lens[b + run.count] <= run.spans * SPAN)
      ++run.count;
    run.tiles = (run.count + per_tile - 1) / per_tile;
    runs[found++] = run;
    run.query += run.count, run.item += run.spans * groups, run.partial += run.spans * groups * run.tiles;
  }
  runs[found] = run;
  return found;
}

// A span that a run attends to with one group of heads.
template <class T>
struct SpanOf {
  const Run* run = nullptr;  // there is none: nothing is left to do
  long part = 0, begin = 0, count = 0;
  const T** rows = nullptr;
};

template <class M>
using Span = std::conditional_t<by_row<M>, TileSpan, VectorSpan<M>>;

template <class M>
static void mla_attention(Batch<const typename M::T> q_latent, Batch<const typename M::T> q_rope, long queries,
                          long heads, Pages<typename M::T> cache, float scale, Batch<typename M::T> out) {
  typedef typename M::T T;
  constexpr long QUERIES = Span<M>::QUERIES, TILES = Span<M>::TILES;
  const long size = cache.latent + cache.rope, groups = (heads + QUERIES - 1) / QUERIES;
  const long per_tile = TILES > 1 ? std::max(1L, QUERIES / heads) : 1;
  enum { ROWS, RUNS, PARTIALS, SHARES };
  Run* runs = own<Buffer, RUNS>().template get<Run>(queries + 1);
  const long num_runs = find_runs(cache, queries, per_tile, TILES, groups, runs);
  const long items = runs[num_runs].item, partial_size = QUERIES * (cache.latent + 2);
  const bool has_partials = items > num_runs * groups;
  float* partials = has_partials ? own<Buffer, PARTIALS>().get(runs[num_runs].partial * partial_size) : nullptr;
  Shares shares(items, own<Buffer, SHARES>());
#pragma omp parallel
  {
    Scope<M> scope;
    Span<M>& span = own<Span<M>>();
    const T** rows = own<Buffer, ROWS>().template get<const T*>(2 * SPAN);
    const T** next_rows = rows + SPAN;
    SpanOf<T> now, following;
    const Run* run = runs;
    auto take = [&](const T** to) -> SpanOf<T> {
      const long item = shares.take();
      if (item == Shares::NONE) return {};
      if (item < run->item) run = runs;
      while (run[1].item <= item) ++run;
      const long part = item - run->item, begin = part / groups * SPAN, last = run->query + run->count - 1;
      SpanOf<T> found{run, part, begin, std::min(SPAN, cache.seq_lens[last] - begin), to};
      cache.rows_of(last, begin, found.count, to);
      return found;
    };
    for (now = take(rows); now.run; now = following) {
      following = take(now.rows == rows ? next_rows : rows);
      const Run& of = *now.run;
      const long head = now.part % groups * QUERIES, num_heads = std::min(QUERIES, heads - head);
      float* partial = has_partials ? partials + (of.partial + now.part * of.tiles) * partial_size : nullptr;
      typename Span<M>::Fetched ahead;  // of a run of the same sequence it is there
      if (following.run && following.rows[0] != now.rows[0]) ahead = {following.rows, following.count, size};
      T* to[TILES][QUERIES];
      long lanes[TILES];
      vf factor[TILES];
      for (long tile = 0; tile < of.tiles; ++tile) {
        const long first = of.query + tile * per_tile;
        lanes[tile] = std::min(per_tile, of.query + of.count - first) * num_heads;
        vi visible = vi{} + (int)now.count;
        const T *latents[QUERIES], *ropes[QUERIES];
        for (long i = 0, b = first; i < lanes[tile]; ++b)
          for (long h = head; h < head + num_heads; ++h, ++i) {
            latents[i] = q_latent.data + b * q_latent.token_stride + h * q_latent.head_stride;
            ropes[i] = q_rope.data + b * q_rope.token_stride + h * q_rope.head_stride;
            to[tile][i] = out.data + b * out.token_stride + h * out.head_stride;
            visible[i] = std::min(SPAN, cache.seq_lens[b] - now.begin);
          }
        span.take_queries(tile, [&](long i) { return latents[i]; }, [&](long i) { return ropes[i]; }, lanes[tile],
                          cache.latent, cache.rope);
        vf peak, total;
        span.score(tile, now.rows, now.count, visible, scale, peak, total, ahead);
        factor[tile] = 1.0f / total;
        if (of.spans > 1)
          for (long i = 0; i < QUERIES; ++i) {
            partial[tile * partial_size + QUERIES * cache.latent + i] = peak[i];
            partial[tile * partial_size + QUERIES * cache.latent + QUERIES + i] = total[i];
          }
      }
      span.weigh(of.tiles, cache.latent, ahead, [&](long tile, long first, long columns, const vf(*sums)[2]) {
        for (long i = 0; i < lanes[tile]; ++i) {
          if (of.spans == 1 && columns == PANEL) {
            store_two(to[tile][i] + first, sums[i][0] * factor[tile][i], sums[i][1] * factor[tile][i]);
            continue;
          }
          for (long half = 0; half < 2 && half * LANES < columns; ++half) {
            const long at = first + half * LANES;
            if (of.spans == 1)
              store_n(to[tile][i] + at, sums[i][half] * factor[tile][i], columns - half * LANES);
            else
              store_n(partial + tile * partial_size + i * cache.latent + at, sums[i][half], columns - half * LANES);
          }
        }
      });
    }
    if (has_partials) {
#pragma omp barrier
#pragma omp for schedule(dynamic)
      for (long r = 0; r < num_runs; ++r) {
        const Run& of = runs[r];
        for (long each = 0; of.spans > 1 && each < of.count * heads; ++each) {
          const long query = each / heads, head = each % heads, tile = query / per_tile;
          const long lane = query % per_tile * heads + head % QUERIES;
          auto part = [&](long s) {
            return partials + (of.partial + (s * groups + head / QUERIES) * of.tiles + tile) * partial_size;
          };
          const long peaks = QUERIES * cache.latent + lane, totals = peaks + QUERIES;
          float peak = -INFINITY, total = 0;
          for (long s = 0; s < of.spans; ++s) peak = std::max(peak, part(s)[peaks]);
          for (long s = 0; s < of.spans; ++s) total += part(s)[totals] * std::exp(part(s)[peaks] - peak);
          T* to = out.data + (of.query + query) * out.token_stride + head * out.head_stride;
          for (long i = 0; i < cache.latent; i += LANES) {
            vf sum = {};
            for (long s = 0; s < of.spans; ++s)
              sum += load_n(part(s) + lane * cache.latent + i, cache.latent - i) *
                     (std::exp(part(s)[peaks] - peak) / total);
            store_n(to + i, sum, cache.latent - i);
          }
        }
      }
    }
  }
}
