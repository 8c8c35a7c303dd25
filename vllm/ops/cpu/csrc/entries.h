// The C entry points of vllm/ops/cpu whose kernels there are for every way to multiply, in files of their own: compilers
// take as long for each as for all others. `mode`: 0 float32, 1 bfloat16 widened to float32, 2 bfloat16 instructions,
// 3 tiles. Strides count elements; the last dimension of a tensor is contiguous unless a stride is given for it.
#pragma once
#include <cstdint>

#define BY_MODE(mode, call)                         \
  switch (mode) {                                   \
    case 0: { typedef Float32 M; call; } break;     \
    case 1: { typedef Widened M; call; } break;     \
    case 2: { typedef Dot M; call; } break;         \
    default: { typedef Tiles M; call; } break;      \
  }

extern "C" {

void cpu_head_linear(long mode, const void* x, long x_token, long x_head, long tokens, long heads, const void* w,
                     long w_head, long w_k, long w_n, const int64_t* addresses, long k, long n, void* out);

void cpu_mla_attention(long mode, const void* q_latent, long latent_token, long latent_head, const void* q_rope,
                       long rope_token, long rope_head, long queries, long heads, const void* pages,
                       const int32_t* tables, const int64_t* seq_lens, long table_width, long block_size, long latent,
                       long rope, float scale, void* out);

void cpu_fused_experts(long mode, const void* x, long x_token, long tokens, long choices, const float* weights,
                       const int64_t* ids, const void* w13, const void* w2, long is_compressed, long experts, long hidden,
                       long width, long first, void* out);
}
