"""Loads a training model's weights from any source by the weight plan."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hf_formats.config import HFModelConfig
from hf_formats.problems import raise_problems
from mindspeed_llm.conversion.kernels import choose_kernels, copy_native
from mindspeed_llm.dcp_checkpoint import DCPCheckpoint, is_dcp, weights_of
from mindspeed_llm.sharded_checkpoint import ShardedCheckpoint
from mindspeed_llm.weight_plan import TensorPlan
from mindspeed_llm.weight_source import Checkpoint, CopyValues, Origin, WeightSource, copy_values, fill

logger = logging.getLogger(__name__)


def open_shards(path: str | Path, hf: HFModelConfig) -> Checkpoint:
    """The sharded checkpoint in a directory: a distributed checkpoint or mp_rank files."""
    found = weights_of(Path(path))
    return DCPCheckpoint(found, hf) if is_dcp(found) else ShardedCheckpoint(found)


@torch.no_grad()
def load_weights(model: torch.nn.Module, plan: Iterable[TensorPlan], source: WeightSource) -> set[str]:
    """Fill the parameters and buffers of ``model`` from ``source`` in the model's dtypes; returns the HF names read.

    ``plan`` is ``local_plan(hf, layout, rank)``. Plan and model must have the same tensors in the same shapes and the
    source must have all of them; otherwise a ValueError lists every difference before anything is written.
    """
    tensors = tuple(plan)
    targets = model.state_dict(keep_vars=True)
    names = {shard.hf_name for tensor in tensors for shard in tensor.shards}
    problems = [f"the source has no {name}" for name in sorted(names.difference(source.names()))]
    problems += [f"the model has no {tensor.name}" for tensor in tensors if tensor.name not in targets]
    problems += [f"the plan has no {name}" for name in targets.keys() - {tensor.name for tensor in tensors}]
    problems += [
        f"{tensor.name} has shape {tuple(targets[tensor.name].shape)} in the model, {tensor.shape} in the plan"
        for tensor in tensors
        if tensor.name in targets and tuple(targets[tensor.name].shape) != tensor.shape
    ]
    raise_problems("loading weights", problems, "Check that model, layout and checkpoint belong together.")
    kernels = choose_kernels("auto")
    logger.info("weights are copied by %s kernels", kernels)
    copy = partial(_copy, copy_native if kernels == "native" else copy_values)
    for tensor in tensors:
        if isinstance(source, DCPCheckpoint):
            source.fill(targets[tensor.name], tensor)
        else:
            fill(targets[tensor.name], tensor, source, copy)
    return names


def _copy(on_host: CopyValues, target: Tensor, values: Tensor, scale_inv: Tensor | None, origin: Origin) -> None:
    """``copy_values`` to any device: FP8 is dequantised on the host and sent in one copy."""
    if target.device.type == "cpu":
        on_host(target, values, scale_inv, origin)
    elif scale_inv is None:
        target.copy_(values)
    else:
        plain = torch.empty(values.shape, dtype=target.dtype)
        on_host(plain, values, scale_inv, origin)
        target.copy_(plain)
