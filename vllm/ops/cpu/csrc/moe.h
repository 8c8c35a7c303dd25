// Routed experts: choices sorted by expert, two products per expert, results combined in each token's own order.
#pragma once
#include <cmath>
#include <type_traits>

#include "linear.h"

template <class T>
struct Experts {
  const void* w13;  // T [experts, hidden, 2 * width]; where by_row, [experts, 2 * width, hidden]
  const void* w2;   // T [experts, width, hidden]; where by_row, [experts, hidden, width]
  bool is_packed;        // then both hold addresses: int64 [experts][2] of gate and up, [experts] of down
  long count, hidden, width, first;

  template <class M>
  Weight<T> gate_or_up(long expert, bool is_up) const {
    if (is_packed) return Weight<T>::at(((const int64_t*)w13)[2 * expert + is_up], hidden);
    const T* data = (const T*)w13 + expert * 2 * width * hidden;
    return by_row<M> ? Weight<T>{data + is_up * width * hidden, 1, hidden} : Weight<T>{data + is_up * width, 2 * width, 1};
  }

  template <class M>
  Weight<T> down(long expert) const {
    if (is_packed) return Weight<T>::at(((const int64_t*)w2)[expert], width);
    const T* data = (const T*)w2 + expert * hidden * width;
    return by_row<M> ? Weight<T>{data, 1, width} : Weight<T>{data, hidden, 1};
  }
};

// A work item: at most Rows<M>::CHUNK_ROWS rows of one expert.
struct Segment {
  long expert, start, rows;
};

constexpr long RESULT_BYTES = 4 << 20;  // for the choices' results, or more where one block of columns needs it

