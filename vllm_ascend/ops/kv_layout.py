"""How a page of the KV cache lies in memory, and reading it whatever the layout is.

    nd    [num_blocks, block_size, C]            a token's channels side by side
    nz    [num_blocks, C/16, block_size, 16]     fractals of 16 channels, the tokens of a block under each other

nz is what the matrix units read without a rearrangement: the data layout that the documentation of
npu_kv_rmsnorm_rope_cache (cache_mode PA_NZ, not quantised) and of npu_fused_infer_attention_score (MLA, paged) give for
float16 and bfloat16. A tensor's number of dimensions says which layout it has. Exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

FRACTAL = 16  # channels of half precision in 32 bytes
LAYOUTS = ("nd", "nz")


def page_shape(num_blocks: int, block_size: int, channels: int, layout: str) -> tuple[int, ...]:
    """Shape of a cache tensor; ValueError for a layout that is none or does not fit."""
    if layout == "nd":
        return num_blocks, block_size, channels
    if layout == "nz" and channels % FRACTAL == 0:
        return num_blocks, channels // FRACTAL, block_size, FRACTAL
    raise ValueError(
        f"kv_cache_layout={layout!r} with {channels} channels: expected one of {', '.join(LAYOUTS)}, and for nz a "
        f"multiple of {FRACTAL} channels; use nd"
    )


def is_nz(pages: Tensor) -> bool:
    return pages.dim() == 4


def unpack(blocks: Tensor) -> Tensor:
    """Blocks of either layout -> nd."""
    return blocks.transpose(1, 2).flatten(2) if is_nz(blocks) else blocks


def read_blocks(pages: Tensor, ids_B: Tensor) -> Tensor:
    """[B, block_size, C] of the blocks `ids_B` (int64)."""
    return unpack(pages.index_select(0, ids_B))


def read_tokens(pages: Tensor, slots_T: Tensor) -> Tensor:
    """[T, C] of the tokens in slots_T = block * block_size + offset (int64)."""
    if not is_nz(pages):
        return pages.flatten(0, 1).index_select(0, slots_T)
    return pages.view(-1, FRACTAL).index_select(0, nz_rows(pages, slots_T).flatten()).view(len(slots_T), -1)


def nz_rows(pages: Tensor, slots_T: Tensor) -> Tensor:
    """[T, C/16] rows of an nz cache, seen as rows of 16 channels, that hold the tokens in slots_T."""
    num_fractals, block_size = pages.shape[1:3]
    fractals = torch.arange(num_fractals, device=slots_T.device)
    blocks_T1 = torch.div(slots_T, block_size, rounding_mode="floor").unsqueeze(1)
    return (blocks_T1 * num_fractals + fractals) * block_size + (slots_T % block_size).unsqueeze(1)
