"""Weights in and out of a training model by the weight plan: load from any source, export under HF names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from hf_formats.config import HFModelConfig
from hf_formats.problems import raise_problems
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.conversion.kernels import choose_kernels, place_native
from mindspeed_llm.dcp_checkpoint import DCPCheckpoint, is_dcp
from mindspeed_llm.gathering import DEFAULT_BUCKET_BYTES, gather_hf_tensors
from mindspeed_llm.gradients import hf_gradients
from mindspeed_llm.hf_checkpoint import HFCheckpoint, open_hf, save_hf_checkpoint
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.sharded_checkpoint import ShardedCheckpoint
from mindspeed_llm.sources import Origin, Place, WeightSource, fill, place
from mindspeed_llm.weight_plan import LocalTensor

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from megatron.core.parallel_state import ProcessGroups

__all__ = [
    "Checkpoint",
    "DCPCheckpoint",
    "HFCheckpoint",
    "ShardedCheckpoint",
    "WeightSource",
    "export_weights",
    "hf_gradients",
    "load_weights",
    "open_hf",
    "open_shards",
    "save_hf_checkpoint",
]


class Checkpoint(WeightSource, Protocol):
    """Weights on a disk, in any of the forms that are read."""

    path: Path

    def describe(self) -> str:
        """Which form it is, and what is in it, for a log."""
        ...


def open_shards(path: str | Path, hf: HFModelConfig) -> Checkpoint:
    """The shards in a directory, whichever of the two kinds they are."""
    return DCPCheckpoint(path, hf) if is_dcp(Path(path)) else ShardedCheckpoint(path)


@torch.no_grad()
def load_weights(
    model: torch.nn.Module, plan: Iterable[LocalTensor], source: WeightSource, strict: bool = True
) -> set[str]:
    """Fill the parameters and buffers of ``model`` from ``source`` in the model's dtypes; returns the HF names read.

    ``plan`` is ``local_plan(hf, layout, coords, "core")`` of this rank. With ``strict`` the plan and the model must
    name the same tensors in the same shapes and the source must hold all of them: ValueError with every difference,
    before anything is written. Without it what is missing on either side is left as it is.
    """
    tensors = tuple(plan)
    targets = model.state_dict(keep_vars=True)
    available = source.names()
    absent = {piece.hf_name for tensor in tensors for piece in tensor.pieces if piece.hf_name not in available}
    if strict:
        problems = [f"the source has no {name}" for name in sorted(absent)]
        problems += [f"the model has no {tensor.name}" for tensor in tensors if tensor.name not in targets]
        problems += [f"the plan has no {name}" for name in targets.keys() - {tensor.name for tensor in tensors}]
        problems += [
            f"{tensor.name} has shape {tuple(targets[tensor.name].shape)} in the model, {tensor.shape} in the plan"
            for tensor in tensors
            if tensor.name in targets and tuple(targets[tensor.name].shape) != tensor.shape
        ]
        raise_problems("loading weights", problems, "Check that model, layout and checkpoint belong together.")
    loaded: set[str] = set()
    kernels = choose_kernels("auto")
    logger.info("weights are moved by %s kernels", kernels)
    on_host = place_native if kernels == "native" else place
    for tensor in tensors:
        names = {piece.hf_name for piece in tensor.pieces}
        if tensor.name in targets and not names & absent:
            if isinstance(source, DCPCheckpoint):
                source.fill(targets[tensor.name], tensor)
            else:
                fill(targets[tensor.name], tensor, source, partial(_place, on_host))
            loaded |= names
    return loaded


def _place(
    on_host: Place, target: torch.Tensor, fragment: torch.Tensor, scale_inv: torch.Tensor | None, origin: Origin
) -> None:
    """``sources.place`` to any device: FP8 is multiplied out on the host and goes there in one copy."""
    if target.device.type == "cpu":
        on_host(target, fragment, scale_inv, origin)
    elif scale_inv is None:
        target.copy_(fragment)
    else:
        plain = torch.empty(fragment.shape, dtype=target.dtype)
        on_host(plain, fragment, scale_inv, origin)
        target.copy_(plain)


@torch.no_grad()
def export_weights(
    model: torch.nn.Module,
    hf: HFModelConfig,
    layout: ParallelLayout,
    groups: ProcessGroups,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every full HF tensor of the model, layer by layer, in the same order on every rank.

    Collective: every rank of ``groups.world`` must run the iterator to its end with the same arguments. The ranks
    that own a tensor's fragments (the lowest holder of each) broadcast them, a flat buffer per owner and bucket, so
    that at most about two buckets (or the largest tensor) are in memory. Tensors are in ``dtype`` (default: the
    model's) on the model's device, the router's correction bias always in fp32. A tensor may share memory with its
    bucket or, at world size 1, with the model: consume it or copy it, and do not write to it.
    """
    first = next(model.parameters())
    yield from gather_hf_tensors(
        model.state_dict(keep_vars=True),
        hf_tensors(hf).keys(),
        hf,
        groups,
        dtype=first.dtype if dtype is None else dtype,
        device=first.device,
        bucket_bytes=bucket_bytes,
    )