template <class M>
static void fused_experts(Batch<const typename M::T> x, long tokens, long choices, const float* weights,
                          const int64_t* ids, Experts<typename M::T> experts, typename M::T* out) {
  typedef typename M::T T;
  typedef std::conditional_t<M::is_dot, bf16, float> Act;  // activations between the products
  typedef std::conditional_t<M::is_dot, M, Float32> Second;
  constexpr long chunk = Rows<M>::CHUNK_ROWS;
  const long hidden = experts.hidden, width = experts.width, total = tokens * choices;
  enum { ITEM_SUMS, ORDER, PLACE, SEGMENTS, ENDS, ACT, RESULTS, UP, DOWN };
  long* order = thread_local_object<Buffer, ORDER>().template get<long>(total);
  long* place = thread_local_object<Buffer, PLACE>().template get<long>(total);
  long* ends = thread_local_object<Buffer, ENDS>().template get<long>(experts.count + 1);
  std::fill(ends, ends + experts.count + 1, 0L);
  for (long s = 0; s < total; ++s) {
    const long e = ids[s] - experts.first;
    if (e >= 0 && e < experts.count) ++ends[e + 1];
  }
  Segment* segments = thread_local_object<Buffer, SEGMENTS>().template get<Segment>(experts.count + total / chunk + 1);
  long num_segments = 0;
  for (long e = 0; e < experts.count; ++e) {
    const long start = ends[e], rows = ends[e + 1];
    for (long done = 0; done < rows; done += chunk) segments[num_segments++] = {e, start + done, std::min(chunk, rows - done)};
    ends[e + 1] += ends[e];
  }
  for (long s = 0; s < total; ++s) {
    const long e = ids[s] - experts.first;
    place[s] = -1;
    if (e >= 0 && e < experts.count) {
      place[s] = ends[e]++;
      order[place[s]] = s;
    }
  }
  Act* act = thread_local_object<Buffer, ACT>().template get<Act>(total * width);
  constexpr long item_columns = PANEL * PANELS;
  const long up_items = (width + item_columns - 1) / item_columns;
  const long down_items = (hidden + item_columns - 1) / item_columns;
  // Results keep the order of the sums; they are computed and combined a block of columns at a time.
  const long most_items = std::clamp(RESULT_BYTES / (total * item_columns * (long)sizeof(float)), 1L, down_items);
  const long row_size = most_items * item_columns;
  float* results = thread_local_object<Buffer, RESULTS>().get(total * row_size);
  WorkQueue up_queue(num_segments * up_items, thread_local_object<Buffer, UP>());
  WorkQueue down_queue(num_segments * most_items, thread_local_object<Buffer, DOWN>());
#pragma omp parallel
  {
    Scope<M> scope;
    Rows<M>& rows = thread_local_object<Rows<M>, 0>();
    Rows<M>& act_rows = thread_local_object<Rows<M>, 1>();
    float* gate = thread_local_object<Buffer, ITEM_SUMS>().get(2 * Rows<M>::SUMS);
    float* up = gate + Rows<M>::SUMS;
    long packed_for = -1;
    for (long item; (item = up_queue.take()) != WorkQueue::EMPTY;) {
      const Segment segment = segments[item / up_items];
      const Weight<T> w1 = experts.template gate_or_up<M>(segment.expert, false);
      const Weight<T> w3 = experts.template gate_or_up<M>(segment.expert, true);
      const long begin = item % up_items * item_columns, end = std::min(width, begin + item_columns);
      if (packed_for != item / up_items) {
        rows.pack([&](long i) { return x.data + order[segment.start + i] / choices * x.token_stride; }, segment.rows,
                  hidden, w1.columns(begin, end - begin, hidden));
        packed_for = item / up_items;
      }
      const long step = rows.panels_at_once(w1) * PANEL;
      for (long first = begin; first < end; first += step) {
        const long columns = std::min(step, end - first);
        const long following = std::min(step, end - first - columns);
        rows.multiply(w1, first, columns, gate, w3.columns(first, columns, hidden));
        rows.multiply(w3, first, columns, up, w1.columns(first + columns, following, hidden));
        for (long p = 0; p * PANEL < columns; ++p)
          for (long i = 0; i < segment.rows; ++i) {
            const float *g = gate + (p * rows.rows_apart() + i) * PANEL, *u = up + (p * rows.rows_apart() + i) * PANEL;
            vf low = silu(load(g)) * load(u), high = silu(load(g + LANES)) * load(u + LANES);
            in_order<M>(low, high);
            Act* to = act + (segment.start + i) * width + first + p * PANEL;
            const long left = columns - p * PANEL;
            if (left >= PANEL) {
              store_two(to, low, high);
              continue;
            }
            store_n(to, low, left);
            if (left > LANES) store_n(to + LANES, high, left - LANES);
          }
      }
    }
#pragma omp barrier
    for (long first_item = 0; first_item < down_items; first_item += most_items) {
      const long items = std::min(most_items, down_items - first_item);
      const long origin = first_item * item_columns, past = std::min(hidden, origin + items * item_columns);
      if (first_item > 0) {
#pragma omp single
        down_queue.divide(num_segments * items);
      }
      packed_for = -1;
      for (long item; (item = down_queue.take()) != WorkQueue::EMPTY;) {
        const Segment segment = segments[item / items];
        const Weight<T> w = experts.template down<M>(segment.expert);
        const long begin = origin + item % items * item_columns, end = std::min(past, begin + item_columns);
        if (packed_for != item / items) {
          act_rows.template pack<Second>([&](long i) { return act + (segment.start + i) * width; }, segment.rows, width,
                                         w.columns(begin, end - begin, width));
          packed_for = item / items;
        }
        const long step = act_rows.panels_at_once(w) * PANEL;
        for (long first = begin; first < end; first += step) {
          const long columns = std::min(step, end - first);
          const long following = std::min(step, end - first - columns);
          act_rows.multiply(w, first, columns, gate, w.columns(first + columns, following, width));
          for (long p = 0; p * PANEL < columns; ++p)
            for (long i = 0; i < segment.rows; ++i) {
              const float* sums = gate + (p * act_rows.rows_apart() + i) * PANEL;
              float* to = results + (segment.start + i) * row_size + first - origin + p * PANEL;
              const float weight = weights[order[segment.start + i]];
              store(to, load(sums) * weight);
              store(to + LANES, load(sums + LANES) * weight);
            }
        }
      }
#pragma omp barrier
#pragma omp for
      for (long t = 0; t < tokens; ++t)
        for (long i = origin; i < past; i += PANEL) {
          float sums[PANEL];
          vf low = {}, high = {};
          for (long k = 0; k < choices; ++k) {
            const long row = place[t * choices + k];
            if (row < 0) continue;
            low += load(results + row * row_size + i - origin);
            high += load(results + row * row_size + i - origin + LANES);
          }
          store(sums, low);
          store(sums + LANES, high);
          if (past - i >= PANEL)
            store_panel<M>(out + t * hidden + i, sums);
          else
            store_columns<M>(out + t * hidden + i, sums, past - i);
        }
    }
  }
}

