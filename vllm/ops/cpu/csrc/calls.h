// How Python calls the kernels of vllm/ops/cpu: by index in KERNELS of kernels.cpp, with a 64-bit word for each argument. The
// first argument of most is the mode: 0 float32, 1 bfloat16 widened to float32, 2 bfloat16 instructions, 3 tiles. Strides
// count elements; the last dimension of a tensor is contiguous unless a stride is given for it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

union Word {
  int64_t integer;  // or an address
  double number;
};
typedef void (*Kernel)(const Word*);

template <class A>
static A argument(Word word) {
  if constexpr (std::is_floating_point_v<A>)
    return word.number;
  else
    return (A)word.integer;
}
template <class... A, size_t... I>
static void call(void (*kernel)(A...), const Word* words, std::index_sequence<I...>) {
  kernel(argument<A>(words[I])...);
}
template <class... A>
static void call(void (*kernel)(A...), const Word* words) {
  call(kernel, words, std::index_sequence_for<A...>{});
}
template <auto KERNEL>
static void called(const Word* words) { call(KERNEL, words); }
template <auto... OF_MODES>
static void by_mode(const Word* words) {
  static constexpr Kernel kernels[] = {called<OF_MODES>...};
  kernels[words[0].integer](words + 1);
}
#define BY_MODE(kernel) by_mode<kernel<Float32>, kernel<Widened>, kernel<Dot>, kernel<Tiles>>
#define BY_TYPE(kernel) by_mode<kernel<float>, kernel<bf16>, kernel<bf16>, kernel<bf16>>

// These are compiled as separate files, because each takes as long to compile as all the others together.
Kernel head_linear_kernel();
Kernel fused_experts_kernel();
Kernel mla_attention_kernel();
Kernel grouped_attention_kernel();
Kernel write_grouped_kernel();
