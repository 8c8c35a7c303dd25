// Products by the processor's matrix tiles (AMX): sixteen rows by sixteen columns, 32 elements along k at once.
//
// As elsewhere every output is one sum over k in order: an instruction adds the products of its 32 elements to a sum in
// order, and rows and columns do not meet. Sums are rounded to bfloat16 only when a row is finished.
#pragma once
#include <type_traits>

#include "gemm.h"

struct NoScope {
  ~NoScope() {}
};

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1

struct Tiles {  // bfloat16 tensors and tiles
  typedef bf16 T;
  static constexpr bool is_dot = true;
};

constexpr long TILE_K = 32;                // elements along k of one instruction
constexpr long TILE_SIZE = LANES * TILE_K;  // bfloat16 elements of one tile, of sums half as many

// Tile registers are the process's to ask for, once: the kernel then saves them with every thread.
static inline bool may_use_tiles() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

class TileScope {  // all eight registers as 16 rows of 64 bytes, for one thread
 public:
  TileScope() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
};

// Rows of x, laid out as tiles once and multiplied with many panels; of one thread, inside a TileScope.
class TileRows {
 public:
  static constexpr long ALIKE = LANES;
  static constexpr long AT_ONCE = 16 * LANES;
  long rows_apart() const { return tiles_ * LANES; }

  template <class X = Tiles, class Row>
  void pack(Row row, long rows, long k) {
    k_ = k, tiles_ = (rows + LANES - 1) / LANES, steps_ = (k + TILE_K - 1) / TILE_K;
    data_ = buffer_.get<bf16>(tiles_ * steps_ * TILE_SIZE);
    for (long r = 0; r < tiles_ * LANES; ++r) {
      bf16* to = data_ + r / LANES * steps_ * TILE_SIZE + r % LANES * TILE_K;
      const bf16* from = r < rows ? row(r) : nullptr;
      for (long s = 0; s < steps_; ++s, to += TILE_SIZE)
        store_bits(to, from ? (vhh)load_words<Tiles>(from + s * TILE_K, k - s * TILE_K) : vhh{});
    }
  }

  long panels_at_once(const Weight<bf16>& w) const { return w.n_stride == 1 ? PANELS : 1; }

  // out[panel][rows_apart()][32] = x times columns [first, first + columns) of w
  void multiply(const Weight<bf16>& w, long first, long columns, float* out) {
    const long panels = (columns + PANEL - 1) / PANEL, whole = w.n_stride == 1 ? columns / PANEL : 0;
    const long apart = rows_apart() * PANEL, depth = tiles_ <= FEW_TILES ? FEW_STEPS : STEPS;
    float* paired = panel_.get<float>(std::max(PANELS * depth, steps_) * STEP_WORDS);
    long p = 0;
    for (; p < whole; p += PANELS) {
      const long count = std::min(PANELS, whole - p);
      for (long start = 0; start < steps_; start += depth) {
        const long steps = std::min(depth, steps_ - start);
        pair_columns(w, start, steps, first + p * PANEL, count, paired);
        for (long i = 0; i < count; ++i) run(paired + i * steps * STEP_WORDS, start, steps, out + (p + i) * apart);
      }
    }
    for (; p < panels; ++p) {
      pack_panel<Dot>(w, first + p * PANEL, std::min(PANEL, columns - p * PANEL), k_, paired);
      std::fill(paired + words<Dot>(k_) * PANEL, paired + steps_ * STEP_WORDS, 0.0f);
      run(paired, 0, steps_, out + p * apart);
    }
  }

 private:
  static constexpr long FEW_TILES = 1;
  static constexpr long FEW_STEPS = 2, STEPS = 8;         // of 32 along k, that are paired at a time
  static constexpr long STEP_WORDS = TILE_K / 2 * PANEL;  // of 32 columns and one step
  static constexpr long AHEAD = 32;                       // rows of the weight that are fetched early

  // `steps` steps of `panels` whole panels as words of pairs, out[panel][word][32 columns]; zeros behind the last row.
  void pair_columns(const Weight<bf16>& w, long start, long steps, long first, long panels, float* out) {
    const bf16* row = w.data + start * TILE_K * w.k_stride + first;
    const long left = k_ - start * TILE_K;
    for (long i = 0; i < steps * TILE_K; i += 2, row += 2 * w.k_stride, out += PANEL) {
      float* to = out;
      for (long p = 0; p < panels; ++p, to += steps * STEP_WORDS) {
        const bf16* columns = row + p * PANEL;
        __builtin_prefetch(columns + AHEAD * w.k_stride);
        __builtin_prefetch(columns + (AHEAD + 1) * w.k_stride);
        vf low, high;
        interleave(i < left ? load_bits<vhh>(columns) : vhh{},
                   i + 1 < left ? load_bits<vhh>(columns + w.k_stride) : vhh{}, low, high);
        store(to, low);
        store(to + LANES, high);
      }
    }
  }

  // All rows with `steps` steps of one panel, added to what is there unless they are the first.
  void run(const float* panel, long start, long steps, float* out) {
    for (long t = 0; t < tiles_; t += 2, out += 2 * LANES * PANEL) {
      const bf16* x = data_ + (t * steps_ + start) * TILE_SIZE;
      if (t + 1 < tiles_)
        kernel<true>(x, x + steps_ * TILE_SIZE, panel, steps, start > 0, out);
      else
        kernel<false>(x, nullptr, panel, steps, start > 0, out);
    }
  }

  template <bool HAS_SECOND>
  static void kernel(const bf16* x, const bf16* second, const float* panel, long steps, bool goes_on, float* out) {
    constexpr long BYTES = PANEL * sizeof(float);
    float* below = out + LANES * PANEL;
    if (goes_on) {
      _tile_loadd(0, out, BYTES);
      _tile_loadd(1, out + LANES, BYTES);
      if constexpr (HAS_SECOND) {
        _tile_loadd(2, below, BYTES);
        _tile_loadd(3, below + LANES, BYTES);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (HAS_SECOND) {
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    for (long s = 0; s < steps; ++s, panel += STEP_WORDS) {
      _tile_loadd(4, panel, BYTES);
      _tile_loadd(5, panel + LANES, BYTES);
      _tile_loadd(6, x + s * TILE_SIZE, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
      if constexpr (HAS_SECOND) {
        _tile_loadd(7, second + s * TILE_SIZE, 64);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 7, 5);
      }
    }
    _tile_stored(0, out, BYTES);
    _tile_stored(1, out + LANES, BYTES);
    if constexpr (HAS_SECOND) {
      _tile_stored(2, below, BYTES);
      _tile_stored(3, below + LANES, BYTES);
    }
  }

  Buffer buffer_, panel_;
  bf16* data_ = nullptr;
  long k_ = 0, tiles_ = 0, steps_ = 0;
};

template <class M>
using Rows = std::conditional_t<std::is_same_v<M, Tiles>, TileRows, PackedRows<M>>;
template <class M>
using Scope = std::conditional_t<std::is_same_v<M, Tiles>, TileScope, NoScope>;
#else
#define HAS_TILES 0
typedef Dot Tiles;
static inline bool may_use_tiles() { return false; }

template <class M>
using Rows = PackedRows<M>;
template <class M>
using Scope = NoScope;
#endif
