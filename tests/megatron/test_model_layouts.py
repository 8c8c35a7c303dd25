"""Any layout gives the loss and the gradients of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.ops import reference_ops
from megatron.core.ops.reference_fp8 import Fp8Products, grouped_matmul
from megatron.core.parallel_layout import ParallelLayout, RankCoords
from megatron.core.parallel_state import ProcessGroups
from tests.megatron.model_helpers import PackedBatch, make_model, one_process_world, packed_batch, tiny_config
from tests.parallel.launcher import run_ranks
from tests.parallel.layout_table import local_part

_LENGTHS = [[9, 17, 6], [5, 1, 20, 2]]  # two micro-batches with an even number of tokens
_VOCAB = 128
_ALL_EXPERTS = {"moe_router_topk": 8, "moe_router_num_groups": None, "moe_router_group_topk": None}


def _batches() -> list[PackedBatch]:
    return [packed_batch(lengths, _VOCAB, seed=index) for index, lengths in enumerate(_LENGTHS)]


def _forward_backward(model: GPTModel, groups: ProcessGroups, batch: PackedBatch) -> torch.Tensor:
    """Summed loss of one micro-batch, on the last stage; plain send and receive between stages."""
    arguments = (batch.ids_T, batch.positions_T, batch.params)
    if not groups.is_first_stage:
        shape = (batch.ids_T.shape[0] // groups.tp.size(), model.config.hidden_size)
        received = torch.empty(shape)
        dist.recv(received, group=groups.pp, src=dist.get_global_rank(groups.pp, groups.coords.pp - 1))
        model.set_input_tensor(received.requires_grad_())
    if groups.is_last_stage:
        loss = model(*arguments, labels_T=batch.labels_T).sum()
        loss.backward()
    else:
        hidden_TH = model(*arguments)
        dist.send(hidden_TH.detach(), group=groups.pp, dst=dist.get_global_rank(groups.pp, groups.coords.pp + 1))
        grad = torch.empty_like(hidden_TH)
        dist.recv(grad, group=groups.pp, src=dist.get_global_rank(groups.pp, groups.coords.pp + 1))
        hidden_TH.backward(grad)
        loss = torch.zeros(())
    if not groups.is_first_stage:
        dist.send(received.grad, group=groups.pp, dst=dist.get_global_rank(groups.pp, groups.coords.pp - 1))
    return loss.detach()


def _reduced_grads(model: nn.Module, groups: ProcessGroups) -> dict[str, torch.Tensor]:
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if parameter.sequence_parallel:
            dist.all_reduce(grad, group=groups.tp)
        dist.all_reduce(grad, group=groups.dp_cp if parameter.allreduce else groups.edp)
        grads[name] = grad
    return grads


def _run(
    layouts: list[dict[str, Any]], has_fp8: bool = False
) -> list[tuple[RankCoords, float, dict[str, torch.Tensor], float]]:
    """Per layout: where this rank stands, the loss of all ranks' micro-batches, its gradients, its routed tokens."""
    results = []
    for sizes in layouts:
        groups = parallel_state.initialize_model_parallel(**sizes)
        config = tiny_config(sequence_parallel=groups.tp.size() > 1, params_dtype=torch.float32)
        ops = None
        if has_fp8:
            products = {"linear_products": Fp8Products(), "grouped_matmul": grouped_matmul}
            ops, config = replace(reference_ops(), **products), replace(config, **_ALL_EXPERTS)
        model = make_model(config, groups, ops=ops)
        loss = torch.zeros(())
        for index, batch in enumerate(_batches()):
            if index % groups.dp.size() == groups.coords.dp:
                loss += _forward_backward(model, groups, batch)
        dist.all_reduce(loss, group=groups.dp)
        dist.broadcast(loss, src=dist.get_process_group_ranks(groups.pp)[-1], group=groups.pp)
        routers = [module for name, module in model.named_modules() if name.endswith("router")]
        count = sum(router.local_tokens_per_expert.sum().item() for router in routers)
        results.append((groups.coords, loss.item(), _reduced_grads(model, groups), count))
        parallel_state.destroy_model_parallel()
    return results


def _global_name(name: str, first_layer: int) -> str:
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + first_layer)
    return ".".join(parts)


def _assert_equal_to_one_process(world_size: int, layouts: list[dict[str, Any]]) -> None:
    with one_process_world():
        ((_, loss, grads, count),) = _run([{}])
    assert count == sum(map(sum, _LENGTHS)) * 2 * 2  # tokens x top-2 x MoE layers
    by_rank = run_ranks(_run, world_size, layouts)
    for sizes, ranks in zip(layouts, zip(*by_rank, strict=True), strict=True):
        layout = ParallelLayout(world_size=world_size, **sizes)
        seen = set()
        for at, rank_loss, rank_grads, _ in ranks:
            assert abs(rank_loss - loss) < 1e-5 * abs(loss), (sizes, rank_loss, loss)
            first_layer = layout.stage_layers(at.pp, 3)[0]
            for name, grad in rank_grads.items():
                global_name = _global_name(name, first_layer)
                seen.add(global_name)
                expected = local_part(name, grads[global_name], layout, at)
                difference = (grad - expected).abs().max() / grads[global_name].abs().max()
                assert difference < 1e-5, (sizes, at, name, difference.item())
        assert seen == set(grads)


def test_two_processes_equal_one() -> None:
    _assert_equal_to_one_process(
        2,
        [
            {"tensor_model_parallel_size": 2},
            {"expert_model_parallel_size": 2},
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
            {"pipeline_model_parallel_size": 2, "num_layer_list": (1, 2)},
            {},
        ],
    )


def test_four_processes_equal_one() -> None:
    _assert_equal_to_one_process(
        4,
        [
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4},
            {
                "tensor_model_parallel_size": 2,
                "expert_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "num_layer_list": (2, 1),
            },
        ],
    )


@pytest.mark.slow
def test_fp8_over_processes_is_as_blocks_allow() -> None:
    """Expert parallelism leaves the blocks of all products but experts' weight gradients, which have both ranks' tokens
    in their blocks; tensor parallelism of a model this small has smaller blocks everywhere.
    """
    with one_process_world():
        ((_, loss, grads, _),) = _run([{}], True)
    layouts = [{"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}]
    for sizes, ranks in zip(layouts, zip(*run_ranks(_run, 2, layouts, True), strict=True), strict=True):
        layout = ParallelLayout(world_size=2, **sizes)
        by_experts = "expert_model_parallel_size" in sizes
        for at, rank_loss, rank_grads, _ in ranks:
            assert abs(rank_loss - loss) < (1e-5 if by_experts else 2e-2) * abs(loss), (sizes, rank_loss, loss)
            for name, grad in rank_grads.items():
                expected = local_part(name, grads[_global_name(name, 0)], layout, at)
                difference = float((grad - expected).norm() / expected.norm())
                bound = 0.3 if not by_experts else 0.1 if ".experts." in name else 1e-4
                assert difference < bound, (sizes, at, name, difference)
