"""Reading weights through the plan: what a source of HF tensors offers, and how pieces fill a local tensor."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from mindspeed_llm.weight_plan import LocalTensor, Piece, Slice

_SHOWN_PROBLEMS = 12


class WeightSource(Protocol):
    """Anything that can hand out slices of tensors under HF names."""

    def names(self) -> Collection[str]:
        """HF names that can be read."""
        ...

    def dtype(self, hf_name: str) -> torch.dtype:
        """Dtype in which the tensor is stored."""
        ...

    def read(self, hf_name: str, hf_slice: Slice) -> torch.Tensor:
        """The slice, on the CPU in its stored dtype; it may share memory with the source, so do not write to it."""
        ...


def hf_view(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of ``local`` that ``piece`` fills, as a view in the orientation of the HF tensor."""
    view = local[tuple(slice(start, stop) for start, stop in piece.local_slice)]
    if view.dim() > len(piece.hf_slice):
        view = view.squeeze(0)
    return view.T if piece.transpose else view


def fill(local: torch.Tensor, tensor: LocalTensor, source: WeightSource) -> None:
    """Copy every piece of ``tensor`` from ``source`` into ``local`` (shape ``tensor.shape``), casting to its dtype.

    ValueError for FP8 weights: they mean nothing without their scales.
    """
    for piece in tensor.pieces:
        fragment = source.read(piece.hf_name, piece.hf_slice)
        if fragment.dtype.itemsize == 1:
            raise ValueError(
                f"{piece.hf_name} is stored as {fragment.dtype}; run python -m mindspeed_llm.fp8_cast_bf16 first"
            )
        hf_view(local, piece).copy_(fragment)


def raise_problems(subject: str, problems: list[str], advice: str) -> None:
    """ValueError with every problem on a line of its own (the first dozen, then a count); nothing if there is none."""
    if not problems:
        return
    shown = [f"  - {line}" for line in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        shown.append(f"  - ... and {len(problems) - _SHOWN_PROBLEMS} more")
    raise ValueError("\n".join([f"{subject} has {len(problems)} problem(s):", *shown, advice]))
