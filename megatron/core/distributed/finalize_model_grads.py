"""The work between the last backward of a step and the optimizer: gradients are reduced and router biases updated."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.parallel_state import ProcessGroups


def finalize_model_grads(model: DistributedDataParallel, groups: ProcessGroups) -> None:
    """Reduce over replicas, sum partial gradients over TP, update expert biases; collective over tp_dp_cp and edp."""
    model.finish_grad_sync()
    _sum_partial_grads_over_tp(model, groups)
    _sum_shared_embedding_grads(model, groups)
    update_rate = 0.0 if model.config.freeze_moe_router else model.config.moe_router_bias_update_rate
    _update_router_expert_bias(model.module, update_rate, groups)


def _sum_partial_grads_over_tp(model: DistributedDataParallel, groups: ProcessGroups) -> None:
    """Sum over TP the gradients of weights that every TP rank applied to its own part of the sequence.

    This comes after the reduction over replicas, which a backward pass may have started. The TP ranks of one replica
    own the same shards, and only the shards are meaningful now.
    """
    if groups.layout.tensor_model_parallel_size == 1:
        return
    for buffer in model.param_and_grad_buffers:
        start, end = buffer.in_shard(buffer.tp_partial)
        if end > start:
            dist.all_reduce(buffer.grad_shard[start:end], group=groups.tp)


def _sum_shared_embedding_grads(model: DistributedDataParallel, groups: ProcessGroups) -> None:
    """Sum the gradients of the embedding on the first stage and of its copy on the last (tied output layer, MTP).

    Both stages hold the same shards. They exchange and add them: the two sums are equal to the last bit, and so the
    copies stay equal.
    """
    stages = dist.get_process_group_ranks(groups.pp)
    for buffer in model.param_and_grad_buffers:
        if not buffer.is_shared_embedding:
            continue
        other = stages[-1] if groups.is_first_stage else stages[0]
        received = torch.empty_like(buffer.grad_shard)
        exchange = [
            dist.P2POp(dist.isend, buffer.grad_shard, other, group=groups.pp),
            dist.P2POp(dist.irecv, received, other, group=groups.pp),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        buffer.grad_shard.add_(received)


def _update_router_expert_bias(module: nn.Module, update_rate: float, groups: ProcessGroups) -> None:
    """bias_e += rate * sign(mean(count) - count_e), with all tokens of the step counted (arXiv 2408.15664)."""
    routers = [part for part in module.modules() if getattr(part, "expert_bias", None) is not None]
    if not routers:
        return
    counts_LE = torch.stack([router.local_tokens_per_expert for router in routers])  # type: ignore[misc]
    for router in routers:
        router.local_tokens_per_expert.zero_()  # type: ignore[operator,union-attr]
    if update_rate == 0:
        return
    if groups.tp_dp_cp.size() > 1:
        dist.all_reduce(counts_LE, group=groups.tp_dp_cp)
    moves_LE = update_rate * torch.sign(counts_LE.mean(dim=-1, keepdim=True) - counts_LE)
    for router, move_E in zip(routers, moves_LE, strict=True):
        router.expert_bias.add_(move_E)  # type: ignore[operator,union-attr]
