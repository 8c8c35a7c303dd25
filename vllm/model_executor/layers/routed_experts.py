"""The experts that every token in the KV cache went to, kept block by block beside the latents, to be replayed in
training.

They live and die with the cache: blocks that requests share carry their choices along, a preempted request's are
written again, a moved request's travel with its blocks. Letters: T tokens, M MoE layers, K experts of a token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.ops.contract import KVCache
from vllm.transformers_utils.config import HFConfig


def new_choices_cache(hf: HFConfig, num_blocks: int, block_size: int, device: torch.device) -> KVCache:
    """One tensor [num_blocks, block_size, M, K], uint8 or, with more than 256 experts, int32."""
    dtype = torch.uint8 if hf.n_routed_experts <= 256 else torch.int32
    shape = (num_blocks, block_size, hf.num_moe_layers, hf.num_experts_per_tok)
    return (torch.zeros(shape, dtype=dtype, device=device),)


def bytes_per_token(hf: HFConfig) -> int:
    """What the choices of one token take."""
    return hf.num_moe_layers * hf.num_experts_per_tok * (1 if hf.n_routed_experts <= 256 else 4)


def write_choices(cache: KVCache, ids_of_layers: list[Tensor], slots_T: Tensor) -> None:
    """Every MoE layer's ids_TK to the tokens' slots."""
    (pages,) = cache
    ids_TMK = torch.stack(ids_of_layers, dim=1).to(pages.dtype)
    pages.view(-1, *pages.shape[2:]).index_copy_(0, slots_T, ids_TMK)


def read_choices(cache: KVCache, blocks: np.ndarray, num_tokens: int) -> np.ndarray:
    """[num_tokens, M, K], uint8 or int16, of the sequence whose tokens lie in `blocks`, in order."""
    (pages,) = cache
    block_ids = torch.from_numpy(blocks.astype(np.int64)).to(pages.device)
    choices = pages.index_select(0, block_ids).flatten(0, 1)[:num_tokens].cpu()
    result: np.ndarray = choices.to(torch.uint8 if pages.dtype == torch.uint8 else torch.int16).numpy()
    return result
