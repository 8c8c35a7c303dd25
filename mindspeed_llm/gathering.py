"""Fragments of a model's tensors brought together as whole HF tensors on every rank, a bucket at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_formats.config import HFModelConfig
from mindspeed_llm.hf_shapes import always_fp32, hf_tensors
from mindspeed_llm.sources import hf_view
from mindspeed_llm.weight_plan import Fragment, fragments, slice_shape

if TYPE_CHECKING:
    from megatron.core.parallel_state import ProcessGroups

DEFAULT_BUCKET_BYTES = 512 << 20


def gather_hf_tensors(
    local: Mapping[str, torch.Tensor],
    names: Collection[str],
    hf: HFModelConfig,
    groups: ProcessGroups,
    *,
    dtype: torch.dtype,
    device: torch.device,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full HF tensors ``names``, in the order of ``hf_tensors`` on every rank.

    Collective over ``groups.world``, with the same arguments on every rank but ``local``: the rank's own tensors under
    the training engine's names (parameters, or anything of their shapes, such as gradients). The lowest holder of a
    fragment broadcasts it. Tensors are in ``dtype``, those of ``always_fp32`` in float32; they may share memory with
    their bucket or, at world size 1, with ``local``.
    """
    plan = fragments(hf, groups.layout, "core")
    for bucket_names in _buckets(hf, names, dtype, bucket_bytes):
        bucket = _Bucket({name: plan[name] for name in bucket_names}, local, dtype, device, groups)
        for name in bucket_names:
            yield name, bucket.assemble(name, hf_tensors(hf)[name][0])


class _Bucket:
    """Fragments of consecutive HF tensors, brought to every rank by one broadcast per owner and dtype."""

    def __init__(
        self,
        parts: dict[str, tuple[Fragment, ...]],
        local: Mapping[str, torch.Tensor],
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
            self._exchange(owner, keys, local, batch_dtype, device, groups)

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
        local: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        groups: ProcessGroups,
    ) -> None:
        found = [self._parts[name][index] for name, index in keys]
        mine = [hf_view(local[fragment.local_name], fragment.piece) for fragment in found if owner == groups.rank]
        if groups.layout.world_size == 1:
            for key, view in zip(keys, mine, strict=True):
                self._received[key] = view.detach().to(dtype).contiguous()
            return
        shapes = [slice_shape(fragment.piece.hf_slice) for fragment in found]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        views = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        for view, own in zip(views, mine, strict=False):  # empty on every rank but the owner
            view.copy_(own)
        dist.broadcast(flat, src=owner, group=groups.world)
        self._received.update(zip(keys, views, strict=True))


def _buckets(hf: HFModelConfig, names: Collection[str], dtype: torch.dtype, bucket_bytes: int) -> Iterator[list[str]]:
    """Consecutive HF names whose tensors fit in ``bucket_bytes`` together; a larger tensor is a bucket of its own."""
    bucket: list[str] = []
    filled = 0
    for name, (shape, _) in hf_tensors(hf).items():
        if name not in names:
            continue
        size = torch.Size(shape).numel() * (torch.float32 if always_fp32(name) else dtype).itemsize
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(name)
        filled += size
    if bucket:
        yield bucket
