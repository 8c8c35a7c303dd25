"""Drafts in a plan: the tokens of a step, steps with and without them, memory, and the number that a search chooses."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mindspeed_llm.tiny import tiny_hf_config
from tests.tools.plan.truth_layouts import LAYOUTS, overrides_of
from tools.plan.__main__ import main
from tools.plan.devices import load_device
from tools.plan.exit_status import BAD_INPUT, FITS
from tools.plan.generation_steps import Row, Step
from tools.plan.rank_plan import RankPlan, plan_rank
from tools.plan.search import overrides
from tools.plan.search.bound import Bounds
from tools.plan.search.layouts import drafting_rollouts
from tools.plan.search.rank import own_candidate, ranking
from tools.plan.setup import PlannedRun, planned_run
from tools.plan.timing.constants import load_constants
from tools.plan.timing.cost import predict
from tools.plan.timing.drafts import MTP, accepted_shares, parse_acceptance, progress_variance, tokens_per_step
from tools.plan.timing.lengths import length_distribution, scattered
from tools.plan.timing.rollout import RolloutTimes, speculation_text
from tools.plan.timing.run_shape import RunShape
from tools.plan.training import StepSize
from verl.trainer.config import load_config, validate_config

ROLLOUT = "actor_rollout_ref.rollout"
RATES = (0.8, 0.6, 0.4)


LAYER = "++actor_rollout_ref.actor.megatron.override_transformer_config.mtp_num_layers=1"


def drafts(method: str, count: int) -> str:
    return f"{ROLLOUT}.speculative_config={{method:{method},num_speculative_tokens:{count}}}"


def a3_run(*more: str) -> PlannedRun:
    more = (*more, *[LAYER] * any(MTP in text for text in more))
    return planned_run("r1_ascend_671b_256die", more, load_device("a3"), nodes=16, model=None)


def shape_of(run: PlannedRun, *acceptance: float) -> RunShape:
    shape = RunShape.of(run.config, run.hf)
    return replace(shape, lengths=replace(shape.lengths, acceptance=acceptance))


# ---- tokens and steps


def test_the_tokens_of_a_step() -> None:
    assert accepted_shares(RATES, 4) == pytest.approx([0.8, 0.48, 0.192, 0.0768])
    assert tokens_per_step(RATES, 3) == pytest.approx(1 + 0.8 + 0.48 + 0.192)
    assert tokens_per_step(RATES, 0) == tokens_per_step((), 0) == 1.0
    assert tokens_per_step((0.0,), 2) == 1.0 and tokens_per_step((1.0,), 2) == 3.0
    assert progress_variance((1.0,), 2) == progress_variance((0.0,), 2) == 0.0
    assert parse_acceptance("0.8,0.6") == (0.8, 0.6)
    with pytest.raises(ValueError, match="between 0 and 1"):
        parse_acceptance("0.8,60")


def test_the_steps_of_a_response_are_what_samples_show() -> None:
    draw, tokens, steps = random.Random(0), 1000, []
    for _ in range(600):
        done = count = 0
        while done < tokens:
            done += 1 + next((place for place, rate in enumerate(RATES) if draw.random() > rate), len(RATES))
            count += 1
        steps.append(count)
    mean, per_step = sum(steps) / len(steps), tokens_per_step(RATES, 3)
    assert mean == pytest.approx(tokens / per_step, rel=0.003)
    variance = sum((count - mean) ** 2 for count in steps) / len(steps)
    assert variance * per_step**2 == pytest.approx(progress_variance(RATES, 3) * tokens, rel=0.15)
    scatter = scattered(length_distribution(tokens, tokens, 0.0), progress_variance(RATES, 3))
    assert scatter.mean == pytest.approx(tokens, rel=1e-3)
    longest = [max(draw.choices(steps, k=64)) for _ in range(500)]
    assert scatter.max_of(64) / per_step == pytest.approx(sum(longest) / len(longest), rel=0.01)


def test_scattered_lengths_keep_their_mean() -> None:
    lengths = length_distribution(1000.0, 2048)
    same, wider = scattered(lengths, 0.0), scattered(lengths, 1.0)
    assert same.mean == pytest.approx(lengths.mean) and wider.mean == pytest.approx(lengths.mean, rel=1e-3)
    assert same.max_of(64) == pytest.approx(lengths.max_of(64))
    assert same.max_of(64) < wider.max_of(64) < 1.1 * same.max_of(64)


# ---- seconds


def test_a_plan_without_drafts_is_what_it_was() -> None:
    """The figures before there were drafts; Python's sum of floats is more exact since 3.12."""
    run, constants = a3_run(), load_constants()
    step = predict(RunShape.of(run.config, run.hf), run.device, constants)
    seconds = step.total_s, step.seconds["rollout"]
    assert seconds == pytest.approx((633.0006711809658, 235.7062969526408), rel=1e-14)
    assert set(step.terms["rollout"]) == {"latency", "weights", "cache", "collectives", "host", "prefill", "memory"}


