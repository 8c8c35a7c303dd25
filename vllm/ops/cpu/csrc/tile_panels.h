// Products by matrix tiles (AMX) with weights whose columns lie side by side: pairs along k are interleaved first, and rows
// of x are loaded into tiles without packing.
#pragma once
#include "tiles.h"

#if HAS_TILES
// Rows of x that one thread copies once and multiplies with panels of such weights, inside a TileScope.
class TilePanels {
 public:
  static constexpr long CHUNK_ROWS = 16 * LANES;  // rows

  template <class Row>
  void copy(Row row, long rows, long k) {
    rows_ = rows, k_ = k, steps_ = (k + TILE_K - 1) / TILE_K;
    data_ = row_buffer_.get<bf16>((rows + LANES) * steps_ * TILE_K);
    for (long i = 0; i < rows; ++i) {
      bf16* to = data_ + i * steps_ * TILE_K;
      std::memcpy(to, row(i), k * sizeof(bf16));
      std::fill(to + k, to + steps_ * TILE_K, bf16(0));
    }
  }

  // to(row)[column] = x times columns [first, first + columns) of w, at most PANELS * PANEL; `next` is where the rows that
  // are read next begin.
  template <class To>
  void multiply(const Weight<bf16>& w, long first, long columns, const bf16* next, To to) {
    const long panels = (columns + PANEL - 1) / PANEL, apart = steps_ * 2 * TILE_WORDS;
    float* paired = pair_buffer_.get(panels * apart);
    for (long i = 0; i < steps_ * TILE_K; i += 2) {
      const bf16* row = w.data + i * w.k_stride + first;
      for (long p = 0; p < panels; ++p, row += PANEL) {
        const long left = std::min(PANEL, columns - p * PANEL);
        vhh even = {}, odd = {};
        if (left == PANEL && i + 1 < k_) {
          even = load_bits<vhh>(row), odd = load_bits<vhh>(row + w.k_stride);
        } else {
          if (i < k_) std::memcpy(&even, row, left * sizeof(bf16));
          if (i + 1 < k_) std::memcpy(&odd, row + w.k_stride, left * sizeof(bf16));
        }
        if (next) {
          _mm_prefetch(next + i * w.k_stride + p * PANEL, _MM_HINT_T1);
          _mm_prefetch(next + (i + 1) * w.k_stride + p * PANEL, _MM_HINT_T1);
        }
        vf low, high;
        interleave(even, odd, low, high);
        store(paired + p * apart + i / 2 * PANEL, low);
        store(paired + p * apart + i / 2 * PANEL + LANES, high);
      }
    }
    for (long row = 0; row < rows_; row += 2 * LANES)
      for (long p = 0; p < panels; ++p) {
        alignas(64) float sums[2 * LANES][PANEL];
        const long count = std::min(2 * LANES, rows_ - row);
        multiply_rows(row, count > LANES, paired + p * apart, sums);
        const long left = columns - p * PANEL;
        for (long i = 0; i < count; ++i)
          if (left >= PANEL)
            store_panel<Tiles>(to(row + i) + p * PANEL, sums[i]);
          else
            store_columns<Tiles>(to(row + i) + p * PANEL, sums[i], left);
      }
  }

 private:
  void multiply_rows(long row, bool has_second, const float* paired, float (*sums)[PANEL]) {
    const long stride = steps_ * TILE_K;
    const bf16 *x = data_ + row * stride, *second = has_second ? x + LANES * stride : x;
    zero_tiles<4>();
    for (long s = 0; s < steps_; ++s, paired += 2 * TILE_WORDS) {
      load_tile<4>(x + s * TILE_K, stride * sizeof(bf16));
      unroll<2>([&](auto half) {
        load_tile<5 + half>(paired + half * LANES, PANEL * sizeof(float));
        multiply_tiles<half, 4, 5 + half>();
      });
      load_tile<7>(second + s * TILE_K, stride * sizeof(bf16));
      unroll<2>([&](auto half) { multiply_tiles<2 + half, 7, 5 + half>(); });
    }
    unroll<4>([&](auto i) { store_tile<i>(sums[i / 2 * LANES] + i % 2 * LANES, PANEL * sizeof(float)); });
  }

  Buffer row_buffer_, pair_buffer_;
  bf16* data_ = nullptr;  // [row][steps * 32]
  long rows_ = 0, k_ = 0, steps_ = 0;
};
#endif
