"""The search's layouts divide and contain the recipes', its weights are the models', its overrides make its layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest

from megatron.core.parallel_layout import ParallelLayout
from tools.plan.devices import load_device
from tools.plan.search.bound import Bounds
from tools.plan.search.layouts import layer_lists, rollout_layouts, rollout_settings, training_layouts
from tools.plan.search.overrides import overrides_of
from tools.plan.search.rank import Ranking, own_candidate, ranking
from tools.plan.search.weights import rollout_rank, training_stage
from tools.plan.setup import PlannedRun, planned_run
from tools.plan.timing.constants import load_constants
from tools.plan.timing.run_shape import RunShape
from tools.plan.training import StepSize
from verl.trainer.config import validate_config

A3, MOONLIGHT = ("r1_ascend_671b_256die", "a3", 16), ("moonlight_16b_8gpu", "h100", None)
RANKED = [pytest.param("a3", marks=pytest.mark.slow), "moonlight"]  # 256 dies: ten seconds
GIB = 1 << 30


def planned(config: tuple[str, str, int | None], *overrides: str) -> tuple[PlannedRun, RunShape, StepSize]:
    name, device, nodes = config
    run = planned_run(name, overrides, load_device(device), nodes=nodes, model=None)
    size = StepSize(run.config.data.max_prompt_length, run.config.data.max_response_length)
    return run, RunShape.of(run.config, run.hf, name=name), size


@pytest.fixture(scope="module")
def a3() -> tuple[PlannedRun, RunShape, StepSize, Ranking]:
    run, shape, size = planned(A3)
    return run, shape, size, ranking(run, shape, size, load_constants())


@pytest.fixture(scope="module")
def moonlight() -> Iterator[tuple[PlannedRun, RunShape, StepSize, Ranking]]:
    run, shape, size = planned(MOONLIGHT)
    yield run, shape, size, ranking(run, shape, size, load_constants())


def test_layers_are_even_or_as_the_recipes_have_them() -> None:
    assert layer_lists(27, 1) == [None]
    assert layer_lists(28, 4) == [(7, 7, 7, 7)]
    lists = layer_lists(61, 8)
    assert (6, 8, 8, 8, 8, 8, 8, 7) in lists  # verl's r1_ascend
    assert (7, 7, 8, 8, 8, 8, 8, 7) in lists  # cann-recipes-train
    assert (3, *[4] * 14, 2) in layer_lists(61, 16)  # Pai-Megatron-Patch
    for pp in range(2, 62):
        for counts in layer_lists(61, pp):
            assert counts is not None
            assert len(counts) == pp and sum(counts) == 61 and min(counts) >= 1


def test_layouts_divide_and_contain_the_recipes() -> None:
    run, shape, _ = planned(A3)
    layouts = set(training_layouts(run))
    assert shape.train.layout in layouts
    four = replace(shape.train.layout, tensor_model_parallel_size=4, num_layer_list=(7, 7, 8, 8, 8, 8, 8, 7))
    assert four in layouts
    for layout in layouts:
        assert layout.problems(run.hf.num_hidden_layers, run.hf.n_routed_experts, run.hf.num_attention_heads) == []
    rollouts = list(rollout_layouts(run, shape.rollout))
    assert shape.rollout in rollouts
    assert all(not replace(shape, rollout=rollout).problems() for rollout in rollouts)


def test_weights_add_up_to_the_model() -> None:
    run, shape, _ = planned(A3)
    for tp, ep, etp in ((1, 32, 1), (4, 8, 1), (4, 4, 4)):
        layout = replace(
            shape.train.layout,
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            mla_down_proj_column_parallel=False,
        )
        experts = sum(training_stage(run.hf, layout, stage)[1] for stage in range(8)) * ep * etp
        assert experts == 58 * 256 * 3 * 7168 * 2048
    whole = ParallelLayout()
    assert sum(training_stage(run.hf, whole, 0)) == 671_026_404_352  # and 58 x 256 biases of the gates
    assert sum(rollout_rank(run.hf, 1, 1)) == 671_026_404_352
    whole_shared = sum(rollout_rank(run.hf, 2, 256, shares_tokens=True)) - sum(rollout_rank(run.hf, 2, 256))
    assert whole_shared == 58 * 3 * 7168 * 2048 // 2


def test_a_run_that_shares_tokens_is_searched_with_dispatch_alone() -> None:
    run, shape, _ = planned(A3)
    rollout = "actor_rollout_ref.rollout"
    given = run.changed([f"{rollout}.expert_exchange=dispatch", f"{rollout}.use_sequence_parallel_moe=true"])
    assert {settings.expert_exchange for settings in rollout_settings(given, shape.rollout)} == {"dispatch"}
    assert not rollout_settings(given, replace(shape.rollout, has_expert_parallel=False))


@pytest.mark.parametrize("which", RANKED)
def test_the_best_is_at_least_as_fast_as_the_recipe(which: str, request: pytest.FixtureRequest) -> None:
    run, shape, size, found = request.getfixturevalue(which)
    own, bounds = own_candidate(run, shape, load_constants()), Bounds(run, size)
    budget = run.device.budget_bytes
    assert max(bounds.memory(own.shape).values()) <= budget
    assert found.best[0].step.total_s <= own.step.total_s
    assert all(max(bounds.memory(best.shape).values()) <= budget for best in found.best)
    seconds = [candidate.step.total_s for candidate in found.best]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("which", RANKED)
def test_overrides_make_the_layout(which: str, request: pytest.FixtureRequest) -> None:
    run, _, _, found = request.getfixturevalue(which)
    config = A3 if which == "a3" else MOONLIGHT
    for candidate in (found.best[0], found.best[len(found.best) // 2], found.best[-1]):
        other, made, _ = planned(config, *overrides_of(candidate, run.config))
        assert validate_config(other.config) == []
        assert made.rollout == candidate.shape.rollout
        train = candidate.shape.train
        assert (made.train.update, made.train.log_prob) == (train.update, train.log_prob)
        again = train.recomputed_layers
        most = max(train.layout.num_layer_list or (run.hf.num_hidden_layers,))
        assert made.train.recomputed_layers == (most if again < 0 else again)
        layout = train.layout
        if layout.pipeline_model_parallel_size == 1:
            layout = replace(layout, num_layer_list=None)
        assert made.train.layout == layout


def test_the_bound_is_what_was_planned() -> None:
    """Bytes of the fullest stages of the recipe's own layouts as ``plan_run`` gives them, in GiB."""
    megatron = "actor_rollout_ref.actor.megatron"
    fields = f"{megatron}.override_transformer_config"
    none = [f"{fields}.recompute_{key}=null" for key in ("granularity", "method", "num_layers")]
    cases = (
        ([], {"update": 34.17, "log_prob": 18.44}),
        (none, {"update": 138.21, "log_prob": 18.44}),
        ([*none, f"{megatron}.tensor_model_parallel_size=4"], {"update": 50.22, "log_prob": 11.34}),
    )
    for overrides, expected in cases:
        run, shape, size = planned(A3, *overrides)
        bounds = Bounds(run, size)
        found = bounds.memory(shape)
        for phase, gib in expected.items():
            assert gib * 0.99 <= found[phase] / GIB <= gib * 1.08, (overrides, phase)
        assert bounds.rollout_weights(shape.rollout) / GIB == pytest.approx(22.81, abs=0.01)


def test_a_cache_that_the_engine_refuses_does_not_fit() -> None:
    own = "actor_rollout_ref.rollout.gpu_memory_utilization="
    for share, is_refused in (("0.8", False), ("0.4", True)):
        run, shape, size = planned(A3, own + share)
        found = Bounds(run, size).memory(shape)
        assert (found["generate"] == inf) == is_refused
