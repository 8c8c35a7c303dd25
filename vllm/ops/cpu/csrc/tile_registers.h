// The processor's tile registers (AMX) and their instructions, with the registers' numbers as template arguments, which
// a loop over constants can compute: the compilers' own functions take literals only.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "vec.h"

constexpr long TILE_K = 32;                       // elements along k that one instruction multiplies
constexpr long TILE_WORDS = LANES * TILE_K / 2;  // in one tile, whether of operands or of sums
constexpr long TILE_BYTES = 64;                   // one row of a tile

// A process asks the kernel once for the tile registers, which are then saved with every thread.
static inline bool may_use_tiles() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

class TileScope {  // configures all eight registers of this thread as 16 rows of 64 bytes
 public:
  TileScope() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" : : "r"(&config) : "memory");  // g++ assumes that the instruction reads 8 bytes only
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
};

template <int TILE>
static inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}
template <int TILE>
static inline void load_tile(const void* from, long stride) {  // rows are `stride` bytes apart
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE));
}
template <int TILE>
static inline void store_tile(void* to, long stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}
// SUMS += A times B, bfloat16 pairs
template <int SUMS, int A, int B>
static inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
}

template <class F, int... I>
static inline void call_for_each(F call, std::integer_sequence<int, I...>) {
  (call(std::integral_constant<int, I>()), ...);
}
// Calls call(i) for i from 0 to COUNT - 1, each a constant.
template <int COUNT, class F>
static inline void unroll(F call) {
  call_for_each(call, std::make_integer_sequence<int, COUNT>());
}

template <int COUNT>
static inline void zero_tiles() {
  unroll<COUNT>([](auto i) { zero_tile<i>(); });
}
