#include "attention.h"

#include "entries.h"

extern "C" {

void cpu_mla_attention(long mode, const void* q_latent, long latent_token, long latent_head, const void* q_rope,
                       long rope_token, long rope_head, long queries, long heads, const void* pages,
                       const int32_t* tables, const int64_t* seq_lens, long table_width, long block_size, long latent,
                       long rope, float scale, void* out) {
  BY_MODE(mode, (mla_attention<M>({(const M::T*)q_latent, latent_token, latent_head},
                                  {(const M::T*)q_rope, rope_token, rope_head}, queries, heads,
                                  {(const M::T*)pages, tables, seq_lens, table_width, block_size, latent, rope}, scale,
                                  {(M::T*)out, heads * latent, latent})));
}
}
