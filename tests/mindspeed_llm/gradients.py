"""Whole gradients of a sharded model under HF names, to compare layouts with one process and with transformers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.config import HFModelConfig
from megatron.core.distributed import DistributedDataParallel
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.collectives import all_gather_in_place
from mindspeed_llm.export_weights import DEFAULT_BUCKET_BYTES, gather_hf_tensors
from mindspeed_llm.weight_plan import model_shards


@torch.no_grad()
def hf_gradients(
    module: torch.nn.Module, hf: HFModelConfig, groups: ProcessGroups, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> dict[str, Tensor]:
    """HF name -> the whole gradient of that tensor, float32 copies, the same on every rank of ``groups.world``.

    ``module`` is a DistributedDataParallel after ``finalize_model_grads`` and before ``zero_grad_buffer``, whether its
    reduction was an all-reduce or a reduce-scatter (the shards of a distributed optimizer are gathered again), or a
    bare GPTModel or ModelChunks after backward, whose ``.grad`` is taken as it is. Values are what the optimizer would
    see before clipping: a sum or a mean over micro-batches and replicas as the schedule and the config have it.
    Collective; every rank gets everything, so it is for tests and small models. Tensors without a gradient anywhere
    (frozen parameters, the routers' correction bias) are left out; the gradient of a tied head is part of the
    embedding's, and an MTP module's published copies of embedding and head repeat theirs.
    """
    local = local_gradients(module)
    plan = model_shards(hf, groups.layout, "core")
    absent = {
        name
        for name, shards in plan.items()
        if any(shard.rank == groups.rank and shard.param not in local for shard in shards)
    }
    reports: list[set[str]] = [set()] * groups.layout.world_size
    dist.all_gather_object(reports, absent, group=groups.world)
    names = [name for name in plan if name not in set().union(*reports)]
    device = next(module.parameters()).device
    gathered = gather_hf_tensors(
        local, names, hf, groups, dtype=torch.float32, device=device, bucket_bytes=bucket_bytes
    )
    return {name: tensor.clone() for name, tensor in gathered}


def local_gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """Name in the bare module -> this rank's gradient in the parameter's shape; see ``hf_gradients`` for ``module``.

    Collective over the replicas when the gradients are sharded over them.
    """
    if isinstance(module, DistributedDataParallel):
        return _buffered_gradients(module)
    return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}


def _buffered_gradients(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    if not ddp.grads_are_final:
        raise ValueError("gradients that finalize_model_grads has not reduced yet differ between ranks; call it first")
    found: dict[str, Tensor] = {}
    for buffer in ddp.param_and_grad_buffers:
        flat = buffer.grads.tensor
        if buffer.num_shards > 1:
            flat = flat.clone()
            all_gather_in_place(flat, flat[slice(*buffer.shard)], buffer.group)
        for name, (start, end) in buffer.param_ranges.items():
            found[name] = flat[start:end].view(buffer.param_shapes[name])
    return found
