// Absorbed latent attention over a paged cache, a group of heads at a time.
//
// The context is cut into spans of fixed length; a span's softmax and its weighted sum of latents stay in cache, and
// the results of spans are merged in order, so a query's result depends on nothing but its own context.
#pragma once
#include <cmath>

#include "span_tiles.h"
#include "span_vectors.h"

template <class T>
struct Pages {
  const T* data;            // [blocks, block_size, latent + rope]
  const int32_t* tables;    // [queries, table_width] block ids
  const int64_t* seq_lens;  // [queries] tokens that the query attends to
  long table_width, block_size, latent, rope;

  // Fills `rows` with the rows of `count` tokens of a query's context, padded to a multiple of 32 with rows of its pages.
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

static inline long spans_of(long tokens) { return (tokens + SPAN - 1) / SPAN; }
static inline long whole_steps(long tokens) { return (tokens + 31) / 32 * 32; }

// Consecutive queries that are processed together. They belong to one sequence, where each attends to one token more than
// the one before it, or to several sequences that begin with the same tokens in the same blocks, as samples of a prompt do.
// A work item is a span and a group of heads; after the common tokens it is of one sequence.
struct Run {
  long query, count, spans;  // first query, number of queries, spans of the longest context
  long common, together;     // tokens and spans that several sequences share; with one sequence 0 tokens and all spans
  long item, partial;        // index of its first work item and of its first partial result
  bool is_one_sequence() const { return common == 0; }
};

constexpr long MOST_SEQUENCES = 8;  // in a run
constexpr long LEAST_COMMON = 64;   // tokens; sequences that share fewer are processed apart

template <class T>
static bool is_next(const Pages<T>& cache, long query) {  // whether it continues the sequence of the query before it
  const int64_t* seen = cache.seq_lens + query;
  const int32_t* table = cache.tables + query * cache.table_width;
  const long blocks = (seen[0] + cache.block_size - 1) / cache.block_size;
  return seen[0] == seen[-1] + 1 && std::equal(table, table + blocks, table - cache.table_width);
}

// Number of leading tokens that two queries share, rounded down to whole steps of 32.
template <class T>
static long common_tokens(const Pages<T>& cache, long a, long b) {
  const int32_t *one = cache.tables + a * cache.table_width, *other = cache.tables + b * cache.table_width;
  const long blocks = std::min(cache.seq_lens[a], cache.seq_lens[b]) / cache.block_size;
  return (std::mismatch(one, one + blocks, other).first - one) * cache.block_size / 32 * 32;
}

// Returns how many sequences from this query on, at most `most`, share the same leading tokens; `common` is their number.
template <class T>
static long find_family(const Pages<T>& cache, long query, long most, long& common) {
  long count = 1;
  for (common = LEAST_COMMON; count < most; ++count) {
    const long tokens = common_tokens(cache, query, query + count);
    if (tokens < common) break;
    if (count + 1 < most && common_tokens(cache, query + count, query + count + 1) > tokens) break;  // the next family's
    common = tokens;
  }
  if (count == 1) common = 0;
  return count;
}

// Divides the queries into runs of at most `most` and returns their number. One entry more says where the last one ends.
template <class T>
static long find_runs(const Pages<T>& cache, long queries, long most, long groups, Run* runs) {
  // Several sequences form one run only where enough runs for all threads remain.
  const long sequences = std::min({MOST_SEQUENCES, most, queries * groups / (2 * omp_get_max_threads())});
  long found = 0;
  Run run{};
  for (long b = 0; b < queries; b = run.query) {
    run.spans = run.together = spans_of(cache.seq_lens[b]), run.count = 1, run.common = 0;
    while (b + run.count < queries && run.count < most && is_next(cache, b + run.count) &&
           cache.seq_lens[b + run.count] <= run.spans * SPAN)
      ++run.count;
    long items = run.spans;
    if (run.count == 1 && (run.count = find_family(cache, b, std::min(sequences, queries - b), run.common)) > 1) {
      run.together = items = spans_of(run.common);
      for (long i = b; i < b + run.count; ++i) {
        run.spans = std::max(run.spans, spans_of(cache.seq_lens[i]));
        items += spans_of(cache.seq_lens[i]) - run.together;
      }
    }
    runs[found++] = run;
    run.query += run.count, run.item += items * groups, run.partial += run.spans * run.count;
  }
  runs[found] = run;
  return found;
}

// A work item: a span that queries of a run attend to with one group of heads.
template <class T>
struct SpanOf {
  const Run* run = nullptr;  // null when no work is left
  long span = 0, group = 0;
  long first = 0, queries = 0;  // the queries of the run that attend to it
  long count = 0;               // tokens that all of them attend to; with one sequence, those of the last query
  Own own[MOST_SEQUENCES];      // each sequence's own tokens, where there are several sequences
  long num_rows = 0;            // rounded up to whole steps
  const T** rows = nullptr;
};

// Returns work item `item` of the run and fills `to` with its rows.
template <class T>
static SpanOf<T> span_of(const Pages<T>& cache, const Run& run, long item, long groups, const T** to) {
  SpanOf<T> found;
  found.run = &run, found.queries = run.count, found.rows = to;
  item -= run.item;
  long span = 0;
  if (item >= run.together * groups) {
    auto items_of = [&](long i) { return (spans_of(cache.seq_lens[run.query + i]) - run.together) * groups; };
    for (item -= run.together * groups; item >= items_of(found.first); ++found.first) item -= items_of(found.first);
    found.queries = 1, span = run.together;
  }
  found.span = span + item / groups, found.group = item % groups;
  const long begin = found.span * SPAN, query = run.query + found.first, last = query + found.queries - 1;
  const bool are_several = found.queries > 1 && !run.is_one_sequence();
  found.count = std::min(SPAN, (are_several ? run.common : cache.seq_lens[last]) - begin);
  cache.rows_of(last, begin, found.count, to);
  found.num_rows = whole_steps(found.count);
  for (long i = 0; are_several && i < found.queries; ++i) {
    const long left = std::min(SPAN, cache.seq_lens[query + i] - begin) - found.count;
    found.own[i] = {found.num_rows, left};
    if (left > 0) cache.rows_of(query + i, begin + found.count, left, to + found.num_rows);
    found.num_rows += whole_steps(left);
  }
  return found;
}

// S: TileSpan or a VectorSpan.
template <class M, class S>
static void mla_attention(Batch<const typename M::T> q_latent, Batch<const typename M::T> q_rope, long queries,
                          long heads, Pages<typename M::T> cache, float scale, Batch<typename M::T> out) {
  typedef typename M::T T;
  constexpr long QUERIES = S::QUERIES, TILES = S::TILES;
  const long size = cache.latent + cache.rope, groups = (heads + QUERIES - 1) / QUERIES;
  const long per_tile = TILES > 1 ? std::max(1L, QUERIES / heads) : 1;
  enum { ROWS, RUNS, PARTIALS, FACTORS, QUEUE };
  Run* runs = thread_local_object<Buffer, RUNS>().template get<Run>(queries + 1);
  const long num_runs = find_runs(cache, queries, per_tile * TILES, groups, runs);
  const long items = runs[num_runs].item;
  const bool has_partials = std::any_of(runs, runs + num_runs, [](const Run& run) { return run.spans > 1; });
  // For each query, span and head: the unnormalised sums, then the peak of the scores and the total of their weights.
  const long partial_size = cache.latent + LANES;
  float* partials = has_partials ? thread_local_object<Buffer, PARTIALS>().get(runs[num_runs].partial * heads * partial_size) : nullptr;
  auto partial_of = [&](const Run& run, long query, long span, long head) {
    return partials + ((run.partial + query * run.spans + span) * heads + head) * partial_size;
  };
  WorkQueue queue(items, thread_local_object<Buffer, QUEUE>());
#pragma omp parallel
  {
    Scope<M> scope;
    S& span = thread_local_object<S>();
    constexpr long MOST_ROWS = SPAN * (1 + MOST_SEQUENCES);
    const T** rows = thread_local_object<Buffer, ROWS>().template get<const T*>(2 * MOST_ROWS);
    SpanOf<T> now, following;
    const Run* run = runs;
    auto take = [&](const T** to) -> SpanOf<T> {
      const long item = queue.take();
      if (item == WorkQueue::EMPTY) return {};
      if (item < run->item) run = runs;
      while (run[1].item <= item) ++run;
      return span_of(cache, *run, item, groups, to);
    };
    for (now = take(rows); now.run; now = following) {
      following = take(now.rows == rows ? rows + MOST_ROWS : rows);
      const Run& of = *now.run;
      const long head = now.group * QUERIES, num_heads = std::min(QUERIES, heads - head);
      const long tiles = (now.queries + per_tile - 1) / per_tile;
      typename S::Fetched prefetcher;  // empty for queries of one sequence: the rows are in the cache
      if (following.run && following.rows[0] != now.rows[0]) prefetcher = {following.rows, following.num_rows, size};
      T* to[TILES][QUERIES];  // null where a context has several spans
      float* partial[TILES][QUERIES];
      long lanes[TILES];
      vf factor[TILES];
      for (long tile = 0; tile < tiles; ++tile) {
        int32_t visible[LANES];
        std::fill(visible, visible + LANES, (int32_t)now.count);
        const T *latents[QUERIES], *ropes[QUERIES];
        OwnOfLanes owns[QUERIES];
        long num_owns = 0, i = 0;
        for (long each = tile * per_tile; each < std::min((tile + 1) * per_tile, now.queries); ++each) {
          const long query = now.first + each, b = of.query + query, seen = cache.seq_lens[b];
          if (now.own[each % MOST_SEQUENCES].count > 0) owns[num_owns++] = {now.own[each], i, num_heads};
          for (long h = head; h < head + num_heads; ++h, ++i) {
            latents[i] = q_latent.data + b * q_latent.token_stride + h * q_latent.head_stride;
            ropes[i] = q_rope.data + b * q_rope.token_stride + h * q_rope.head_stride;
            to[tile][i] = seen <= SPAN ? out.data + b * out.token_stride + h * out.head_stride : nullptr;
            partial[tile][i] = seen <= SPAN ? nullptr : partial_of(of, query, now.span, h);
            visible[i] = std::min(now.count, seen - now.span * SPAN);
          }
        }
        lanes[tile] = i;
        span.take_queries(tile, [&](long i) { return latents[i]; }, [&](long i) { return ropes[i]; }, lanes[tile],
                          cache.latent, cache.rope);
        vf peak, total;
        span.score(tile, {now.rows, now.count, now.num_rows, owns, num_owns}, load_bits<vi>(visible), scale, peak, total, prefetcher);
        factor[tile] = 1.0f / total;
        for (i = 0; i < lanes[tile]; ++i)
          if (partial[tile][i]) partial[tile][i][cache.latent] = peak[i], partial[tile][i][cache.latent + 1] = total[i];
      }
      span.weigh(tiles, cache.latent, prefetcher, [&](long tile, long first, long columns, const vf(*sums)[2]) {
        for (long i = 0; i < lanes[tile]; ++i) {
          if (to[tile][i] && columns == PANEL) {
            store_two(to[tile][i] + first, sums[i][0] * factor[tile][i], sums[i][1] * factor[tile][i]);
            continue;
          }
          for (long half = 0; half < 2 && half * LANES < columns; ++half) {
            const long at = first + half * LANES;
            if (to[tile][i])
              store_n(to[tile][i] + at, sums[i][half] * factor[tile][i], columns - half * LANES);
            else
              store_n(partial[tile][i] + at, sums[i][half], columns - half * LANES);
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
          const long query = each / heads, head = each % heads, spans = spans_of(cache.seq_lens[of.query + query]);
          if (spans == 1) continue;
          const float* parts = partial_of(of, query, 0, head);
          auto part = [&](long s) { return parts + s * heads * partial_size; };
          const long peaks = cache.latent, totals = peaks + 1;
          float peak = -INFINITY, total = 0;
          for (long s = 0; s < spans; ++s) peak = std::max(peak, part(s)[peaks]);
          float* factors = thread_local_object<Buffer, FACTORS>().get(spans);
          for (long s = 0; s < spans; ++s) factors[s] = std::exp(part(s)[peaks] - peak);
          for (long s = 0; s < spans; ++s) total += part(s)[totals] * factors[s];
          for (long s = 0; s < spans; ++s) factors[s] /= total;
          T* to = out.data + (of.query + query) * out.token_stride + head * out.head_stride;
          for (long i = 0; i < cache.latent; i += LANES) {
            vf sum = {};
            for (long s = 0; s < spans; ++s) sum += load_n(part(s) + i, cache.latent - i) * factors[s];
            store_n(to + i, sum, cache.latent - i);
          }
        }
      }
    }
  }
}
