"""Attention over packed sequences in plain torch: pad to a rectangle, attend, take the padding away."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def core_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool = True,
) -> torch.Tensor:
    """See ``contract.CoreAttention``.

    Padding sits after each sequence, so a causal mask alone keeps it out of sight. v is padded to q's head size,
    because torch's fused kernels want equal sizes.
    """
    num_sequences, value_size = cu_seqlens.numel() - 1, v.shape[-1]
    cu_seqlens = cu_seqlens.to(q.device)
    lengths = cu_seqlens.diff()
    # Row of token t in the [B * L] rectangle: its own index plus the padding of all sequences before its own.
    shift = torch.arange(num_sequences, device=q.device) * max_seqlen - cu_seqlens[:-1]
    rows = torch.repeat_interleave(shift, lengths, output_size=q.shape[0]) + torch.arange(q.shape[0], device=q.device)

    def pad(x: torch.Tensor) -> torch.Tensor:
        rectangle = x.new_zeros(num_sequences * max_seqlen, *x.shape[1:]).index_copy(0, rows, x)
        return rectangle.view(num_sequences, max_seqlen, *x.shape[1:]).transpose(1, 2)

    if value_size < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - value_size))
    mask = None
    if not causal:
        mask = (torch.arange(max_seqlen, device=q.device) < lengths.unsqueeze(1))[:, None, None, :]
    out = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), attn_mask=mask, is_causal=causal, scale=scale)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, rows)[..., :value_size]
