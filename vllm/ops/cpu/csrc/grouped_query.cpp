#include "grouped_query.h"

#include "calls.h"

template <class M>
static void attention(const typename M::T* q, long q_token, long q_head, long sequences, long heads, typename M::T* pages,
                      const int32_t* tables, const int64_t* query_lens, const int64_t* seq_lens, long table_width,
                      long block_size, long kv_heads, long channels, long padded, float scale, typename M::T* out) {
  // Products of attention are too small for tiles.
  typedef std::conditional_t<by_row<M>, Dot, M> Way;
  grouped_attention<Way>({q, q_token, q_head}, heads, {pages, block_size, kv_heads, channels, padded},
                         {tables, query_lens, seq_lens, sequences, table_width}, scale, {out, heads * channels, channels});
}
Kernel grouped_attention_kernel() { return BY_MODE(attention); }

template <class T>
static void write(T* pages, const T* qkv, long token_stride, long tokens, long heads, long kv_heads, long channels,
                  long padded, long block_size, const T* bias, const T* q_weight, const T* k_weight, float eps,
                  const float* cos, const float* sin, long turned, const int64_t* slots, T* q) {
  write_grouped<T>({pages, block_size, kv_heads, channels, padded}, qkv, token_stride, tokens, heads, bias, q_weight,
                   k_weight, eps, cos, sin, turned, slots, q);
}
Kernel write_grouped_kernel() { return BY_TYPE(write); }
