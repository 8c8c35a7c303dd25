"""The prediction layer's loss, detached from the policy, changes no bit of the policy's update, in any layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import destroy_model_parallel, initialize_from_layout
from tests.mindspeed_llm.gradients import local_gradients
from tests.parallel.launcher import run_ranks
from tests.verl.updates import Update, make_actor, some_rows

OFF = Update(num_rows=16, samples=4, optimizer={"lr": 1e-2, "clip_grad": 0.01, "weight_decay": 0.1})
ON = replace(OFF, num_mtp=1, model={"mtp_loss_scaling_factor": 3.0, "mtp_detach_encoder": True})
FROZEN = replace(ON, model={"mtp_loss_scaling_factor": 0.0})
ATTACHED = replace(ON, model={"mtp_loss_scaling_factor": 3.0})
TIED = {"share_embeddings_and_output_weights": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass
class Trained:
    """What a rank has after an update: metrics, gradients and weights by name, and where the policy's gradients lie."""

    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    counted: list[dict[str, tuple[int, int]]]  # of each buffer of the policy's norm: squares add up in this order


def _train(cases: dict[str, Update]) -> dict[str, Trained]:
    return {name: _train_one(case) for name, case in cases.items()}


def _train_one(case: Update) -> Trained:
    groups = initialize_from_layout(case.layout)
    try:
        _, ddp, actor = make_actor(case, groups)
        metrics = actor.update_policy(some_rows(case.num_rows, case.samples).chunk(groups.dp.size())[groups.coords.dp])
        gradients = {name: grad.clone() for name, grad in local_gradients(ddp).items()}
        weights = {name: value.clone() for name, value in ddp.state_dict().items()}
        buffers = [x for x in ddp.param_and_grad_buffers if not (x.has_own_norm or x.is_counted_elsewhere)]
        return Trained(metrics, gradients, weights, [buffer.param_ranges for buffer in buffers])
    finally:
        destroy_model_parallel()


def _layout(world_size: int, **sizes: int) -> ParallelLayout:
    return ParallelLayout(world_size=world_size, **{f"{axis}_parallel_size": size for axis, size in sizes.items()})


LAYOUTS: dict[int, dict[str, tuple[ParallelLayout, dict[str, Any]]]] = {
    1: {"one process": (ParallelLayout(), {}), "tied": (ParallelLayout(), TIED)},
    2: {
        "dp2 ep2, recomputed": (_layout(2, expert_model=2), FULL),
        "tp2 ep2": (_layout(2, tensor_model=2, expert_model=2), {}),
        "cp2": (_layout(2, context=2), {}),
        "pp2": (_layout(2, pipeline_model=2), {}),
        "pp2, tied": (_layout(2, pipeline_model=2), TIED),
        "pp2 vpp2": (_layout(2, pipeline_model=2, virtual_pipeline_model=2), {}),
    },
    4: {"tp2 pp2": (_layout(4, tensor_model=2, pipeline_model=2), {}), "dp2 pp2": (_layout(4, pipeline_model=2), {})},
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_policys_update_is_the_same_to_the_bit(world_size: int) -> None:
    """Metrics with the gradients' norm, which clips, gradients, and what the update makes of weights and biases."""
    cases = {
        f"{name}, {switch}": replace(
            case,
            layout=layout,
            model=case.model | model,
            actor={"share_prompts": "false" if layout.context_parallel_size > 1 else "true"},
        )
        for name, (layout, model) in LAYOUTS[world_size].items()
        for switch, case in {"off": OFF, "on": ON, "frozen": FROZEN, "attached": ATTACHED}.items()
    }
    ranks = run_ranks(_train, world_size, cases)
    for name in LAYOUTS[world_size]:
        offs, ons, frozen, attached = (
            [found[f"{name}, {switch}"] for found in ranks] for switch in ("off", "on", "frozen", "attached")
        )
        for off, on in [*zip(offs, ons, strict=True), *zip(offs, frozen, strict=True)]:
            for metric, value in off.metrics.items():  # the load of experts counts those of the prediction layer too
                assert on.metrics[metric] == value or metric.startswith("actor/expert_load_"), (name, metric)
            _assert_same(name, on.gradients, off.gradients)
            _assert_same(name, on.weights, off.weights)
            assert on.counted == off.counted, name
        assert not any(
            "mtp." in tensor or "mtp_" in tensor for one in frozen for tensor in (*one.gradients, *one.metrics)
        )
        assert any("mtp." in tensor for tensor in frozen[-1].weights), "it is there to be sent"
        assert offs[-1].metrics["actor/grad_norm"] > 10 * OFF.optimizer["clip_grad"], "the norm clips"
        assert attached[-1].metrics["actor/grad_norm"] != offs[-1].metrics["actor/grad_norm"], "attached it trains more"
        assert ons[-1].metrics["actor/mtp_1_loss"] > 0
        assert any("mtp." in tensor and grad.any() for tensor, grad in ons[-1].gradients.items())


def _assert_same(name: str, on: dict[str, torch.Tensor], off: dict[str, torch.Tensor]) -> None:
    """Equal where both are; a tied head of a later stage is the embedding there beside the prediction layer."""
    for tensor, expected in off.items():
        if tensor not in on:
            assert "tied" in name and tensor.endswith("output_layer.weight"), (name, tensor)
            tensor = tensor.replace("output_layer", "embedding.word_embeddings")
        assert torch.equal(on[tensor], expected), (name, tensor)
