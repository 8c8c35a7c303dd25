"""What happened to those who ran DeepSeek-V3 on 256 dies, in the plan: recomputation, swapping, conversion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mindspeed_llm.tiny import tiny_hf_config
from tests.tools.plan.truth_layouts import LAYOUTS, overrides_of
from tools.plan.devices import load_device
from tools.plan.rank_plan import RankPlan, plan_rank
from tools.plan.setup import planned_run
from tools.plan.training import StepSize
from verl.trainer.config import load_config

LAYERS = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_num_layers"
MEGATRON = "actor_rollout_ref.actor.megatron"
STAGE_2 = 64  # the first of the stages with 8 layers
BUDGET = load_device("a3").budget_bytes


def _plan(load: float, *overrides: str) -> RankPlan:
    device = load_device("a3")
    run = planned_run("cann_true_weight_671b_256die", overrides, device, nodes=None, model="deepseek_v3")
    return plan_rank(run.config, device, STAGE_2, StepSize(1024, 3072, load))


def _update_bytes(load: float, recomputed: int) -> int:
    plan = _plan(load, f"{LAYERS}={recomputed}")
    return next(phase.peak_bytes for phase in plan.phases if phase.name == "update_actor")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recomputed", "load", "fits"),
    [
        (1, 1.0, True),  # as it began
        (1, 4.0, False),
        (4, 4.0, True),
        (4, 8.0, False),
        (8, 8.0, True),
        (1, 32.0, False),  # every token to the experts of one rank: no load is worse
        (8, 32.0, True),
    ],
)
def test_recomputed_layers_went_from_1_to_4_to_8(recomputed: int, load: float, fits: bool) -> None:
    assert (_update_bytes(load, recomputed) <= BUDGET) == fits


def test_load_takes_memory_and_recomputed_layers_give_it_back(tmp_path: Path) -> None:
    """A tiny model, where they are cheap to plan together."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config(num_hidden_layers=4)), encoding="utf-8")

    def update_bytes(layout: str, load: float) -> int:
        world_size, overrides = LAYOUTS[layout]
        longer = ("data.max_response_length=246", "actor_rollout_ref.rollout.num_gpu_blocks_override=256")
        config = load_config(
            overrides_of(str(tmp_path), world_size, *overrides, *longer, f"{MEGATRON}.fix_router=false")
        )
        plan = plan_rank(config, load_device("cpu"), 0, StepSize(10, 246, load))
        return next(phase.peak_bytes for phase in plan.phases if phase.name == "update_actor")

    worst = update_bytes("tp2_ep2_extended", 4.0)
    assert update_bytes("tp2_ep2_extended", 1.0) < worst > update_bytes("tp2_ep2_extended_recompute", 4.0)


@pytest.mark.slow
def test_eight_recomputed_layers_hold_the_worst_load() -> None:
    assert _update_bytes(32.0, 8) <= BUDGET


def test_without_the_swapped_optimizer_nothing_is_left_for_generation() -> None:
    with pytest.raises(ValueError, match="leaves room for 0 KV blocks"):
        _plan(1.0, f"{MEGATRON}.swap_optimizer=false", f"{MEGATRON}.optimizer_offload=false")


def test_two_terabytes_do_not_hold_a_whole_model_twice() -> None:
    """As loaded and as saved, which is how the published conversion works; the one here streams (test_full_shape)."""
    in_memory = 2 * 2 * 671_026_419_200
    assert in_memory > load_device("a3").host_memory_bytes
