#include "attention.h"

#include "calls.h"

template <class M>
static void attention(const typename M::T* q_latent, long latent_token, long latent_head, const typename M::T* q_rope,
                      long rope_token, long rope_head, long queries, long heads, const typename M::T* pages,
                      const int32_t* tables, const int64_t* seq_lens, long table_width, long block_size, long latent,
                      long rope, float scale, typename M::T* out) {
  auto attend = [&](auto* span) {
    mla_attention<M, std::remove_pointer_t<decltype(span)>>(
        {q_latent, latent_token, latent_head}, {q_rope, rope_token, rope_head}, queries, heads,
        {pages, tables, seq_lens, table_width, block_size, latent, rope}, scale, {out, heads * latent, latent});
  };
  if constexpr (by_row<M>)
    attend((TileSpan*)nullptr);
  else if (heads <= 4)
    attend((VectorSpan<M, 4>*)nullptr);
  else
    attend((VectorSpan<M, 8>*)nullptr);
}
Kernel mla_attention_kernel() { return BY_MODE(attention); }
