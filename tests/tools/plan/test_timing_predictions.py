"""Predictions: how far from published steps, what a config becomes, and what changes a step for better or worse."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.core.parallel_layout import ParallelLayout
from recipes.common.recipe import ROOT
from tools.plan.devices import load_device
from tools.plan.tables import time_table, variation_table
from tools.plan.timing.calibrate import (
    PHASE_BAR,
    TOTAL_BAR,
    LeftOut,
    calibrated,
    compare,
    constants_table,
    error_table,
    fit,
    is_main,
    write_constants,
)
from tools.plan.timing.constants import TABLE, Constants, load_constants
from tools.plan.timing.cost import predict, sensitivity
from tools.plan.timing.published import published_model, published_runs
from tools.plan.timing.run_shape import Lengths, MicroBatches, RolloutShape, RunShape, TrainShape
from verl.trainer.config import load_config

PHASES = ("weight_sync", "offload", "rollout", "reward", "old_log_prob", "reference", "update")
LEFT_OUT = ("cann, real weights", "NeMo, 256 H100")  # of each device; all others in the slow run
PAGE = Path(__file__).resolve().parents[3] / "docs" / "time_model.md"


@pytest.fixture(scope="module")
def calibration() -> tuple[Constants, list[LeftOut]]:
    return calibrated()


@pytest.fixture(scope="module")
def fitted() -> Constants:
    """The constants fitted on every row, without the errors of rows that are left out."""
    return fit(published_runs(), load_constants(), {})


def left_out(name: str, fitted: Constants) -> LeftOut:
    """One row as ``leave_out`` has it among all of them."""
    run = next(run for run in published_runs() if run.name == name)
    without = fit([other for other in published_runs() if other.name != name], fitted, {}, tolerance=1e-5)
    return LeftOut(run, without, compare(run, without))


def page_table() -> str:
    block = re.search(r"<!-- calibrate -->\n(.*)\n<!-- /calibrate -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return block[1]


def first_columns(table: str) -> list[list[str]]:
    """What a table says of a row that was left out, without what its whole group changes."""
    return [line.split("|")[:6] for line in table.splitlines()]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_page_and_the_bars_hold_for_a_row_that_was_left_out(name: str, fitted: Constants) -> None:
    left = left_out(name, fitted)
    _, _, *rows = first_columns(error_table(fitted, [left]))
    page = first_columns(page_table())
    begin = next(number for number, row in enumerate(page) if row[1].strip() == name)
    assert page[begin : begin + len(rows)] == rows, "python -m tools.plan.timing.calibrate prints another table"
    assert_within_bars(left)


def test_the_constants_are_those_of_a_fit(fitted: Constants) -> None:
    stored = load_constants().by_key
    assert {c.key: float(f"{c.value:.4g}") for c in fitted.fitted} == {
        c.key: stored[c.key].value for c in fitted.fitted
    }
    printed = constants_table(fitted, [left_out(LEFT_OUT[0], fitted)]).splitlines()[2:]
    assert [line.split(" | ")[:3] for line in printed] == [
        [f"| `{c.key}`", f"{stored[c.key].value:.3g}", f"{stored[c.key].prior:.3g}"] for c in fitted.fitted
    ]


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(calibration: tuple[Constants, list[LeftOut]]) -> None:
    assert page_table() == error_table(*calibration), "python -m tools.plan.timing.calibrate prints another table"


@pytest.mark.slow
def test_the_constants_are_the_fitted_ones(calibration: tuple[Constants, list[LeftOut]], tmp_path: Path) -> None:
    written = tmp_path / TABLE.name
    written.write_text(TABLE.read_text(encoding="utf-8"), encoding="utf-8")
    write_constants(calibration[0], written)
    assert written.read_text(encoding="utf-8") == TABLE.read_text(encoding="utf-8"), "run calibrate --write"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["cann, real weights", "cann, random weights", "r1_ascend", "verl, 96 H20", "NeMo, 256 H100", "NeMo, 512 H100"],
)
def test_bars_hold_for_rows_that_were_left_out(name: str, calibration: tuple[Constants, list[LeftOut]]) -> None:
    assert_within_bars(next(left for left in calibration[1] if left.run.name == name))


def assert_within_bars(left: LeftOut) -> None:
    for miss in left.misses:
        bar = TOTAL_BAR if miss.phase == "total" else PHASE_BAR
        assert not is_main(miss, left.run) or abs(miss.error) <= bar, miss


def test_fitted_constants_are_fewer_than_the_phases(fitted: Constants) -> None:
    phases = [miss for run in published_runs() for miss in compare(run, fitted) if is_main(miss, run)]
    assert len(fitted.fitted) < len([miss for miss in phases if miss.phase != "total"])


def test_every_row_and_constant_says_where_it_is_from() -> None:
    assert all(run.source and run.assumed for run in published_runs())
    assert all(constant.origin for constant in load_constants().by_key.values())


def test_a_prediction_takes_milliseconds() -> None:
    constants, runs = load_constants(), published_runs()
    for run in runs:
        predict(run.shape, run.device, constants)
    best = 1.0
    for _ in range(5):
        before = time.process_time()
        for run in runs:
            predict(run.shape, run.device, constants)
        best = min(best, (time.process_time() - before) / len(runs))
    assert best < 0.010


def test_terms_and_phases_add_up() -> None:
    constants = load_constants()
    for run in published_runs():
        step = predict(run.shape, run.device, constants)
        assert set(step.seconds) == set(PHASES)
        assert all(seconds >= 0 for terms in step.terms.values() for seconds in terms.values())
        if run.shape.schedule == "sync":
            assert step.total_s == pytest.approx(sum(step.seconds.values()))
        else:
            assert step.total_s < sum(step.seconds.values())
        assert step.dominant("rollout", 1)[0][1] == max(step.terms["rollout"].values())


# ---- shapes of recipes


def shape_of(folder: str, name: str, *overrides: str) -> RunShape:
    config = load_config(list(overrides), config_name=name, config_dir=ROOT / "recipes" / folder / "config")
    return RunShape.of(config, published_model("deepseek_v3"), name=name)


def test_the_shape_of_the_cann_config() -> None:
    shape = shape_of("r1_zero", "cann_true_weight_671b_256die")
    published = next(run.shape for run in published_runs() if run.name == "cann, real weights, 8 layers again")
    assert shape.train.layout == published.train.layout
    assert shape.train.update == MicroBatches(samples=1)
    assert shape.train.log_prob == MicroBatches(samples=8)  # packed here, padded there
    for field in ("recomputed_layers", "optimizer", "offloads", "mini_batches"):
        assert getattr(shape.train, field) == getattr(published.train, field), field
    assert (shape.train.exchange_beside, published.train.exchange_beside) == ("shared", "experts")
    for field in ("world_size", "tp", "dp", "max_num_seqs", "graph_sizes", "has_expert_parallel"):
        assert getattr(shape.rollout, field) == getattr(published.rollout, field), field
    assert (shape.has_reference, shape.has_old_log_prob, shape.num_sequences) == (True, False, 8192)


def test_the_shape_of_the_slime_config() -> None:
    shape = shape_of("r1_dynamic_sampling", "deepseek_r1_671b_128gpu")
    assert shape.train.layout.context_parallel_size == 4
    assert (shape.train.optimizer, shape.train.recomputed_layers, shape.train.mini_batches) == ("cpu", -1, 4)
    assert shape.rollout.weight_bytes == 1.0
    assert shape.generated_sequences == 2 * shape.num_sequences
    assert shape.has_old_log_prob


def test_even_experts_and_full_lengths_come_from_the_config() -> None:
    shape = shape_of("r1_zero", "cann_random_init_671b_256die")
    assert shape.expert_load_spread == 0.0
    assert shape.lengths.response_mean == shape.lengths.response_limit


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be timed") as error:
        shape_of(
            "r1_zero",
            "r1_ascend_671b_256die",
            "actor_rollout_ref.rollout.data_parallel_size=96",
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=7",
        )
    assert "world size 256 is not a multiple of" in str(error.value)
    assert "do not divide into engines of TP 2 x DP 96" in str(error.value)
    assert "256 experts do not divide over TP 2 x DP 96 ranks" in str(error.value)


# ---- what changes a step


def test_sensitivity_goes_the_way_it_must() -> None:
    shape, device, constants = shape_of("r1_zero", "r1_ascend_671b_256die"), load_device("a3"), load_constants()
    step = dict(sensitivity(shape, device, constants))
    now = step["as it is"].total_s
    # TP1 PP8 EP32 needs 256 ranks at a time, so the next size is another 16 nodes.
    assert step["16 more nodes"].total_s < now
    assert step["16 more nodes"].tokens_per_s_device < step["as it is"].tokens_per_s_device
    assert step["twice the response length"].total_s > 1.5 * now
    assert step["experts loaded evenly"].total_s < now < step["experts loaded twice as unevenly"].total_s
    assert step["decode without graphs"].seconds["rollout"] > step["as it is"].seconds["rollout"]
    assert step["rows through the controller"].total_s > now


def test_generation_that_never_stops_has_no_tail() -> None:
    run = next(run for run in published_runs() if run.name == "NeMo, 512 H100, one step off")
    constants = load_constants()
    stopping = replace(run.shape, schedule="one_step_off")
    tail, none = (predict(shape, run.device, constants).seconds["rollout"] for shape in (stopping, run.shape))
    assert none < 0.7 * tail


def test_tables_show_the_error_beside_each_prediction() -> None:
    shape, constants = shape_of("r1_zero", "r1_ascend_671b_256die"), load_constants()
    step = predict(shape, load_device("a3"), constants)
    rows = {phase: rest for phase, *rest in time_table(step).rows}
    _, error, mostly = rows["update"]
    assert error == "up to 8% (3 rows)"
    assert mostly.startswith("compute ")
    assert rows["step"][:2] == [f"{step.total_s:,.1f}", "up to 14% (4 rows)"]
    assert "old_log_prob" not in rows
    assert time_table(predict(shape, load_device("cpu"), constants)).rows[-1][2] == "no published row"
    changes = variation_table(sensitivity(shape, load_device("a3"), constants)).rows
    assert changes[0][:3] == ("as it is", f"{step.total_s:,.1f}", "")


def test_errors_are_those_of_the_device_family() -> None:
    shape, constants = shape_of("r1_zero", "r1_ascend_671b_256die"), load_constants()
    assert predict(shape, load_device("a3"), constants).errors["total"].rows == 4
    assert predict(shape, load_device("cpu"), constants).errors == {}


@pytest.mark.parametrize("cut", [MicroBatches(samples=8), MicroBatches(token_budget=20_000)])
def test_samples_that_share_a_prompt_compute_it_once(cut: MicroBatches) -> None:
    """Eight samples of 512 tokens after a prompt of 1024, which every rank has whole; not with context parallelism."""
    model, lengths = published_model("qwen3_8b"), Lengths(1024, 512, 1024, 512, spread=0.0)
    train = TrainShape(ParallelLayout(world_size=8), update=cut, log_prob=cut, shares_prompts=True)
    shared = RunShape("shared", model, lengths, 64, 8, train, RolloutShape(8, 1, 1, has_expert_parallel=False))
    apart, device, constants = shared.with_train(shares_prompts=False), load_device("h100"), load_constants()
    ours, theirs = predict(shared, device, constants), predict(apart, device, constants)
    assert theirs.updated_tokens == theirs.tokens == ours.tokens == 512 * 1536
    assert ours.updated_tokens == 512 * (1024 / 8 + 512)
    for phase in ("update", "reference"):
        assert 0.35 < ours.terms[phase]["compute"] / theirs.terms[phase]["compute"] < 640 / 1536 + 0.05
    split = shared.with_train(layout=ParallelLayout(world_size=8, context_parallel_size=2))
    assert predict(split, device, constants).updated_tokens == split.num_sequences * 1536