def test_drafts_make_a_generation_shorter_if_they_are_right() -> None:
    constants, seconds = load_constants(), []
    for count in (1, 2, 3):
        run = a3_run(drafts(MTP, count))
        seconds.append(predict(shape_of(run), run.device, constants).seconds["rollout"])
    run = a3_run()
    without = predict(shape_of(run), run.device, constants).seconds["rollout"]
    assert without > seconds[0] > seconds[1] > seconds[2] > without / tokens_per_step((0.85, 0.7, 0.55), 3)
    never = a3_run(drafts("suffix", 3))
    shape = RunShape.of(never.config, never.hf, replace(shape_of(run).lengths, acceptance=(0.0,)))
    assert predict(shape, run.device, constants).seconds["rollout"] == pytest.approx(without, rel=1e-14)
    shape = shape_of(a3_run(drafts(MTP, 3)), 0.0)  # the prediction layer computes all the same
    assert predict(shape, run.device, constants).seconds["rollout"] == pytest.approx(without, rel=1e-3)  # its cache


def test_training_the_prediction_layer_takes_time() -> None:
    without, with_layer = (predict(shape_of(run), run.device, load_constants()) for run in (a3_run(), a3_run(LAYER)))
    assert 1.0 < with_layer.seconds["update"] / without.seconds["update"] < 1.3
    assert with_layer.seconds["rollout"] == without.seconds["rollout"]


def test_a_verified_step_has_a_row_for_every_draft() -> None:
    run = a3_run(drafts(MTP, 3))
    times = RolloutTimes(shape_of(run), run.device, load_constants().rates("ascend"))
    plain, verified = times.decode_step(16, 1000), times.decode_step(16, 1000, 3)
    assert verified["cache"] == pytest.approx(4 * plain["cache"])
    assert verified["weights"] == times.decode_step(64, 1000)["weights"]  # of the graph of 64
    assert verified["latency"] == plain["latency"] < times.decode_step(32, 1000, 3)["latency"]  # beyond all graphs
    assert 0 == plain["drafts"] < times.decode_step(16, 1000, 1)["drafts"] < verified["drafts"]
    assert "1: 3" in speculation_text(times.shape, run.device, times.rates)
    few = replace(times.shape, rollout=replace(times.shape.rollout, most_drafting=8))
    counts = [RolloutTimes(few, run.device, times.rates).best_drafts(load, 1000) for load in (8, 9)]
    assert counts == [3, 0]


def test_an_engine_leaves_out_the_graphs_of_drafts_where_one_is_too_large() -> None:
    sizes = f"{ROLLOUT}.cudagraph_capture_sizes="
    for given, captured in (("[16,64]", (16, 64)), ("[16,64,80]", (16, 64, 80)), ("[16,64,128]", (16, 64))):
        run = a3_run(drafts(MTP, 1), sizes + given)
        assert validate_config(run.config) == []
        assert shape_of(run).rollout.has_graphs and shape_of(run).rollout.graph_sizes == captured
    assert any(
        "its drafts, 128" in problem for problem in validate_config(a3_run(drafts(MTP, 1), sizes + "[192]").config)
    )


def test_what_cannot_be_priced_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("r1_zero_tiny", "--brief")
    for arguments, words in (
        ([drafts(MTP, 2), "--model", "qwen3_8b"], "has no prediction layer"),
        (["--acceptance", "0.5"], "there are no drafts"),
    ):
        assert main([*tiny, *arguments]) == BAD_INPUT
        assert words in capsys.readouterr().out.replace("\n", " ")


def test_a_plan_prints_what_is_expected_of_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("plan.json", "plan.html")]
    given = ["--acceptance", "0.6", "--output", str(files[0]), "--page", str(files[1])]
    assert main(["r1_zero_tiny", drafts("ngram", 2), *given]) == FITS
    words = "speculation: ngram, 2 drafts, 1.96 tokens a step expected (0.6 right)"
    assert words in capsys.readouterr().out
    assert all(words in file.read_text(encoding="utf-8") for file in files)
    assert main(["r1_zero_tiny", drafts("suffix", 2)]) == FITS
    assert "speculation: suffix, 2 drafts; how many drafts of suffix are right depends" in capsys.readouterr().out


def test_drafts_of_which_nothing_is_known_take_no_time() -> None:
    run, plain = a3_run(drafts("ngram", 2)), a3_run()
    seconds = [predict(shape_of(one), one.device, load_constants()).total_s for one in (run, plain)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)


