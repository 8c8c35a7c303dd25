// The entry points for Python: the kernels by number, and functions that no step captures.
#include "calls.h"
#include "copy_digest.h"
#include "moe.h"
#include "rows.h"

static void route_all(const float* logits, const float* bias, long tokens, long experts, long top_k, long groups,
                      long kept_groups, bool normalize, float scaling, bool is_softmax, float* weights, int64_t* ids) {
#pragma omp parallel num_threads(threads_for(tokens * experts * top_k * 8))
  {
    static thread_local Buffer buffer;
    float* scores = buffer.get(2 * experts + groups);
#pragma omp for
    for (long t = 0; t < tokens; ++t)
      route(logits + t * experts, bias, experts, top_k, groups, kept_groups, normalize, scaling, is_softmax, scores,
            scores + experts, weights + t * top_k, ids + t * top_k);
  }
}

constexpr long CALL_WORDS = 20;  // words of a captured call: the kernel's number and its arguments

extern "C" void cpu_run(long calls, const Word* words) {
  static const Kernel KERNELS[] = {  // in the order of KERNELS in ../build.py
      head_linear_kernel(),   mla_attention_kernel(), grouped_attention_kernel(), fused_experts_kernel(),
      called<route_all>,      BY_TYPE(rms_norm),      BY_TYPE(add_rms_norm),      BY_TYPE(silu_and_mul),
      BY_TYPE(rotary),        BY_TYPE(write_kv),      write_grouped_kernel(),     called<sample_rows>,
      called<logprob_rows>,   BY_TYPE(add),           called<widen_all>,      called<take_rows>,
      called<take_panel_rows>,
  };
  for (long i = 0; i < calls; ++i, words += CALL_WORDS) KERNELS[words[0].integer](words + 1);
}

extern "C" int cpu_may_use_tiles() { return may_use_tiles(); }

#define BY_SIZE(size, call)                         \
  switch (size) {                                   \
    case 1: { typedef uint8_t U; call; } break;     \
    case 2: { typedef uint16_t U; call; } break;    \
    default: { typedef uint32_t U; call; } break;   \
  }

// *total += the slice's digest
extern "C" void cpu_digest(uint64_t* total, const uint8_t* x, long element_size, long is_across, long stride, long rows,
                           long columns, const int8_t* c, const uint64_t* r) {
  if (is_across) BY_SIZE(element_size, *total += digest_across<U>(x, stride, rows, columns, {c, r}))
  else *total += digest_along(x, stride, rows, columns * element_size, {c, r});
}

// Copies, and adds the digests of what was read and of what was written to the totals that are not null.
extern "C" void cpu_copy_digest(uint64_t* from_total, uint64_t* to_total, const uint8_t* from, uint8_t* to,
                                long from_stride, long to_stride, long rows, long columns, long element_size,
                                long is_turned, const int8_t* c, const uint64_t* r) {
  const CopiedSlice slice{from, to, from_stride, to_stride, rows, columns, from_total != nullptr, to_total != nullptr};
  CopiedSums sums{};
  if (is_turned) BY_SIZE(element_size, (sums = copy_turned<U>(slice, {c, r})))
  else BY_SIZE(element_size, (sums = copy_along<U>(slice, {c, r})))
  if (from_total) *from_total += sums.from;
  if (to_total) *to_total += sums.to;
}

// Bytes of rows x k compressed bfloat16 values; -1 where they are not whole tiles.
extern "C" long cpu_compressed_bytes(long rows, long k) {
  return rows % COMPRESSED_ROWS == 0 && k % COMPRESSED_K == 0 ? rows / COMPRESSED_ROWS * compressed_bytes(k) : -1;
}

extern "C" int cpu_compress(const void* values, long stride, long rows, long k, void* compressed) {
  return compress((const bf16*)values, stride, rows, k, (uint8_t*)compressed);
}

static int packing_threads(long values) { return values < 1 << 20 ? 1 : omp_get_max_threads(); }

// Panels of bfloat16 rows x k, `rows` in whole panels and `k` in pairs, and back.
extern "C" void cpu_pack_panels(const bf16* values, long stride, long rows, long k, float* panels) {
#pragma omp parallel for num_threads(packing_threads(rows * k))
  for (long first = 0; first < rows; first += PANEL) pack_panel<Dot>({values, 1, stride}, first, PANEL, k, panels + first * k / 2);
}

extern "C" void cpu_unpack_panels(const uint32_t* panels, long rows, long k, bf16* values) {
#pragma omp parallel for num_threads(packing_threads(rows * k))
  for (long first = 0; first < rows; first += PANEL)
    for (long row = first; row < first + PANEL; ++row)
      for (long i = 0; i < k; i += 2) std::memcpy(values + row * k + i, panels + first * k / 2 + i / 2 * PANEL + row - first, 4);
}

extern "C" void cpu_decompress(const void* compressed, long rows, long k, void* values) {
  decompress((const uint8_t*)compressed, rows, k, (bf16*)values);
}
