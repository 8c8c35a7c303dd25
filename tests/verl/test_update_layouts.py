"""A policy update in any layout equals one process: log-probs, loss, metrics, each gradient, the experts' biases."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import initialize_from_layout
from tests.parallel.launcher import run_ranks
from tests.verl.updates import PROMPT, Update, Updated, make_actor, move_gates, some_choices, some_rows, updates
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionSection
from verl.workers.actor.routing import TracedRouting
from verl.workers.config import RouterReplayConfig
from verl.workers.config.actor import PolicyLossConfig

EVERYTHING = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "mtp_loss_scaling_factor": 0.3,
}
BUDGET = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 40}  # rows have 4 to 52 tokens


def _algorithm(loss_mode: str, **fields: Any) -> dict[str, Any]:
    return {"policy_loss": PolicyLossConfig(loss_mode), **fields}


R2, R3 = ({"router_replay": RouterReplayConfig(mode)} for mode in ("R2", "R3"))
WAYS = {
    "plain": Update(),
    "replay": Update(actor=R2),
    "gates moved": Update(gate_noise=0.2),
    "gates moved, replay": Update(actor=R2, gate_noise=0.2),
    "rollout's choices": Update(actor=R3, gate_noise=0.2),
    "begins anew": Update(samples=2, begins_anew=True),
    "begins anew, replay": Update(
        actor=R2 | {"loss_agg_mode": "seq-mean-token-mean"}, begins_anew=True, gate_noise=0.2
    ),
    "begins anew, rollout's choices": Update(actor=R3, begins_anew=True, gate_noise=0.2),
    "everything": Update(
        model=EVERYTHING, actor=R2 | {"loss_agg_mode": "seq-mean-token-mean"}, num_mtp=1, gate_noise=0.2
    ),
}
ALGORITHMS = {
    "ppo, sequences masked": Update(
        correction=RolloutCorrectionSection(
            "sequence", rollout_rs="geometric", rollout_rs_threshold=1.03, rollout_token_veto_threshold=0.91
        ),
        num_rows=24,
    ),
    "gspo, sequences truncated": Update(
        actor=_algorithm("gspo", loss_agg_mode="seq-mean-token-mean", clip_ratio_high=0.03),
        correction=RolloutCorrectionSection("sequence", 1.1, rollout_is_batch_normalize=True),
        num_rows=24,
    ),
    "cispo, icepop": Update(
        actor=_algorithm("cispo", clip_ratio_low=1.0, clip_ratio_high=0.1),
        correction=RolloutCorrectionSection("token", 1.08, "token", 1.08, 0.93),
        num_rows=24,
    ),
    "reinforce, corrected in the loss": Update(
        actor=_algorithm("vanilla", loss_agg_mode="seq-mean-token-mean"),
        correction=RolloutCorrectionSection(
            *("geometric", "0.55_4.0", "token_k1,seq_mean_k3", "0.2_4.0,0.6"),
            bypass_mode=True,
            loss_type="reinforce",
            rollout_is_batch_normalize=True,
        ),
        num_rows=24,
    ),
    "gspo, anchored on the rollout": Update(
        actor=_algorithm("gspo", loss_agg_mode="seq-mean-token-sum"),
        correction=RolloutCorrectionSection(bypass_mode=True),
        num_rows=24,
    ),
}


def _layout(world_size: int, **sizes: int) -> ParallelLayout:
    return ParallelLayout(world_size=world_size, **{f"{axis}_parallel_size": size for axis, size in sizes.items()})


CP2 = _layout(2, context=2)
PP2_VPP2 = _layout(2, pipeline_model=2, virtual_pipeline_model=2)
DP2_EP2 = _layout(2, expert_model=2)
TP2_EP2 = _layout(2, tensor_model=2, expert_model=2)
TP2_CP2_EP4 = _layout(4, tensor_model=2, context=2, expert_model=4)
CP2_DP2 = _layout(4, context=2)

CASES: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "cp2": ("plain", {"layout": CP2, "actor": BUDGET}),
        "cp2 a2a, everything": ("everything", {"layout": CP2, "model": {"cp_comm_type": "a2a"}, "actor": BUDGET}),
        "pp2 vpp2, everything": ("everything", {"layout": PP2_VPP2, "actor": {"ppo_micro_batch_size_per_gpu": 3}}),
        "cp2, rollout's choices": ("rollout's choices", {"layout": CP2, "actor": BUDGET}),
        "pp2 vpp2, rollout's choices": ("rollout's choices", {"layout": PP2_VPP2}),
        "cp2, begins anew": ("begins anew", {"layout": CP2, "actor": BUDGET | {"share_prompts": "false"}}),
        "cp2, begins anew, replay": ("begins anew, replay", {"layout": CP2, "actor": BUDGET}),
        "pp2 vpp2, begins anew, rollout's choices": ("begins anew, rollout's choices", {"layout": PP2_VPP2}),
        "dp2 ep2, begins anew": ("begins anew", {"layout": DP2_EP2, "actor": BUDGET}),
        "dp2 ep2, everything": ("everything", {"layout": DP2_EP2, "actor": BUDGET}),
        "tp2 ep2, everything": ("everything", {"layout": TP2_EP2, "actor": BUDGET}),
    },
    4: {
        "tp2 cp2 ep4, everything": ("everything", {"layout": TP2_CP2_EP4, "actor": BUDGET}),
        "tp2 cp2 ep4, rollout's choices": ("rollout's choices", {"layout": TP2_CP2_EP4, "actor": BUDGET}),
        "cp2 dp2": ("plain", {"layout": CP2_DP2, "actor": BUDGET}),
    },
}


# For every algorithm: data parallelism of 2 to 4, context parallelism, both, and with pipeline stages.
LAYOUTS: dict[int, dict[str, tuple[ParallelLayout, dict[str, Any]]]] = {
    2: {"dp2": (_layout(2), {}), "cp2": (CP2, BUDGET)},
    3: {"dp3": (_layout(3), {"ppo_micro_batch_size_per_gpu": 2})},
    4: {
        "dp4": (_layout(4), BUDGET),
        "cp2 dp2": (CP2_DP2, BUDGET),
        "cp2 pp2": (_layout(4, context=2, pipeline_model=2), {}),
    },
}

# "plain" with context parallelism repeats "ppo" with it, the rollout's choices are there on four ranks, everything is
# there with each axis on two.
SLOW_CASES = {"cp2", "cp2, rollout's choices", "cp2 dp2", "tp2 cp2 ep4, everything"}
# What the default run leaves out: data parallelism is there with three ranks and beside context parallelism.
SLOW_LAYOUTS = {"dp2", "cp2", "dp4", "cp2 pp2"}
# On four ranks the default run has two algorithms: whose weights are normalised over the whole batch, and whose
# sequences are masked. All are there with data parallelism alone.
ON_FOUR_RANKS = ("gspo, sequences truncated", "ppo, sequences masked")


def _is_default(layout: str, algorithm: str) -> bool:
    return layout not in SLOW_LAYOUTS and (layout != "cp2 dp2" or algorithm in ON_FOUR_RANKS)


def _case(way: str, changes: dict[str, Any]) -> Update:
    base = WAYS[way]
    return replace(
        base,
        layout=changes["layout"],
        model=base.model | changes.get("model", {}),
        actor=base.actor | changes.get("actor", {}),
    )


@pytest.fixture(scope="module")
def one_process() -> dict[str, Updated]:
    (found,) = run_ranks(updates, 1, WAYS)
    return found


@pytest.fixture(scope="module")
def algorithms() -> dict[str, Updated]:
    (found,) = run_ranks(updates, 1, ALGORITHMS)
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", CASES)
def test_layouts_equal_one_process(world_size: int, one_process: dict[str, Updated]) -> None:
    _check_cases(world_size, set(CASES[world_size]) - SLOW_CASES, one_process)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", CASES)
def test_cases_that_repeat_others_equal_one_process(world_size: int, one_process: dict[str, Updated]) -> None:
    _check_cases(world_size, SLOW_CASES & set(CASES[world_size]), one_process)


def _check_cases(world_size: int, names: set[str], one_process: dict[str, Updated]) -> None:
    cases = {name: _case(way, changes) for name, (way, changes) in CASES[world_size].items() if name in names}
    found = run_ranks(updates, world_size, cases)[0]
    assert found.keys() == names
    for name in names:
        _assert_equal(name, found[name], one_process[CASES[world_size][name][0]])


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "world_size, is_default",
    [(3, True), (4, True), *(pytest.param(size, False, marks=pytest.mark.slow) for size in (2, 4))],
)
def test_every_algorithm_is_the_same_in_every_layout(
    world_size: int, is_default: bool, algorithms: dict[str, Updated]
) -> None:
    cases = {
        f"{name}, {way}": replace(ALGORITHMS[way], layout=layout, actor=ALGORITHMS[way].actor | actor)
        for name, (layout, actor) in LAYOUTS[world_size].items()
        for way in ALGORITHMS
        if _is_default(name, way) == is_default
    }
    found = run_ranks(updates, world_size, cases)[0]
    for name in cases:
        _assert_equal(name, found[name], algorithms[name.partition(", ")[2]])


def test_corrections_and_clips_bite(algorithms: dict[str, Updated]) -> None:
    """So that layouts are compared where it matters."""
    masked = algorithms["ppo, sequences masked"].metrics
    assert 0.1 < masked["rollout_corr/rollout_rs_seq_masked_fraction"] < 0.9
    assert 0.1 < masked["rollout_corr/rollout_is_veto_fraction"] < 0.9
    truncated = algorithms["gspo, sequences truncated"].metrics
    assert 0.1 < truncated["rollout_corr/rollout_is_ratio_fraction_high"] < 0.9
    assert 0.05 < truncated["actor/pg_clipfrac"] < 0.95
    icepop = algorithms["cispo, icepop"].metrics
    assert 0.05 < icepop["rollout_corr/rollout_rs_masked_fraction"] < 0.95
    assert 0.05 < icepop["actor/pg_clipfrac"] < 0.95
    reinforce = algorithms["reinforce, corrected in the loss"].metrics
    assert 0.05 < reinforce["rollout_corr/rollout_rs_masked_fraction"] < 0.95
    assert 0.1 < reinforce["rollout_corr/rollout_is_mean"] < 1.5 and reinforce["actor/pg_clipfrac"] == 0
    anchored = algorithms["gspo, anchored on the rollout"].metrics
    assert not any(name.startswith("rollout_corr/") for name in anchored)
    assert anchored["training/rollout_probs_diff_max"] > 0


def _assert_equal(name: str, ours: Updated, expected: Updated) -> None:
    torch.testing.assert_close(ours.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5, msg=f"{name}: log-probs")
    loads = {metric for metric in ours.metrics if metric.startswith("actor/expert_load_")}  # of EP ranks: not of one
    assert len(loads) == (2 if re.search(r"\bep\d", name) else 0), name
    assert all(1.0 <= ours.metrics[metric] <= 4.0 for metric in loads)
    assert ours.metrics.keys() - loads == expected.metrics.keys(), name
    for metric, value in expected.metrics.items():
        assert ours.metrics[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, metric)
    assert ours.gradients.keys() == expected.gradients.keys(), name
    for tensor, gradient in expected.gradients.items():
        distance = float((ours.gradients[tensor] - gradient).norm() / gradient.norm())
        assert distance <= 1e-5, (name, tensor, distance)
    assert ours.biases.keys() == expected.biases.keys(), name
    for layer, bias in expected.biases.items():
        assert bias.abs().sum() > 0 and torch.equal(ours.biases[layer], bias), (name, layer)


SHARING = Update(model={"moe_z_loss_coeff": 0.01}, num_rows=32, samples=4)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", [1, 2])
def test_samples_that_share_their_prompt_train_as_whole_ones(world_size: int) -> None:
    """By default, in micro-batches of rows and of tokens; a rank packs the prompt once in each of its micro-batches.

    Replayed routing needs whole samples, and gets them.
    """
    ways: dict[str, dict[str, Any]] = {
        "whole": {"share_prompts": "false"},
        "samples": {"ppo_micro_batch_size_per_gpu": 8},
        "tokens": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 200},
        "replayed": R2,
    }
    cases = {name: replace(SHARING, actor=way, layout=_layout(world_size)) for name, way in ways.items()}
    found = run_ranks(updates, world_size, cases)[0]
    whole = run_ranks(updates, 1, {"whole": replace(cases["whole"], layout=ParallelLayout())})[0]["whole"]
    batch = some_rows(32, 4).batch
    prompts, own = (batch["attention_mask"][:, part].sum(-1) for part in (slice(PROMPT), slice(PROMPT, None)))
    for name in ways:
        _assert_equal(name, found[name], whole)
        micro_batches = [micro for rank in found[name].packed for micro in rank]
        assert sorted(row for rows, _ in micro_batches for row in rows) == list(range(32))
        for rows, num_tokens in micro_batches:
            counted = rows if name in ("whole", "replayed") else sorted({row // 4 * 4 for row in rows})
            assert num_tokens == own[rows].sum() + prompts[counted].sum(), name
            assert name != "tokens" or num_tokens <= 200
    num_whole, num_samples, num_tokens, num_replayed = (
        sum(n for rank in found[x].packed for _, n in rank) for x in ways
    )
    assert num_whole == num_replayed == batch["attention_mask"].sum() and max(num_tokens, num_samples) < num_whole
    if world_size == 1:
        assert num_samples == own.sum() + prompts[::4].sum()


DRAFTED = replace(SHARING, model=SHARING.model | {"mtp_loss_scaling_factor": 0.3}, num_mtp=1)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# In "begins anew" only the first row of a sample scores the token behind the prompt.
DRAFTS = {
    "drafted": DRAFTED,
    "recomputed": replace(DRAFTED, model=DRAFTED.model | FULL),
    "begins anew": replace(DRAFTED, begins_anew=True),
}
DRAFT_LAYOUTS = {
    1: {"one process": ParallelLayout()},
    2: {"dp2 ep2": DP2_EP2, "tp2 ep2": TP2_EP2, "pp2": _layout(2, pipeline_model=2), "pp2 vpp2": PP2_VPP2},
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_samples_that_share_their_prompt_train_the_prediction_layer_as_whole_ones(world_size: int) -> None:
    """That layer reads each sample's own first token at the end of the prompt, so it has whole samples."""
    by_tokens = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 200}
    cases = {
        f"{layout}, {name}": replace(case, layout=sizes, actor=by_tokens)
        for layout, sizes in DRAFT_LAYOUTS[world_size].items()
        for name, case in DRAFTS.items()
    }
    wholes = {name: replace(case, actor={"share_prompts": "false"}) for name, case in DRAFTS.items()}
    expected = run_ranks(updates, 1, wholes)[0]
    found = run_ranks(updates, world_size, cases)[0]
    for name, one in found.items():
        whole = expected[name.partition(", ")[2]]
        assert "actor/mtp_1_loss" in whole.metrics and any("layers.4." in tensor for tensor in whole.gradients)
        _assert_equal(name, one, whole)
        shared_tokens, whole_tokens = (sum(n for rank in x.packed for _, n in rank) for x in (one, whole))
        assert shared_tokens < whole_tokens, name