# ---- memory


def test_drafts_take_the_last_tokens_of_a_step() -> None:
    rows = tuple(Row(row, 20, 19, 1, (row,)) for row in range(3))
    step = Step(rows, ()).with_drafts(3, 8)
    assert [row.num_drafts for row in step.rows] == [3, 2, 0] and step.num_tokens == 8
    assert all(row.num_computed + row.num_new == 20 for row in step.rows)


def test_the_prediction_layer_is_in_memory_and_in_the_calls(tmp_path: Path) -> None:
    model = tiny_hf_config(num_hidden_layers=4) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(model))
    ranks, given = LAYOUTS["tp2"]

    def plan(*more: str, acceptance: tuple[float, ...] = ()) -> RankPlan:
        sizes = ["tensor_model_parallel_size=2", "max_num_batched_tokens=64", "num_gpu_blocks_override=64"]
        config = load_config(
            overrides_of(str(tmp_path), ranks, *given, *(f"{ROLLOUT}.{size}" for size in sizes), *more)
        )
        return plan_rank(config, load_device("cpu"), 0, StepSize(10, 8, 1.0, acceptance))

    without, suffix, mtp = plan(), plan(drafts("suffix", 1)), plan(drafts(MTP, 1), LAYER, acceptance=(1.0,))
    cache, weights = "rollout kv_cache", "rollout weights"
    assert suffix.device_state == without.device_state
    assert mtp.device_state[cache] == without.device_state[cache] * 5 / 4
    layer = mtp.device_state[weights] - without.device_state[weights]
    assert layer > 2 * model["hidden_size"] ** 2 * 4
    decode = [next(calls for calls in one.calls if calls.phase == "decode") for one in (without, suffix, mtp)]
    assert decode[0].count == decode[1].count and sum(decode[1].link_bytes.values()) > sum(
        decode[0].link_bytes.values()
    )
    assert 0.5 * decode[0].count < decode[2].count < 0.8 * decode[0].count  # half of the steps, a layer and a head more


# ---- search


def test_the_bound_and_the_overrides_have_the_drafts_of_a_search() -> None:
    run = a3_run()
    assert len(drafting_rollouts(run, RunShape.of(run.config, run.hf).rollout)) == 1  # nobody trains the layer
    run = a3_run(LAYER)
    shape = RunShape.of(run.config, run.hf)
    tried = drafting_rollouts(run, shape.rollout)
    assert [(one.draft_method, one.num_drafts) for one in tried] == [("", 0), (MTP, 1), (MTP, 2), (MTP, 3)]
    assert tried[0] == shape.rollout and tried[3].graph_sizes == (16, 64, 80)  # 40 tokens of a rank fit one exchange
    bounds = Bounds(run, StepSize(1024, 2048))
    layer = bounds.rollout_weights(tried[1]) - bounds.rollout_weights(tried[0])
    assert layer / 2**30 == pytest.approx(23.34 - 22.81, abs=0.01)  # of plans with and without it
    for rollout in tried:
        candidate = own_candidate(run, replace(shape, rollout=rollout), load_constants())
        made = run.changed(overrides.overrides_of(candidate, run.config))
        assert validate_config(made.config) == []
        assert RunShape.of(made.config, made.hf).rollout == rollout
        back = overrides.overrides_of(own_candidate(run, shape, load_constants()), made.config)
        assert RunShape.of(made.changed(back).config, run.hf).rollout == shape.rollout


@pytest.mark.parametrize(
    ("prompts", "acceptance", "method"),
    [(32, (), MTP), (32, (0.05,), ""), (4096, (), MTP)],
    ids=["few sequences", "few drafts are right", "1024 sequences of a replica, of which some are left at the end"],
)
def test_the_search_drafts_where_it_pays(prompts: int, acceptance: tuple[float, ...], method: str) -> None:
    sizes = (f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}")
    run = planned_run("moonlight_16b_8gpu", (*sizes, LAYER), load_device("h100"), nodes=None, model=None)
    run = replace(run, hf=replace(run.hf, num_nextn_predict_layers=1))
    data, constants = run.config.data, load_constants()
    size = StepSize(data.max_prompt_length, data.max_response_length)
    found = ranking(run, shape_of(run, *acceptance), size, constants, 5, tries_drafts=True)
    assert found.best[0].shape.rollout.draft_method == method
    plain = ranking(run, shape_of(run, *acceptance), size, constants, 5)
    assert (found.best[0].step.total_s < plain.best[0].step.total_s) == bool(method)
    assert found.num_rollout == plain.num_rollout
