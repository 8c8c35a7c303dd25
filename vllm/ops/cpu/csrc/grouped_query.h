// Attention of groups of query heads to the head of keys and values that each group shares, over a paged cache.
//
// Sixteen tokens of a block are a cell, packed as products want it: keys as words [channels][16 tokens], values as words
// [tokens][channels]; with bfloat16 a word is a pair of neighbours along the first. Every score and every weighted sum is one
// sum in order, and the context is cut into spans at fixed places, so a query's result depends on nothing but its own
// context. Blocks of other sizes than whole cells hold rows [keys, values][token][channel], which are packed when read.
#pragma once
#include <cmath>

#include "linear.h"

constexpr long CELL = LANES;       // tokens
constexpr long SPAN_CELLS = 8;     // of the context, whose scores and weights are kept at a time
constexpr long SPAN_TOKENS = SPAN_CELLS * CELL;
constexpr long MOST_CHANNELS = 256;  // of a head
constexpr long TILE_QUERIES = 64;    // rows that read a span of keys and values together
// Words between rows of queries and of weights: constants, so that products address all rows by one register.
constexpr long QUERY_STRIDE = MOST_CHANNELS + LANES, WEIGHT_STRIDE = SPAN_TOKENS + LANES;

template <class T>
constexpr long PAIR = sizeof(float) / sizeof(T);

// One layer's pages [blocks][keys, values][kv_heads][block_size][padded], where `padded` channels are whole vectors.
template <class T>
struct GroupedPages {
  T* data;
  long block_size, kv_heads, channels, padded;

  bool has_cells() const { return block_size % CELL == 0; }
  T* block(long block, long kind, long head) const {
    return data + ((block * 2 + kind) * kv_heads + head) * block_size * padded;
  }
  T& key_in(T* cell, long token, long channel) const {
    return cell[(channel / PAIR<T> * CELL + token) * PAIR<T> + channel % PAIR<T>];
  }
  T& value_in(T* cell, long token, long channel) const {
    return cell[(token / PAIR<T> * padded + channel) * PAIR<T> + token % PAIR<T>];
  }
  void write(long slot, long head, const T* key, const T* value) const {
    const long at = slot % block_size;
    T *keys = block(slot / block_size, 0, head), *values = block(slot / block_size, 1, head);
    if (!has_cells()) {
      std::memcpy(keys + at * padded, key, channels * sizeof(T));
      std::memcpy(values + at * padded, value, channels * sizeof(T));
      return;
    }
    keys += at / CELL * CELL * padded, values += at / CELL * CELL * padded;
    for (long i = 0; i < channels; ++i) key_in(keys, at % CELL, i) = key[i];
    for (long i = 0; i < channels; ++i) value_in(values, at % CELL, i) = value[i];
  }
};

// One pass over each head: the bias, the norm, the rotation of the first `turned` channels.
template <class T>
static void take_head(const T* x, const T* bias, const T* weight, float eps, const float* cos, const float* sin, long turned,
                      long size, T* out) {
  alignas(64) float row[MOST_CHANNELS + LANES];
  vf squares = {};
  for (long i = 0; i < size; i += LANES) {
    vf v = load_n(x + i, size - i);
    if (bias) v += load_n(bias + i, size - i);
    squares += v * v;
    store(row + i, v);
  }
  if (weight) {
    const float factor = 1.0f / std::sqrt(sum(squares) / size + eps);
    for (long i = 0; i < size; i += LANES) store(row + i, load(row + i) * factor * load_n(weight + i, size - i));
  }
  const long half = turned / 2;
  for (long i = 0; i < half; i += LANES) {
    const long count = std::min(LANES, half - i);
    const vf a = load_n(row + i, count), b = load_n(row + half + i, count);
    const vf c = load_n(cos + i, count), s = load_n(sin + i, count);
    store_n(row + i, a * c - b * s, count);
    store_n(row + half + i, b * c + a * s, count);
  }
  for (long i = 0; i < size; i += LANES) store_n(out + i, load(row + i), size - i);
}

