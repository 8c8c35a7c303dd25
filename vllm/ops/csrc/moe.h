// Routed experts: choices sorted by expert, two products per expert, results put together in each token's own order.
#pragma once
#include <atomic>
#include <cmath>
#include <type_traits>

#include "gemm.h"

constexpr long PANELS_PER_ITEM = 4;

template <class T>
struct Experts {
  const T* w13;  // [experts, hidden, 2 * width] in memory
  const T* w2;   // [experts, width, hidden]
  long count, hidden, width, first;
};

// Chunks of at most CHUNK rows of one expert.
struct Segment {
  long expert, start, rows;
};

template <class M>
static void fused_experts(Batch<const typename M::T> x, long tokens, long choices, const float* weights,
                          const int64_t* ids, Experts<typename M::T> experts, typename M::T* out) {
  typedef typename M::T T;
  typedef std::conditional_t<M::is_dot, bf16, float> Act;  // activations between the products
  typedef std::conditional_t<M::is_dot, Dot, Float32> Second;
  const long hidden = experts.hidden, width = experts.width, total = tokens * choices;
  static thread_local Buffer order_buffer, place_buffer, segment_buffer, end_buffer, act_buffer, result_buffer;
  long* order = order_buffer.get<long>(total);
  long* place = place_buffer.get<long>(total);
  long* ends = end_buffer.get<long>(experts.count + 1);
  std::fill(ends, ends + experts.count + 1, 0L);
  for (long s = 0; s < total; ++s) {
    const long e = ids[s] - experts.first;
    if (e >= 0 && e < experts.count) ++ends[e + 1];
  }
  Segment* segments = segment_buffer.get<Segment>(experts.count + total / CHUNK + 1);
  long num_segments = 0;
  for (long e = 0; e < experts.count; ++e) {
    const long start = ends[e], rows = ends[e + 1];
    for (long done = 0; done < rows; done += CHUNK) segments[num_segments++] = {e, start + done, std::min(CHUNK, rows - done)};
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
  Act* act = act_buffer.get<Act>(total * width);
  float* results = result_buffer.get(total * hidden);
  const long up_items = (width + PANEL * PANELS_PER_ITEM - 1) / (PANEL * PANELS_PER_ITEM);
  const long down_items = (hidden + PANEL * PANELS_PER_ITEM - 1) / (PANEL * PANELS_PER_ITEM);
  std::atomic<long> next_up{0}, next_down{0};
#pragma omp parallel
  {
    static thread_local PackedRows<M> rows;
    static thread_local PackedRows<M> act_rows;
    static thread_local Buffer buffer;
    float* gate = buffer.get(2 * CHUNK * PANEL);
    float* up = gate + CHUNK * PANEL;
    long packed_for = -1;
    for (long item = next_up++; item < num_segments * up_items; item = next_up++) {
      const Segment segment = segments[item / up_items];
      if (packed_for != item / up_items) {
        rows.pack([&](long i) { return x.data + order[segment.start + i] / choices * x.token_stride; }, segment.rows, hidden);
        packed_for = item / up_items;
      }
      const Weight<T> w = {experts.w13 + segment.expert * hidden * 2 * width, 2 * width, 1};
      const long begin = item % up_items * PANEL * PANELS_PER_ITEM;
      for (long first = begin; first < std::min(width, begin + PANEL * PANELS_PER_ITEM); first += PANEL) {
        const long columns = std::min(PANEL, width - first);
        rows.multiply(w, first, columns, gate);
        rows.multiply(w, width + first, columns, up);
        for (long i = 0; i < segment.rows; ++i)
          for (long half = 0; half < columns; half += LANES)
            store_n(act + (segment.start + i) * width + first + half,
                    silu(load(gate + i * PANEL + half)) * load(up + i * PANEL + half), columns - half);
      }
    }
#pragma omp barrier
    packed_for = -1;
    for (long item = next_down++; item < num_segments * down_items; item = next_down++) {
      const Segment segment = segments[item / down_items];
      if (packed_for != item / down_items) {
        act_rows.template pack<Second>([&](long i) { return act + (segment.start + i) * width; }, segment.rows, width);
        packed_for = item / down_items;
      }
      const long begin = item % down_items * PANEL * PANELS_PER_ITEM;
      for (long first = begin; first < std::min(hidden, begin + PANEL * PANELS_PER_ITEM); first += PANEL) {
        const long columns = std::min(PANEL, hidden - first);
        act_rows.multiply({experts.w2 + segment.expert * width * hidden, hidden, 1}, first, columns, gate);
        for (long i = 0; i < segment.rows; ++i)
          for (long half = 0; half < columns; half += LANES)
            store_n(results + (segment.start + i) * hidden + first + half,
                    load(gate + i * PANEL + half) * weights[order[segment.start + i]], columns - half);
      }
    }
#pragma omp barrier
#pragma omp for
    for (long t = 0; t < tokens; ++t)
      for (long i = 0; i < hidden; i += LANES) {
        vf sum = {};
        for (long k = 0; k < choices; ++k)
          if (place[t * choices + k] >= 0) sum += load_n(results + place[t * choices + k] * hidden + i, hidden - i);
        store_n(out + t * hidden + i, sum, hidden - i);
      }
  }
}

// DeepSeek's routing of one token; ids in descending order of choice.
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
    float* of_group = choice + experts;  // then a mark: -inf is kept
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
    long best = 0;
    for (long e = 1; e < experts; ++e)
      if (choice[e] > choice[best]) best = e;
    ids[k] = best, weights[k] = scores[best], total += scores[best];
    choice[best] = -INFINITY;
  }
  for (long k = 0; k < top_k; ++k) weights[k] = (normalize ? weights[k] / (total + 1e-20f) : weights[k]) * scaling;
}
