// Multiplies the rows of all heads with each head's weight, on all threads.
#pragma once
#include "tile_panels.h"

template <class T>
struct Batch {  // x[t, n] = data + t * token_stride + n * head_stride
  T* data;
  long token_stride, head_stride;
};

#if HAS_TILES
// head_linear for weights whose columns lie side by side.
static void panel_linear(Batch<const bf16> x, long tokens, long heads, Weight<bf16> w, long w_head_stride, long k, long n,
                         Batch<bf16> out) {
  const long chunk = TilePanels::CHUNK_ROWS, chunks = (tokens + chunk - 1) / chunk;
  const int threads = tokens * heads * k * n < SMALL_PRODUCT ? 1 : omp_get_max_threads();
  long panels = PANELS;
  while (panels > 1 && heads * chunks * ((n + panels * PANEL - 1) / (panels * PANEL)) < 2 * threads) panels /= 2;
  const long parts = (n + panels * PANEL - 1) / (panels * PANEL), items = heads * chunks * parts;
#pragma omp parallel num_threads(threads)
  {
    Scope<Tiles> scope;
    TilePanels& rows = thread_local_object<TilePanels>();
    const long thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    long copied_for = -1;
    for (long item = items * thread / num_threads; item < items * (thread + 1) / num_threads; ++item) {
      const long group = item / parts, head = group / chunks, start = group % chunks * chunk;
      const long count = std::min(chunk, tokens - start), first = item % parts * panels * PANEL;
      if (copied_for != group)
        rows.copy([&](long i) { return x.data + (start + i) * x.token_stride + head * x.head_stride; }, count, k);
      copied_for = group;
      const long then = item + 1, next = then / parts / chunks * w_head_stride + then % parts * panels * PANEL;
      rows.multiply({w.data + head * w_head_stride, w.k_stride, w.n_stride}, first, std::min(panels * PANEL, n - first),
                    then < items ? w.data + next : nullptr,
                    [&](long i) { return out.data + (start + i) * out.token_stride + head * out.head_stride + first; });
    }
  }
}
#endif

#if defined(__AVX512F__)
// Few float columns contiguous along k, such as a router's: four rows by four columns at a time, without packing. An output
// is sixteen partial sums, the same ones whatever is computed beside it.
static void dot_linear(const float* x, long x_token, long tokens, Weight<float> w, long k, long n, float* out) {
#pragma omp parallel for num_threads(tokens * k * n < SMALL_PRODUCT / 4 ? 1 : omp_get_max_threads())
  for (long first = 0; first < tokens; first += 4)
    for (long column = 0; column < n; column += 4) {
      const float *rows[4], *columns[4];
      for (long i = 0; i < 4; ++i) {
        rows[i] = x + std::min(first + i, tokens - 1) * x_token;
        columns[i] = w.data + std::min(column + i, n - 1) * w.n_stride;
      }
      vf sums[16] = {};
      for (long i = 0; i < k; i += LANES)
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) sums[j] += load_n(rows[j / 4] + i, k - i) * load_n(columns[j % 4] + i, k - i);
      const vf found = row_sums(sums);
      for (long j = 0; j < 16; ++j)
        if (first + j / 4 < tokens && column + j % 4 < n) out[(first + j / 4) * n + column + j % 4] = found[j];
    }
}
constexpr long FEW_COLUMNS = 64;
#endif

// out[t, n, :] = x[t, n, :] w[n]; with addresses w[n] is at addresses[n], see Weight::at.
template <class M>
static void head_linear(Batch<const typename M::T> x, long tokens, long heads, Weight<typename M::T> w,
                        long w_head_stride, const int64_t* addresses, long k, long n, Batch<typename M::T> out) {
  typedef typename M::T T;
  if (tokens == 0) return;  // which cannot be divided into chunks
#if HAS_TILES
  if constexpr (std::is_same_v<M, Tiles>)
    if (!addresses && w.k_stride != 1) return panel_linear(x, tokens, heads, w, w_head_stride, k, n, out);
#endif
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<M, Float32>)
    if (heads == 1 && w.k_stride == 1 && n <= FEW_COLUMNS)
      return dot_linear(x.data, x.token_stride, tokens, w, k, n, out.data);
#endif
  const long panels = (n + PANEL - 1) / PANEL;
  const int threads = tokens * heads * k * n < SMALL_PRODUCT ? 1 : omp_get_max_threads();
  // Rows are divided too where columns alone would leave threads with little or no work.
  constexpr long multiple = Rows<M>::ROW_MULTIPLE;
  long chunk = Rows<M>::CHUNK_ROWS;
  auto is_uneven = [&](long items) { return items < threads || (items < 2 * threads && items % threads != 0); };
  for (long parts = 2; chunk > multiple && is_uneven((tokens + chunk - 1) / chunk * heads * panels); ++parts)
    chunk = std::min(chunk, ((tokens + parts - 1) / parts + multiple - 1) / multiple * multiple);
  const long chunks = (tokens + chunk - 1) / chunk, items = heads * chunks * panels;
#pragma omp parallel num_threads(threads)
  {
    Scope<M> scope;
    Rows<M>& rows = thread_local_object<Rows<M>>();
    float* sums = by_row<M> ? nullptr : thread_local_object<Buffer>().get(Rows<M>::SUMS);
    const long part = omp_get_thread_num(), parts = omp_get_num_threads(), end = items * (part + 1) / parts;
    long packed_for = -1, taken;
    for (long item = items * part / parts; item < end; item += taken) {
      const long group = item / panels, head = group / chunks, start = group % chunks * chunk;
      const long count = std::min(chunk, tokens - start), first = item % panels * PANEL;
      Weight<T> of_head = {w.data + head * w_head_stride, w.k_stride, w.n_stride};
      if (addresses) of_head = Weight<T>::at(addresses[head], k);
      if (packed_for != group) {
        rows.pack([&](long i) { return x.data + (start + i) * x.token_stride + head * x.head_stride; }, count, k,
                  of_head.columns(first, std::min(PANELS * PANEL, n - first), k));
        packed_for = group;
      }
      taken = std::min({rows.panels_at_once(of_head), end - item, panels - item % panels});
      const long columns = std::min(taken * PANEL, n - first);
      const long following = std::min({taken, end - item - taken, panels - item % panels - taken}) * PANEL;
      const MemoryRange next = of_head.columns(first + columns, std::min(following, n - first - columns), k);
      auto row_of = [&](long i) { return out.data + (start + i) * out.token_stride + head * out.head_stride + first; };
      if constexpr (by_row<M>) {
        rows.multiply_to(of_head, first, columns, row_of, next);
        continue;
      }
      rows.multiply(of_head, first, columns, sums, next);
      for (long i = 0; i < count; ++i) {
        T* to = row_of(i);
        const float* from = sums + i * PANEL;
        long left = columns;
        for (; left >= PANEL; left -= PANEL, to += PANEL, from += rows.rows_apart() * PANEL) store_panel<M>(to, from);
        if (left > 0) store_columns<M>(to, from, left);
      }
    }
  }
}