template <class T>
static void write_grouped(GroupedPages<T> pages, const T* qkv, long token_stride, long tokens, long heads, const T* bias,
                          const T* q_weight, const T* k_weight, float eps, const float* cos, const float* sin, long turned,
                          const int64_t* slots, T* q) {
  const long size = pages.channels, groups = pages.kv_heads;
#pragma omp parallel for num_threads(threads_for(tokens * (heads + 2 * groups) * size))
  for (long t = 0; t < tokens; ++t) {
    const T* row = qkv + t * token_stride;
    const float *c = cos + t * turned, *s = sin + t * turned;
    T key[MOST_CHANNELS], value[MOST_CHANNELS];
    auto take = [&](long head, const T* weight, long turned, T* out) {
      take_head(row + head * size, bias ? bias + head * size : nullptr, weight, eps, c, s, turned, size, out);
    };
    for (long h = 0; h < heads; ++h) take(h, q_weight, turned, q + (t * heads + h) * size);
    for (long g = 0; g < groups; ++g) {
      take(heads + g, k_weight, turned, key);
      take(heads + groups + g, nullptr, 0, value);
      pages.write(slots[t], g, key, value);
    }
  }
}

// out[ROWS][COLUMNS vectors] += rows of `a` times `pieces` pieces of b, each of `steps` words along the sum: vector (piece,
// column) of them begins at vector_of(piece, column). Meanwhile the lines of the cells `ahead`, as many as columns, are
// prefetched if there are any: few rows take less time than reading.
template <class M, long A_STRIDE, int ROWS, int COLUMNS, class Vector>
static void multiply_rows(const float* a, Vector vector_of, long pieces, long steps, long b_stride, float* out,
                          long out_stride, const float* const* ahead) {
  vf sums[ROWS][COLUMNS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) sums[r][c] = load(out + r * out_stride + c * LANES);
  for (long p = 0; p < pieces; ++p) {
    const float* b[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) b[c] = vector_of(p, c);
    for (long i = 0; i < steps; ++i, a += is_split<M> ? 2 : 1) {
      if (ahead)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) __builtin_prefetch(ahead[c] + (p * steps + i) * LANES, 0, 2);
      vf words[COLUMNS];
#pragma GCC unroll 8
      for (int c = 0; c < COLUMNS; ++c) words[c] = load(b[c] + i * b_stride);
      if constexpr (is_split<M>) {
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) {
          vf even, odd;
          split((vu)words[c], even, odd);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; ++r) {
            sums[r][c] += splat(a[r * A_STRIDE]) * even;
            sums[r][c] += splat(a[r * A_STRIDE + 1]) * odd;
          }
        }
      } else {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {  // outside, so that one register holds the rows' words one after the other
          const vf row = splat(a[r * A_STRIDE]);
#pragma GCC unroll 8
          for (int c = 0; c < COLUMNS; ++c) sums[r][c] = multiply_add<M>(sums[r][c], row, words[c]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) store(out + r * out_stride + c * LANES, sums[r][c]);
}

constexpr int columns_for(int rows) {  // of sums that fit the registers with so many rows
  constexpr int vectors = 2 * REGISTER_ROWS;
  return vectors >= 8 * rows ? 8 : vectors >= 4 * rows ? 4 : vectors >= 2 * rows ? 2 : 1;
}

// The same for any number of columns.
template <class M, long A_STRIDE, int ROWS, int COLUMNS = columns_for(ROWS), class Vector>
static void multiply_columns(const float* a, Vector vector_of, long first, long columns, long pieces, long steps,
                             long b_stride, float* out, long out_stride, const float* const* ahead) {
  for (; first + COLUMNS <= columns; first += COLUMNS)
    multiply_rows<M, A_STRIDE, ROWS, COLUMNS>(a, [=](long p, long c) { return vector_of(p, first + c); }, pieces, steps,
                                              b_stride, out + first * LANES, out_stride,
                                              ahead && first + COLUMNS <= SPAN_CELLS ? ahead + first : nullptr);
  if constexpr (COLUMNS > 1)
    multiply_columns<M, A_STRIDE, ROWS, COLUMNS / 2>(a, vector_of, first, columns, pieces, steps, b_stride, out, out_stride,
                                                     ahead);
}

// The same for up to REGISTER_ROWS rows.
template <class M, long A_STRIDE, int ROWS = REGISTER_ROWS, class... Rest>
static void multiply_some(long rows, const float* a, Rest... rest) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return multiply_some<M, A_STRIDE, ROWS - 1>(rows, a, rest...);
  }
  multiply_columns<M, A_STRIDE, ROWS>(a, rest...);
}