def test_what_is_switched_on_is_in_the_metrics_and_the_gradient(one_process: dict[str, Updated]) -> None:
    plain, everything = one_process["plain"], one_process["everything"]
    added = {"actor/seq_load_balancing_loss", "actor/z_loss", "actor/mtp_1_loss"}
    assert everything.metrics.keys() - plain.metrics.keys() == added
    assert everything.metrics["actor/seq_load_balancing_loss"] > 0.9  # 1 when balanced
    assert 3.0 < everything.metrics["actor/mtp_1_loss"] < 12.0  # ln(128) = 4.9 without knowledge
    assert any("layers.4." in tensor for tensor in everything.gradients)


def test_replay_keeps_the_experts_of_the_old_log_prob_pass(one_process: dict[str, Updated]) -> None:
    _assert_equal("gates that did not move", one_process["replay"], one_process["plain"])
    moved, replayed = one_process["gates moved"], one_process["gates moved, replay"]
    for layer, bias in one_process["plain"].biases.items():
        assert torch.equal(replayed.biases[layer], bias), "the same choices, so the same counts"
    assert any(not torch.equal(moved.biases[layer], bias) for layer, bias in one_process["plain"].biases.items())
    assert moved.metrics["actor/pg_loss"] != pytest.approx(replayed.metrics["actor/pg_loss"], rel=1e-3)


