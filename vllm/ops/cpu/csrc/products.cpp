#include "calls.h"
#include "moe.h"

template <class M>
static void linear(const typename M::T* x, long x_token, long x_head, long tokens, long heads, const typename M::T* w,
                   long w_head, long w_k, long w_n, const int64_t* addresses, long k, long n, typename M::T* out) {
  head_linear<M>({x, x_token, x_head}, tokens, heads, {w, w_k, w_n}, w_head, addresses, k, n, {out, heads * n, n});
}
Kernel head_linear_kernel() { return BY_MODE(linear); }

template <class M>
static void experts(const typename M::T* x, long x_token, long tokens, long choices, const float* weights,
                    const int64_t* ids, const void* w13, const void* w2, bool is_packed, long experts, long hidden,
                    long width, long first, typename M::T* out) {
  fused_experts<M>({x, x_token, 0}, tokens, choices, weights, ids, {w13, w2, is_packed, experts, hidden, width, first}, out);
}
Kernel fused_experts_kernel() { return BY_MODE(experts); }
