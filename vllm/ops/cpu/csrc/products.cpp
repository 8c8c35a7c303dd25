#include "entries.h"
#include "moe.h"

extern "C" {

void cpu_head_linear(long mode, const void* x, long x_token, long x_head, long tokens, long heads, const void* w,
                     long w_head, long w_k, long w_n, const int64_t* addresses, long k, long n, void* out) {
  BY_MODE(mode, (head_linear<M>({(const M::T*)x, x_token, x_head}, tokens, heads, {(const M::T*)w, w_k, w_n}, w_head,
                                addresses, k, n, {(M::T*)out, heads * n, n})));
}

void cpu_fused_experts(long mode, const void* x, long x_token, long tokens, long choices, const float* weights,
                       const int64_t* ids, const void* w13, const void* w2, long is_compressed, long experts, long hidden,
                       long width, long first, void* out) {
  BY_MODE(mode, (fused_experts<M>({(const M::T*)x, x_token, 0}, tokens, choices, weights, ids,
                                  {w13, w2, is_compressed != 0, experts, hidden, width, first}, (M::T*)out)));
}
}