// The same for any number of rows.
template <class M, long A_STRIDE, class Vector>
static void multiply_tile(long rows, const float* a, Vector vector_of, long columns, long pieces, long steps, long b_stride,
                          float* out, long out_stride, const float* const* ahead) {
  const long parts = (rows + REGISTER_ROWS - 1) / REGISTER_ROWS;
  // A few columns at a time stay in the first-level cache for all rows.
  const long some = parts > 1 ? columns_for(REGISTER_ROWS) : columns;
  for (long first = 0; first < columns; first += some)
    for (long part = 0; part < parts; ++part) {
      const long begin = rows * part / parts, count = rows * (part + 1) / parts - begin;
      multiply_some<M, A_STRIDE>(count, a + begin * A_STRIDE, vector_of, first, std::min(first + some, columns), pieces,
                                 steps, b_stride, out + begin * out_stride, out_stride, parts > 1 ? nullptr : ahead);
    }
}

// The cells of a span of one sequence: in their block, or packed here where blocks do not consist of cells.
template <class T>
class Cells {
 public:
  const float *keys[SPAN_CELLS], *values[SPAN_CELLS];  // behind the last cell it stands again

  void find(const GroupedPages<T>& pages, const int32_t* table, long head, long begin, long count) {
    const long size = CELL * pages.padded;
    if (pages.has_cells()) {
      for (long c = 0; c < SPAN_CELLS; ++c) {
        const long at = begin + std::min(c, (count - 1) / CELL) * CELL, block = table[at / pages.block_size];
        const long offset = at % pages.block_size * pages.padded;
        keys[c] = (const float*)(pages.block(block, 0, head) + offset);
        values[c] = (const float*)(pages.block(block, 1, head) + offset);
      }
      return;
    }
    T* packed = buffer_.get<T>(2 * SPAN_CELLS * size);
    std::fill(packed, packed + 2 * SPAN_CELLS * size, T(0));
    for (long s = 0; s < count; ++s) {
      const long block = table[(begin + s) / pages.block_size], offset = (begin + s) % pages.block_size * pages.padded;
      const T *key = pages.block(block, 0, head) + offset, *value = pages.block(block, 1, head) + offset;
      T *to_keys = packed + s / CELL * size, *to_values = to_keys + SPAN_CELLS * size;
      for (long i = 0; i < pages.channels; ++i) pages.key_in(to_keys, s % CELL, i) = key[i];
      for (long i = 0; i < pages.channels; ++i) pages.value_in(to_values, s % CELL, i) = value[i];
    }
    for (long c = 0; c < SPAN_CELLS; ++c)
      keys[c] = (const float*)(packed + c * size), values[c] = (const float*)(packed + (SPAN_CELLS + c) * size);
  }

 private:
  Buffer buffer_;
};

// What one thread does: it takes rows, which are queries of one sequence with heads of one group, then attends to their spans.
template <class M>
class GroupedTile {
 public:
  typedef typename M::T T;

