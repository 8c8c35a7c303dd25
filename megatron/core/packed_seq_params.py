"""Where the sequences of a packed micro-batch begin and end."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedSeqParams:
    """B sequences packed one after another into T tokens.

    cu_seqlens: int32 [B+1], first 0, last T, on the host: an attention kernel that takes the lengths as host integers
    would wait for the device in every layer. max_seqlen: length of the longest sequence.
    is_padding_T: bool, of the tokens that this rank is given (all T, or its part of them under context parallelism),
    before the sequence-parallel split: True for those that only fill up, which routers neither count nor balance, so
    that nothing depends on how sequences were packed. None: no token is padding.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    is_padding_T: torch.Tensor | None = None
