"""Exports a model under HF names: shards are gathered into whole tensors on every rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.config import HFModelConfig
from hf_formats.ranges import index_of, shape_of
from mindspeed_llm.hf_shapes import always_fp32, hf_tensors, packed
from mindspeed_llm.weight_plan import Shard, model_shards
from mindspeed_llm.weight_source import hf_view

if TYPE_CHECKING:
    from megatron.core.parallel_state import ProcessGroups

DEFAULT_BUCKET_BYTES = 512 << 20


@torch.no_grad()
def export_weights(
    model: torch.nn.Module,
    hf: HFModelConfig,
    groups: ProcessGroups,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every full HF tensor of the model, layer by layer, in the same order on every rank.

    Collective: every rank of ``groups.world`` must run the iterator to its end with the same arguments. The
    lowest owner of each shard broadcasts it, in one flat buffer per owner and bucket, so that at most about two buckets
    (or the largest tensor) are in memory. Tensors are in ``dtype`` (default: the
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


def gather_hf_tensors(
    local: Mapping[str, Tensor],
    names: Collection[str],
    hf: HFModelConfig,
    groups: ProcessGroups,
    *,
    dtype: torch.dtype,
    device: torch.device,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full HF tensors ``names``, in the order of ``hf_tensors`` on every rank.

    Collective over ``groups.world``, with the same arguments on every rank but ``local``: the rank's own tensors under
    the training engine's names (parameters, or anything of their shapes, such as gradients). The lowest rank that
    owns a shard broadcasts it. Tensors are in ``dtype``, those of ``always_fp32`` in float32; they may share memory
    with their bucket or, at world size 1, with ``local``.
    """
    plan = model_shards(hf, groups.layout, "core")
    ordered = [name for name in hf_tensors(hf) if name in names]

    def num_bytes(name: str) -> int:
        return math.prod(hf_tensors(hf)[name][0]) * (torch.float32 if always_fp32(name) else dtype).itemsize

    for bucket_names in packed(ordered, num_bytes, bucket_bytes):
        received = _broadcast({name: plan[name] for name in bucket_names}, local, dtype, device, groups)
        for name in bucket_names:
            yield name, _assembled(hf_tensors(hf)[name][0], plan[name], received.pop(name))


def _broadcast(
    shards: Mapping[str, tuple[Shard, ...]],
    local: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    groups: ProcessGroups,
) -> dict[str, list[Tensor]]:
    """The shards of consecutive HF tensors on every rank, by one broadcast per owner and dtype."""
    batches: dict[tuple[int, bool], list[tuple[str, Shard]]] = {}
    for name, shards_of_name in shards.items():
        for shard in shards_of_name:
            batches.setdefault((shard.rank, always_fp32(name)), []).append((name, shard))
    received: dict[tuple[str, Shard], Tensor] = {}
    for (owner, is_fp32), batch in sorted(batches.items(), key=lambda item: item[0]):
        batch_dtype = torch.float32 if is_fp32 else dtype
        mine = [hf_view(local[shard.param], shard) for _, shard in batch if owner == groups.rank]
        if groups.layout.world_size == 1:
            received |= zip(batch, (view.detach().to(batch_dtype).contiguous() for view in mine), strict=True)
            continue
        shapes = [shape_of(shard.ranges) for _, shard in batch]
        sizes = list(map(math.prod, shapes))
        flat = torch.empty(sum(sizes), dtype=batch_dtype, device=device)
        views = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        for view, own in zip(views, mine, strict=False):  # ``mine`` is empty on every rank but the owner
            view.copy_(own)
        dist.broadcast(flat, src=owner, group=groups.world)
        received |= zip(batch, views, strict=True)
    return {name: [received[name, shard] for shard in of_name] for name, of_name in shards.items()}


def _assembled(shape: tuple[int, ...], shards: Sequence[Shard], values: Sequence[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    full = torch.empty(shape, dtype=values[0].dtype, device=values[0].device)
    for shard, part in zip(shards, values, strict=True):
        full[index_of(shard.ranges)] = part
    return full