  template <class Query>
  void take_queries(Query query_of, long rows, long channels, long padded) {
    rows_ = rows, steps_ = (channels + PAIR<T> - 1) / PAIR<T>, padded_ = padded;
    queries_ = query_buffer_.get(rows * QUERY_STRIDE), weights_ = weight_buffer_.get(rows * WEIGHT_STRIDE);
    sums_ = sum_buffer_.get(rows * padded);
    std::fill(sums_, sums_ + rows * padded, 0.0f);
    for (long r = 0; r < rows; ++r) {
      float* to = queries_ + r * QUERY_STRIDE;
      peaks_[r] = -INFINITY, totals_[r] = 0;
      if constexpr (M::is_dot) {
        to[channels / 2] = 0;
        std::memcpy(to, query_of(r), channels * sizeof(T));
      } else {
        for (long i = 0; i < channels; i += LANES) store_n(to + i, load_n(query_of(r) + i, channels - i), channels - i);
        to[channels] = 0;
      }
    }
  }

  // Attends to `count` tokens in cells; row r sees the first seen_of(r) of them. `next` is attended to after this.
  template <class Seen>
  void attend(const Cells<T>& found, long count, Seen seen_of, float scale, const Cells<T>& next) {
    const auto keys = found.keys, values = found.values;
    const long cells = (count + CELL - 1) / CELL;
    // Scores of a few cells take as long as those of four; a cell behind the last one is a cell before it again.
    const long multiple = std::min(4, columns_for(std::min(rows_, REGISTER_ROWS)));
    const long scored = std::min(SPAN_CELLS, (cells + multiple - 1) / multiple * multiple);
    for (long r = 0; r < rows_; ++r) std::fill(weights_ + r * WEIGHT_STRIDE, weights_ + r * WEIGHT_STRIDE + scored * CELL, 0.0f);
    multiply_tile<M, QUERY_STRIDE>(rows_, queries_, [=](long, long cell) { return keys[cell]; }, scored, 1, steps_, LANES,
                                   weights_, WEIGHT_STRIDE, values);
    for (long r = 0; r < rows_; ++r) weigh_row(r, cells, seen_of(r), scale);
    multiply_tile<M, WEIGHT_STRIDE>(rows_, weights_, [=](long cell, long column) { return values[cell] + column * LANES; },
                                    padded_ / LANES, cells, CELL / PAIR<T>, padded_, sums_, padded_, next.keys);
  }

  void finish(long row, long channels, T* out) const {
    const float factor = 1.0f / totals_[row];
    const float* sums = sums_ + row * padded_;
    for (long i = 0; i < channels; i += LANES) store_n(out + i, load(sums + i) * factor, channels - i);
  }

 private:
  // Turns a row of scores into unnormalised weights, and what was summed before to the same peak.
  void weigh_row(long row, long cells, long seen, float scale) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float* scores = weights_ + row * WEIGHT_STRIDE;
    vf peak = splat(-INFINITY), total = {};
    for (long c = 0; c < cells; ++c) {
      vf score = load(scores + c * CELL) * scale;
      if ((c + 1) * CELL > seen) score = select(lane + (int)(c * CELL) < (int)seen, score, splat(-INFINITY));
      peak = maximum(peak, score);
      store(scores + c * CELL, score);
    }
    const float before = peaks_[row], now = std::max(before, largest(peak));
    for (long c = 0; c < cells; ++c) {
      const vf weight = exp(load(scores + c * CELL) - now);
      total += weight;
      if constexpr (M::is_dot)
        store_bits(scores + c * CELL / 2, narrow(weight));
      else
        store(scores + c * CELL, weight);
    }
    const float factor = exp(splat(before - now))[0];
    peaks_[row] = now, totals_[row] = totals_[row] * factor + sum(total);
    float* sums = sums_ + row * padded_;
    for (long i = 0; factor != 1.0f && i < padded_; i += LANES) store(sums + i, load(sums + i) * factor);
  }

  Buffer query_buffer_, weight_buffer_, sum_buffer_;
  float *queries_ = nullptr, *weights_ = nullptr, *sums_ = nullptr;
  float peaks_[TILE_QUERIES], totals_[TILE_QUERIES];
  long rows_ = 0, steps_ = 0, padded_ = 0;
};

