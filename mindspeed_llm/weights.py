"""Weights in and out of a training model by the weight plan: load from any source, export under HF names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.hf_checkpoint import HFCheckpoint, save_hf_checkpoint
from mindspeed_llm.hf_config import HFModelConfig
from mindspeed_llm.sharded_checkpoint import ShardedCheckpoint
from mindspeed_llm.sources import WeightSource, fill, hf_view, raise_problems
from mindspeed_llm.weight_plan import Fragment, LocalTensor, always_fp32, fragments, hf_tensors, slice_shape

if TYPE_CHECKING:
    from megatron.core.parallel_state import ProcessGroups

__all__ = [
    "HFCheckpoint",
    "ShardedCheckpoint",
    "WeightSource",
    "export_weights",
    "load_weights",
    "save_hf_checkpoint",
]

DEFAULT_BUCKET_BYTES = 512 << 20


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
    for tensor in tensors:
        names = {piece.hf_name for piece in tensor.pieces}
        if tensor.name in targets and not names & absent:
            fill(targets[tensor.name], tensor, source)
            loaded |= names
    return loaded


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
    state = model.state_dict(keep_vars=True)
    first = next(model.parameters())
    dtype = first.dtype if dtype is None else dtype
    plan = fragments(hf, layout, "core")
    for names in _buckets(hf, dtype, bucket_bytes):
        bucket = _Bucket({name: plan[name] for name in names}, state, dtype, first.device, groups)
        for name in names:
            yield name, bucket.assemble(name, hf_tensors(hf)[name][0])


class _Bucket:
    """Fragments of consecutive HF tensors, brought to every rank by one broadcast per owner and dtype."""

    def __init__(
        self,
        parts: dict[str, tuple[Fragment, ...]],
        state: dict[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        groups: ProcessGroups,
    ) -> None:
        self._parts = parts
        self._received: dict[tuple[str, int], torch.Tensor] = {}  # (hf name, index of its fragment)
        batches: dict[tuple[int, bool], list[tuple[str, int]]] = {}
        for name, owned in parts.items():
            for index, fragment in enumerate(owned):
                batches.setdefault((fragment.owner, always_fp32(name)), []).append((name, index))
        for (owner, is_fp32), keys in sorted(batches.items()):
            batch_dtype = torch.float32 if is_fp32 else dtype
            self._exchange(owner, keys, state, batch_dtype, device, groups)

    def assemble(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The full tensor ``name``, released from the bucket."""
        owned = self._parts[name]
        pieces = [self._received.pop((name, index)) for index in range(len(owned))]
        if len(pieces) == 1:
            return pieces[0]
        full = torch.empty(shape, dtype=pieces[0].dtype, device=pieces[0].device)
        for fragment, piece in zip(owned, pieces, strict=True):
            full[tuple(slice(start, stop) for start, stop in fragment.piece.hf_slice)] = piece
        return full

    def _exchange(
        self,
        owner: int,
        keys: list[tuple[str, int]],
        state: dict[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        groups: ProcessGroups,
    ) -> None:
        found = [self._parts[name][index] for name, index in keys]
        mine = [hf_view(state[fragment.local_name], fragment.piece) for fragment in found if owner == groups.rank]
        if groups.layout.world_size == 1:
            for key, view in zip(keys, mine, strict=True):
                self._received[key] = view.detach().to(dtype).contiguous()
            return
        shapes = [slice_shape(fragment.piece.hf_slice) for fragment in found]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        views = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        for view, local in zip(views, mine, strict=False):  # empty on every rank but the owner
            view.copy_(local)
        dist.broadcast(flat, src=owner, group=groups.world)
        self._received.update(zip(keys, views, strict=True))


def _buckets(hf: HFModelConfig, dtype: torch.dtype, bucket_bytes: int) -> Iterator[list[str]]:
    """Consecutive HF names whose tensors fit in ``bucket_bytes`` together; a larger tensor is a bucket of its own."""
    names: list[str] = []
    filled = 0
    for name, (shape, _) in hf_tensors(hf).items():
        size = torch.Size(shape).numel() * (torch.float32 if always_fp32(name) else dtype).itemsize
        if names and filled + size > bucket_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names
