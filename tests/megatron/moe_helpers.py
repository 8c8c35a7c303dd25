"""One MoE layer in any layout, its tokens spread over the ranks, for comparison with the layer of one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.ops import reference_ops
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.weight_init import WeightInit, init_weights
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.megatron.model_helpers import one_process_world, tiny_config
from tests.parallel.launcher import run_ranks

NUM_TOKENS = 22


@dataclass(frozen=True)
class Outcome:
    """What a rank found: its place, its rows of the output and of the input's gradient, its reduced gradients."""

    rows: slice
    y_TH: torch.Tensor
    grad_x_TH: torch.Tensor
    grads: dict[str, torch.Tensor]
    rank: int


def make_layer(groups: ProcessGroups, **changes: Any) -> MoELayer:
    """A MoE layer of the tiny model with random weights, the same in every layout."""
    config = tiny_config(sequence_parallel=groups.tp.size() > 1, **changes)
    layer = MoELayer(config, groups, reference_ops())
    init_weights(layer, WeightInit(seed=3, std=0.2), "mlp")
    return layer


def tokens(num_tokens: int = NUM_TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and weights of the outputs in the loss, [T, 64] each."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(num_tokens, 64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def rows_of_rank(groups: ProcessGroups) -> slice:
    """Replicas hold different numbers of tokens (the last the rest), TP ranks of one replica the same number."""
    replica, tp = groups.dp_cp.rank(), groups.tp.size()
    share = 3 * tp
    num_replicas = groups.dp_cp.size()
    start = replica * share
    stop = NUM_TOKENS if replica == num_replicas - 1 else start + share
    part = (stop - start) // tp
    assert part * tp == stop - start
    return slice(start + part * groups.tp.rank(), start + part * (groups.tp.rank() + 1))


def run_layouts(layouts: list[dict[str, Any]], changes: list[dict[str, Any]]) -> list[Outcome]:
    """Each config under each layout, on this rank."""
    outcomes = []
    for sizes in layouts:
        groups = parallel_state.initialize_model_parallel(**sizes)
        for change in changes:
            layer = make_layer(groups, **change)
            x_TH, weight_TH = tokens()
            rows = rows_of_rank(groups)
            x_TH = x_TH[rows].clone().requires_grad_()
            y_TH = layer(x_TH)
            (y_TH * weight_TH[rows]).sum().backward()
            assert x_TH.grad is not None
            outcomes.append(Outcome(rows, y_TH.detach(), x_TH.grad, reduced_grads(layer, groups), groups.rank))
        parallel_state.destroy_model_parallel()
    return outcomes


def reduced_grads(layer: MoELayer, groups: ProcessGroups) -> dict[str, torch.Tensor]:
    """Gradients summed as the marks of their parameters say."""
    grads = {}
    for name, parameter in layer.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if parameter.sequence_parallel:  # type: ignore[attr-defined]
            dist.all_reduce(grad, group=groups.tp)
        dist.all_reduce(grad, group=groups.dp_cp if parameter.allreduce else groups.edp)  # type: ignore[attr-defined]
        grads[name] = grad
    return grads


def local_part(name: str, full: torch.Tensor, layout: ParallelLayout, rank: int) -> torch.Tensor:
    """What ``rank`` holds of the whole tensor ``full`` of parameter ``name``."""
    at, tp, etp = layout.coords(rank), layout.tensor_model_parallel_size, layout.expert_tensor_parallel_size
    if name.endswith("experts.weight1"):
        halves = full.chunk(layout.expert_model_parallel_size)[at.ep].chunk(2, dim=2)
        return torch.cat([half.chunk(etp, dim=2)[at.etp] for half in halves], dim=2)
    if name.endswith("experts.weight2"):
        return full.chunk(layout.expert_model_parallel_size)[at.ep].chunk(etp, dim=1)[at.etp]
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(tp)[at.tp] for half in full.chunk(2)])
    return full.chunk(tp, dim=1)[at.tp] if name.endswith("linear_fc2.weight") else full


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: object, tolerance: float = 1e-5) -> None:
    """Largest difference relative to the largest expected value."""
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    if expected.numel():
        gap = (found - expected).abs().max() / expected.abs().max()
        assert gap < tolerance, (what, gap.item())


def assert_layouts_equal_one_process(
    world_size: int, layouts: list[dict[str, Any]], changes: list[dict[str, Any]], tolerance: float = 1e-5
) -> None:
    """Output, gradient of the input and gradients of all parameters."""
    with one_process_world():
        alone = run_layouts([{}], changes)
    by_rank = run_ranks(run_layouts, world_size, layouts, changes)
    cases = [(sizes, index) for sizes in layouts for index in range(len(changes))]
    for (sizes, index), outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        layout = ParallelLayout(world_size=world_size, **sizes)
        one = alone[index]
        seen = torch.zeros(NUM_TOKENS)
        for outcome in outcomes:
            what = (sizes, changes[index], outcome.rank)
            seen[outcome.rows] += 1
            assert_close(outcome.y_TH, one.y_TH[outcome.rows], what, tolerance)
            assert_close(outcome.grad_x_TH, one.grad_x_TH[outcome.rows], what, tolerance)
            for name, grad in outcome.grads.items():
                assert_close(grad, local_part(name, one.grads[name], layout, outcome.rank), (*what, name), tolerance)
        assert seen.eq(1).all()