def test_choices_of_the_rollout_rule_both_passes() -> None:
    """Those that the gates made give what recording them gives; of the last token of a row, which no rollout computes,
    the gate decides. Choices that nobody would make change the log-probs.
    """
    ((recorded, taken, changed),) = run_ranks(_updates_by_choices, 1)
    assert torch.equal(taken[0], recorded[0])
    assert taken[1].keys() == recorded[1].keys()
    for metric, value in recorded[1].items():
        assert taken[1][metric] == pytest.approx(value, rel=1e-6, abs=1e-8), metric
    assert (changed[0] - recorded[0]).abs().max() > 1e-2


def _updates_by_choices() -> list[tuple[torch.Tensor, dict[str, float]]]:
    groups = initialize_from_layout(ParallelLayout())
    data, found, choices = some_rows(16), [], torch.empty(0)
    for way in ("gates moved, replay", "rollout's choices", "rollout's choices"):
        hf, ddp, actor = make_actor(WAYS[way], groups)
        if way == "rollout's choices":
            data.batch["routed_experts"] = choices if len(found) == 1 else some_choices(data, hf)
        log_probs = actor.compute_log_prob(data)
        if isinstance(actor.routing, TracedRouting) and actor.routing.rows is not None:
            choices = actor.routing.rows.choices_BLMK.clone()
            choices[torch.arange(16), _last_columns(data)] = 255  # no expert: must not be read
        move_gates(ddp.module, 0.2)
        found.append((log_probs, actor.update_policy(data)))
    return found