// The sequences of a step; the new tokens of each are the last of its context.
struct Sequences {
  const int32_t* tables;      // [count, table_width] block ids
  const int64_t* query_lens;  // [count] new tokens; null: one each
  const int64_t* seq_lens;    // [count] tokens of the context
  long count, table_width;
  long queries(long b) const { return query_lens ? query_lens[b] : 1; }
};

template <class M>
static void grouped_attention(Batch<const typename M::T> q, long heads, GroupedPages<typename M::T> pages,
                              Sequences sequences, float scale, Batch<typename M::T> out) {
  typedef typename M::T T;
  enum { STARTS, QUEUE, NOW, NEXT };
  const long groups = pages.kv_heads, shared = heads / groups, tile = std::max(1L, TILE_QUERIES / shared);
  struct Start {
    long query, item;
  };
  auto tiles_of = [&](long b) { return (sequences.queries(b) + tile - 1) / tile; };
  Start* starts = thread_local_object<Buffer, STARTS>().template get<Start>(sequences.count + 1);
  starts[0] = {0, 0};
  for (long b = 0; b < sequences.count; ++b)
    starts[b + 1] = {starts[b].query + sequences.queries(b), starts[b].item + tiles_of(b) * groups};
  WorkQueue queue(starts[sequences.count].item, thread_local_object<Buffer, QUEUE>());
#pragma omp parallel
  {
    GroupedTile<M>& rows = thread_local_object<GroupedTile<M>>();
    Cells<T>* cells[2] = {&thread_local_object<Cells<T>, NOW>(), &thread_local_object<Cells<T>, NEXT>()};
    struct Item {  // queries of a sequence and the head of keys and values that they read
      long b, head, first, count, before;  // `before`: tokens of the context before the first query
      long tokens() const { return before + count; }
    };
    auto take = [&](Item& to) {
      const long item = queue.take();
      if (item == WorkQueue::EMPTY) return false;
      auto is_before = [](long i, const Start& start) { return i < start.item; };
      const long b = std::upper_bound(starts, starts + sequences.count, item, is_before) - starts - 1;
      // The tiles of a head follow each other, the longest contexts first.
      const long tiles = tiles_of(b), tile_of_head = tiles - 1 - (item - starts[b].item) % tiles, queries = sequences.queries(b);
      to = {b, (item - starts[b].item) / tiles, tile_of_head * tile, std::min(tile, queries - tile_of_head * tile)};
      to.before = sequences.seq_lens[b] - queries + to.first;
      return true;
    };
    auto find = [&](const Item& of, long begin, Cells<T>& to) {
      to.find(pages, sequences.tables + of.b * sequences.table_width, of.head, begin, std::min(SPAN_TOKENS, of.tokens() - begin));
    };
    Item now, next;
    bool is_left = take(now);
    if (is_left) find(now, 0, *cells[0]);
    while (is_left) {
      auto place = [&](auto batch, long row) {
        return batch.data + (starts[now.b].query + now.first + row / shared) * batch.token_stride +
               (now.head * shared + row % shared) * batch.head_stride;
      };
      rows.take_queries([&](long r) { return place(q, r); }, now.count * shared, pages.channels, pages.padded);
      for (long begin = 0; begin < now.tokens(); begin += SPAN_TOKENS, std::swap(cells[0], cells[1])) {
        const bool is_last = begin + SPAN_TOKENS >= now.tokens();
        if (is_last) is_left = take(next);
        if (!is_last || is_left) find(is_last ? next : now, is_last ? 0 : begin + SPAN_TOKENS, *cells[1]);
        rows.attend(*cells[0], std::min(SPAN_TOKENS, now.tokens() - begin),
                    [&](long r) { return now.before + r / shared + 1 - begin; }, scale, *cells[1]);
      }
      for (long r = 0; r < now.count * shared; ++r) rows.finish(r, pages.channels, place(out, r));
      now = next;
    }
  }
}