// The index of the largest value, the first of equal ones; 0 where all are NaN.
static inline long first_of_largest(const float* values, long count) {
  vf peak = splat(-INFINITY);
  long i = 0;
  for (; i + LANES <= count; i += LANES) peak = maximum(peak, load(values + i));
  float largest_value = largest(peak);
  for (; i < count; ++i) largest_value = std::max(largest_value, values[i]);
  const long found = std::find(values, values + count, largest_value) - values;
  return found < count ? found : 0;
}

// DeepSeek's routing of one token; ids are in descending order of their scores.
static void route(const float* logits, const float* bias, long experts, long top_k, long groups, long kept_groups,
                  bool normalize, float scaling, bool is_softmax, float* scores, float* choice, float* weights,
                  int64_t* ids) {
  if (is_softmax) {
    float peak = -INFINITY, total = 0;
    for (long e = 0; e < experts; ++e) peak = std::max(peak, logits[e]);
    for (long e = 0; e < experts; e += LANES) store_n(scores + e, exp(load_n(logits + e, experts - e) - peak), experts - e);
    for (long e = 0; e < experts; ++e) total += scores[e];
    for (long e = 0; e < experts; ++e) scores[e] /= total;
  } else {
    for (long e = 0; e < experts; e += LANES)
      store_n(scores + e, 1.0f / (exp(-load_n(logits + e, experts - e)) + 1.0f), experts - e);
  }
  for (long e = 0; e < experts; ++e) choice[e] = scores[e] + (bias ? bias[e] : 0.0f);
  if (kept_groups < groups) {
    const long size = experts / groups;
    float* of_group = choice + experts;  // later a mark: -inf means that the group is kept
    for (long g = 0; g < groups; ++g) {
      float best = -INFINITY, second = -INFINITY;
      for (long e = g * size; e < (g + 1) * size; ++e) {
        second = std::max(second, std::min(best, choice[e]));
        best = std::max(best, choice[e]);
      }
      of_group[g] = is_softmax || size < 2 ? best : best + second;
    }
    for (long kept = 0; kept < kept_groups; ++kept) {
      long best = -1;
      for (long g = 0; g < groups; ++g)
        if (of_group[g] != -INFINITY && (best < 0 || of_group[g] > of_group[best])) best = g;
      if (best >= 0) of_group[best] = -INFINITY;
    }
    for (long g = 0; g < groups; ++g)
      if (of_group[g] != -INFINITY)
        for (long e = g * size; e < (g + 1) * size; ++e) choice[e] = -INFINITY;
  }
  float total = 0;
  for (long k = 0; k < top_k; ++k) {
    const long best = first_of_largest(choice, experts);
    ids[k] = best, weights[k] = scores[best], total += scores[best];
    choice[best] = -INFINITY;
  }
  for (long k = 0; k < top_k; ++k) weights[k] = (normalize ? weights[k] / (total + 1e-20f) : weights[k]) * scaling;
}
