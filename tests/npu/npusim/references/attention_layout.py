"""Layouts and masks of the attention kernels, after the page "sparse_mode" of the Ascend documentation."""

from __future__ import annotations

import torch
from torch import Tensor

from npusim.references.checks import require

TRIANGLE = 2048  # side of the compressed mask of modes 2 to 4
FULL_MASK, ALL_MASK, CAUSAL_FROM_THE_START, CAUSAL_FROM_THE_END, BAND = range(5)


def sequences(x: Tensor, layout: str, num_heads: int, ends: list[int] | None) -> list[Tensor]:
    """Views [N, S, D] of x, one a sequence; ``ends``: where the sequences of a packed (TND) tensor end."""
    if layout == "TND":
        assert ends is not None
        return [x[begin:end].transpose(0, 1) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    if layout == "BNSD":
        return list(x)
    if layout == "BSND":
        return list(x.transpose(1, 2))
    if layout == "BSH":
        return list(x.unflatten(-1, (num_heads, -1)).transpose(1, 2))
    require(layout == "SBH", "attention", f"layout {layout!r} is not simulated")
    return list(x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3))


def check_ends(op: str, ends: list[int] | None, num_tokens: int) -> list[int]:
    """Running ends of packed sequences: never falling, the last one being the number of tokens."""
    require(bool(ends), op, "layout TND needs the ends of the sequences")
    assert ends is not None
    require(all(a <= b for a, b in zip([0, *ends[:-1]], ends, strict=True)), op, f"ends {ends} fall")
    require(ends[-1] == num_tokens, op, f"the last end is {ends[-1]}, but there are {num_tokens} tokens")
    return ends


def hidden_positions(
    op: str, mask: Tensor | None, mode: int, index: int, num_queries: int, num_keys: int, before: int, after: int
) -> Tensor | None:
    """bool, broadcast to [N, Sq, Skv]: True where a query of sequence ``index`` does not see a key.

    Modes 0 and 1 read the mask as it is, [Sq, Skv] or 4-D. Modes 2 to 4 want the compressed triangle and read only
    where the diagonal is: at the first query and key (2), or the last ones (3); 4 is a band around the last ones.
    """
    if mode in (FULL_MASK, ALL_MASK):
        require(mode == FULL_MASK or mask is not None, op, "sparse_mode 1 needs a mask")
        if mask is None:
            return None
        own = mask if mask.dim() == 2 else mask[index % len(mask)]
        return own[..., :num_queries, :num_keys].bool()
    require(mode in (CAUSAL_FROM_THE_START, CAUSAL_FROM_THE_END, BAND), op, f"sparse_mode {mode} is not simulated")
    is_triangle = mask is not None and tuple(mask.shape[-2:]) == (TRIANGLE, TRIANGLE) and mask.dtype != torch.float32
    require(is_triangle, op, f"sparse_mode {mode} needs the {TRIANGLE} x {TRIANGLE} mask")
    assert mask is not None
    require(bool(mask[0, 1]) and not bool(mask[0, 0]) and not bool(mask[1, 0]), op, "the mask is no upper triangle")
    shift = 0 if mode == CAUSAL_FROM_THE_START else num_keys - num_queries
    distance = torch.arange(num_keys) - torch.arange(num_queries).unsqueeze(1) - shift  # of a key from the diagonal
    if mode == BAND:
        return (distance > after) | (distance < -before)
    return distance > 0


def masked_scores(
    op: str, queries_NSD: Tensor, keys_NSD: Tensor, scale: float, hidden: Tensor | None, *, wants_sight: bool
) -> Tensor:
    """float64 [Nq, Sq, Skv], -inf where hidden; query head h reads key head h // (Nq / Nkv)."""
    keys_NSD = repeat_heads(keys_NSD, len(queries_NSD))
    scores = queries_NSD.double() @ keys_NSD.double().transpose(1, 2) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
        require(not (wants_sight and bool(hidden.all(-1).any())), op, "a query sees no key at all")
    return scores


def repeat_heads(x_NSD: Tensor, num_heads: int) -> Tensor:
    """Every key head as often as query heads share it."""
    return x_NSD.repeat_interleave(num_heads // len(x_NSD), 0)
