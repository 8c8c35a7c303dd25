"""Torch's flash attention over packed sequences: its two ops of aten, which give out and take the log-sum-exp.

Limits: bfloat16 or float16; q, k and v of one head size, a multiple of 8 up to 256; M divides N. ``causal``: a
sequence's last query sees all of its keys. Both ops have no CPU form: tests put the same formula in their place, with
their arguments and layouts, and the ops themselves are checked where there is a GPU (``table.ONLY_ON_GPU``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.ops.contract import Attended

MULTIPLE, MAX_SIZE = 8, 256  # of a head


@dataclass(frozen=True)
class Sequences:
    """Bounds int32 [B+1] of the sequences in q and in k, on their device; lengths of the longest.

    A length may be too long, which only starts programs that have nothing to do.
    """

    bounds_q: Tensor
    bounds_k: Tensor
    longest_q: int
    longest_k: int


class Attend(Protocol):
    """q [Tq, N, D], k and v [Tk, M, D] -> out [Tq, N, D], log-sum-exp float32 [N, Tq]."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]: ...


class AttendGrad(Protocol):
    """Gradients of q, k and v, where ``attended``'s out and lse may be those of more keys than these."""

    def __call__(
        self, grad_out: Tensor, attended: Attended, sequences: Sequences, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def attend(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """See ``Attend``."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        sequences.bounds_q,
        sequences.bounds_k,
        sequences.longest_q,
        sequences.longest_k,
        dropout_p=0.0,
        is_causal=causal,
        return_debug_mask=False,
        scale=scale,
    )
    return out, lse


def attend_grad(
    grad_out: Tensor, attended: Attended, sequences: Sequences, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``AttendGrad``; the state of the random numbers is not read without dropout."""
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad_out,
        *attended,
        sequences.bounds_q,
        sequences.bounds_k,
        sequences.longest_q,
        sequences.longest_k,
        dropout_p=0.0,
        is_causal=causal,
        rng_state=torch.empty(2, dtype=torch.uint64, device=grad_out.device),
        unused=torch.empty((), dtype=torch.uint64, device=grad_out.device),
        scale=scale,
    )
    return grads