def _last_columns(data: DataProto) -> torch.Tensor:
    mask = data.batch["attention_mask"]
    return (mask * torch.arange(mask.size(1))).amax(-1)


def test_choices_that_are_missing_or_of_another_model_are_refused() -> None:
    (told,) = run_ranks(_refused_choices, 1)
    assert "set actor_rollout_ref.rollout.enable_rollout_routing_replay=True" in told[0]
    assert "the rollout has 2 MoE layers, the actor 3" in told[1]


def _refused_choices() -> list[str]:
    _, _, actor = make_actor(WAYS["rollout's choices"], initialize_from_layout(ParallelLayout()))
    data, told = some_rows(16), []
    for choices in (None, torch.zeros(16, 52, 2, 2, dtype=torch.uint8)):
        if choices is not None:
            data.batch["routed_experts"] = choices
        with pytest.raises(ValueError) as error:
            actor.compute_log_prob(data)
        told.append(str(error.value))
    return told


def test_replay_refuses_rows_that_were_not_recorded() -> None:
    (told,) = run_ranks(_refusals, 1)
    assert "compute_log_prob must record the rows before update_policy" in told[0]
    assert "both must get the same rows in the same order" in told[1]


def _refusals() -> list[str]:
    groups = initialize_from_layout(ParallelLayout())
    case = WAYS["replay"]
    _, _, actor = make_actor(case, groups)
    data, told = some_rows(case.num_rows), []
    with pytest.raises(ValueError) as error:
        actor.update_policy(data)
    told.append(str(error.value))
    actor.compute_log_prob(data)
    with pytest.raises(ValueError) as error:
        actor.update_policy(data.select_idxs(torch.arange(len(data)).flip(0)))
    return [*told, str(error.value)]


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loss_that_is_nan_leaves_its_updates_out_and_stops_the_run_at_the_third(stages: int) -> None:
    """The loss is known on the last stage alone; every rank skips, and every rank stops."""
    for rank, (skipped, told) in enumerate(run_ranks(_updates_of_nan, stages, stages)):
        assert skipped == ([1.0, 1.0] if rank == stages - 1 else [None, None])
        assert re.match(r"training step 1: the gradient norm is nan in 3 steps in a row, after 0 updates\. ", told)


def _updates_of_nan(stages: int) -> tuple[list[float | None], str]:
    groups = initialize_from_layout(ParallelLayout(world_size=stages, pipeline_model_parallel_size=stages))
    case = Update(actor={"entropy_coeff": 0.0})
    _, ddp, actor = make_actor(case, groups)
    data = some_rows(case.num_rows)
    data.batch["ref_log_prob"][2, 0] = torch.nan  # its term is clamped, so that the gradient is finite
    before = [param.detach().clone() for param in ddp.parameters()]
    skipped = [actor.update_policy(data).get("actor/skipped_steps") for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    with pytest.raises(FloatingPointError) as error:
        actor.update_policy(data)
    return skipped, str(error.value)
