// The entry points but those of products.cpp and attention.cpp, and what calls them all again.
#include <type_traits>
#include <utility>

#include "copy_digest.h"
#include "entries.h"
#include "moe.h"
#include "rows.h"

#define BY_TYPE(mode, call)                         \
  switch (mode) {                                   \
    case 0: { typedef float T; call; } break;       \
    default: { typedef bf16 T; call; } break;       \
  }

extern "C" {

int num_threads() { return omp_get_max_threads(); }

int cpu_may_use_tiles() { return may_use_tiles(); }

void cpu_topk_router(const float* logits, const float* bias, long tokens, long experts, long top_k, long groups,
                     long kept_groups, long normalize, float scaling, long is_softmax, float* weights, int64_t* ids) {
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

void cpu_rms_norm(long mode, const void* x, long stride, long tokens, long size, const void* weight, float eps,
                  void* out) {
  BY_TYPE(mode, (rms_norm((const T*)x, stride, tokens, size, (const T*)weight, eps, (T*)out)));
}

void cpu_add_rms_norm(long mode, void* x, const void* residual, long tokens, long size, const void* weight, float eps,
                      void* out) {
  BY_TYPE(mode, (add_rms_norm((T*)x, (const T*)residual, tokens, size, (const T*)weight, eps, (T*)out)));
}

void cpu_silu_and_mul(long mode, const void* x, long stride, long tokens, long width, void* out) {
  BY_TYPE(mode, (silu_and_mul((const T*)x, stride, tokens, width, (T*)out)));
}

void cpu_rotary(long mode, const void* x, long x_token, long x_head, long tokens, long heads, long size,
                const float* cos, const float* sin, void* out) {
  BY_TYPE(mode, (rotary<T>({(const T*)x, x_token, x_head}, tokens, heads, size, cos, sin, (T*)out)));
}

void cpu_write_kv(long mode, void* pages, const void* kv, long stride, long tokens, long latent, long rope,
                  const void* weight, float eps, const float* cos, const float* sin, const int64_t* slots) {
  BY_TYPE(mode, (write_kv((T*)pages, (const T*)kv, stride, tokens, latent, rope, (const T*)weight, eps, cos, sin, slots)));
}

void cpu_add(long mode, const void* a, const void* b, long count, void* out) {
  BY_TYPE(mode, (add((const T*)a, (const T*)b, count, (T*)out)));
}

void cpu_widen(const void* x, long count, float* out) { widen_all((const bf16*)x, count, out); }

void cpu_take_rows(const void* table, long row_bytes, const int64_t* ids, long rows, void* out) {
  take_rows((const char*)table, row_bytes, ids, rows, (char*)out);
}

void cpu_sample(const float* logits, long rows, long size, const float* temperature, const int32_t* keys,
                const int32_t* vocab_keys, int64_t* tokens, float* logprobs) {
  sample_rows(logits, rows, size, temperature, keys, vocab_keys, tokens, logprobs);
}
}

// Captured calls: every argument is a word, a float a double.
union Slot {
  int64_t word;
  double number;
};
constexpr long SLOTS = 20;  // of a call

template <class A>
static A argument(Slot slot) {
  if constexpr (std::is_floating_point_v<A>)
    return slot.number;
  else
    return (A)slot.word;
}
template <class... A, size_t... I>
static void call(void (*kernel)(A...), const Slot* slots, std::index_sequence<I...>) {
  static_assert(sizeof...(A) <= SLOTS);
  kernel(argument<A>(slots[I])...);
}
template <class... A>
static void call(void (*kernel)(A...), const Slot* slots) {
  call(kernel, slots, std::index_sequence_for<A...>{});
}
template <auto KERNEL>
static void captured(const Slot* slots) { call(KERNEL, slots); }

static void (*const CAPTURABLE[])(const Slot*) = {  // in the order of SIGNATURES in ../build.py
    captured<cpu_head_linear>, captured<cpu_mla_attention>, captured<cpu_fused_experts>, captured<cpu_topk_router>,
    captured<cpu_rms_norm>,    captured<cpu_add_rms_norm>,  captured<cpu_silu_and_mul>,  captured<cpu_rotary>,
    captured<cpu_write_kv>,    captured<cpu_sample>,        captured<cpu_add>,           captured<cpu_widen>,
    captured<cpu_take_rows>,
};

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

// Copies, and adds the digest of what was read and that of what is in its place, each where there is a total.
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

// Of rows x k bfloat16 values; -1 where they are not whole tiles.
extern "C" long cpu_compressed_bytes(long rows, long k) {
  return rows % COMPRESSED_ROWS == 0 && k % COMPRESSED_K == 0 ? rows / COMPRESSED_ROWS * compressed_bytes(k) : -1;
}

extern "C" int cpu_compress(const void* values, long stride, long rows, long k, void* compressed) {
  return compress((const bf16*)values, stride, rows, k, (uint8_t*)compressed);
}

extern "C" void cpu_decompress(const void* compressed, long rows, long k, void* values) {
  decompress((const uint8_t*)compressed, rows, k, (bf16*)values);
}

extern "C" void cpu_replay(long calls, const int64_t* kernels, const Slot* slots) {
  for (long i = 0; i < calls; ++i) CAPTURABLE[kernels[i]](slots + i * SLOTS);
}
