"""Where the sequences of a packed micro-batch begin and end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core.utils import async_h2d

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router_replay import MicroBatchRouting


@dataclass(frozen=True)
class SharedPrompts:
    """Sequences of which some begin with the same prompt: T' tokens are computed, of the F in whole sequences.

    On an accelerator ``index_select`` adds the gradients of a token that is taken several times in any order.

    Attributes:
        spans_B4: where each sequence's prompt and its own tokens begin and end among the T', int64 [B, 4] on the host.
            Sequences with one prompt follow one another; what nobody else has counts as a sequence's own.
        computed_F: where each token of the whole sequences, one after another, is among the T', int64 [F].
        whole_T: where each of the T' is in the whole sequences, at the first that has it, int64 [T'].
        copies_T: how many tokens of the whole sequences each one is, fp32 [T'].
    """

    spans_B4: Tensor
    computed_F: Tensor
    whole_T: Tensor
    copies_T: Tensor

    def to(self, device: torch.device) -> SharedPrompts:
        """The same on ``device``, for which the host does not wait."""
        index = (async_h2d(x, device) for x in (self.computed_F, self.whole_T, self.copies_T))
        return SharedPrompts(self.spans_B4, *index)


@dataclass(frozen=True)
class PackedSeqParams:
    """B sequences packed one after another into T tokens; under context parallelism T counts all its ranks' tokens.

    cu_seqlens: int32 [B+1], first 0, last T. It is on the host: an attention kernel that takes the lengths as host
    integers would otherwise wait for the device in every layer. max_seqlen: length of the longest sequence. With CP
    ranks every sequence is padded to a multiple of 2 CP.
    is_padding_T: bool, for the tokens that this rank is given (all T, or its part of them under context parallelism),
    before the sequence-parallel split. It is True for padding tokens, which routers neither count nor balance, so that
    nothing depends on how sequences were packed. None: no token is padding.
    routing: the experts of these tokens, to be traced or replayed. None: each router chooses, and the choice is not
    kept.
    shared_prompts: T counts a prompt that several sequences share once, and ``cu_seqlens`` counts it in each of them;
    only attention sees the whole sequences. None: every sequence has tokens of its own.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    is_padding_T: Tensor | None = None
    routing: MicroBatchRouting | None = None
    shared_prompts: SharedPrompts | None = None
    # Values that one layer computes and every layer needs, such as index tensors on the device; each has its maker's
    # key.
    derived: dict[object, object] = field(default_factory=dict, init=False, repr=False, compare=False)
