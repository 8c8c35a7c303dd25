"""The plan of a rank from a few micro-batches counts what all of them do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.mindspeed_llm.tiny import tiny_hf_config
from tests.tools.plan.training_calls import run_training
from tests.tools.plan.truth_layouts import LAYOUTS, overrides_of
from tools.plan.collectives import Collective, CollectiveLog
from tools.plan.device import MemoryMeter, PlannedDevice
from tools.plan.devices import load_device
from tools.plan.phase_calls import PhaseCalls, link_bytes
from tools.plan.platform import PlannedCpu
from tools.plan.rank_plan import _micro_batches, plan_rank
from tools.plan.training import UPDATE, StepSize, batch_of
from tools.plan.worker import PlannedWorker
from tools.plan.world import planned_rank
from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig, load_config
from verl.utils.megatron.packed_batch import row_tokens
from verl.utils.partitions import units_of_rows

ONE_ROW = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
)
REPLAY = "actor_rollout_ref.actor.router_replay.mode=R2"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(tiny_hf_config(num_hidden_layers=4)))
    return path


def _config(model_dir: Path, layout: str, *more: str) -> PPOTrainerConfig:
    world_size, overrides = LAYOUTS[layout]
    return load_config(overrides_of(str(model_dir), world_size, *overrides, *more))


def assert_planned_whole(config: PPOTrainerConfig, rank: int) -> None:
    """Numbers and bytes of the training calls of a rank's plan are those of the planned rank that makes all of them,
    they begin alike, and there are the same kinds of them.
    """
    world_size = config.trainer.world_size
    profile = load_device("cpu")
    planned = plan_rank(config, profile, rank, StepSize(10, 8))
    log = CollectiveLog()
    device = PlannedDevice(log, MemoryMeter(), has_host_memory=False)
    with planned_rank(rank, world_size, world_size), device:
        worker = PlannedWorker(config, "cpu", 1.0, PlannedCpu(8 << 30, 0, device))
        worker.init_model()
        rows = 16 // worker.groups.layout.data_parallel_size
        whole = run_training(worker, rows, StepSize(10, 8), log, device.meter)
    planned_calls = {calls.phase: calls for calls in planned.calls}
    for name, phase in whole.items():
        calls = planned_calls[name]
        sample, made = calls.samples[0], phase.collectives
        if worker.groups.layout.pipeline_model_parallel_size > 1:  # else all micro-batches make their calls together
            assert len(sample) < len(made), f"{name}: was run whole"
        assert calls.count == len(made), name
        assert Counter(calls.link_bytes) == link_bytes(made, rank, profile), name
        num_first = len(sample) // 4
        assert sample[:num_first] == made[:num_first], name
        assert {_without_sizes(call) for call in sample} == {_without_sizes(call) for call in made}, name


def _without_sizes(call: Collective) -> Collective:
    return call._replace(sent=0, received=0, splits=None)


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        pytest.param("dp2", 1, marks=pytest.mark.slow),
        pytest.param("tp2_pp2_uneven_ep2", 2, marks=pytest.mark.slow),  # its mini-batches are below
        ("cp2_pp2_vpp2", 2),
        pytest.param("pp4_ep2_overlap", 0, marks=pytest.mark.slow),  # a first stage has the mini-batches below
        ("pp4_ep2_overlap", 4),
    ],
)
def test_many_micro_batches_are_planned_from_few(layout: str, rank: int, model_dir: Path) -> None:
    assert_planned_whole(_config(model_dir, layout, *ONE_ROW, REPLAY), rank)


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_several_mini_batches_are_planned_from_one(rank: int, model_dir: Path) -> None:
    mini_batches = ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_epochs=2")
    assert_planned_whole(_config(model_dir, "tp2_pp2_uneven_ep2", *ONE_ROW, REPLAY, *mini_batches), rank)


SHARED = "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.train_batch_size=4"
BUDGET = "actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu="


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",), [84, 84]),
        (("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",), [26] * 8),
        ((BUDGET[0], f"{BUDGET[1]}130"), [126, 42]),
        ((BUDGET[0], f"{BUDGET[1]}40"), [26] * 8),
    ],
)
def test_micro_batches_of_shared_prompts_are_those_of_a_run(
    model_dir: Path, more: tuple[str, ...], expected: list[int]
) -> None:
    """Four prompts of 10 tokens with four samples of 8 on one rank."""
    size, config = StepSize(10, 8), _config(model_dir, "one", *SHARED, *more)
    rows, per_micro, together = _micro_batches(config, UPDATE, size, True)
    assert rows == 16
    batch, actor = batch_of(rows, size, config, together).batch, config.actor_rollout_ref.actor
    given = batch["input_ids"], batch["attention_mask"], batch["response_mask"]
    tokens = row_tokens(*given, 1, shares_prompts=True)
    limit = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
    units, parts = units_of_rows(tokens, actor.ppo_micro_batch_size_per_gpu or 1, limit)
    chunks = [[row for index in part for row in units[index]] for part in parts]
    assert max(map(len, chunks)) <= per_micro
    assert tokens.of(range(per_micro)) == expected[0]
    assert sum(map(tokens.of, chunks)) == sum(expected)
    assert _micro_batches(config, UPDATE, size, False)[2] == 1


def test_an_update_with_shared_prompts_needs_less_memory(model_dir: Path) -> None:
    """Of samples of 8 tokens after a prompt of 100."""
    peaks, lengths = [], ("data.max_prompt_length=100", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16")
    for switch in ("auto", "false"):
        more = (*lengths, f"actor_rollout_ref.actor.share_prompts={switch}")
        plan = plan_rank(_config(model_dir, "one", *SHARED, *more), load_device("cpu"), 0, StepSize(100, 8))
        peaks.append(next(phase.peak_bytes for phase in plan.phases if phase.name == "update_actor"))
    assert peaks[0] < 0.8 * peaks[1]


def test_equal_steps_are_counted_and_two_are_shown() -> None:
    call, device = Collective("all_reduce", "tp", (0, 1), "float32", 3, 3, None, -1), load_device("a3")
    calls = PhaseCalls.of("decode", [call, call], 0, device, steps=50)
    assert calls == PhaseCalls("decode", ((call, call),) * 2, 100, {"node": 100 * 12})
    assert PhaseCalls.of("decode", [call._replace(ranks=(0,))], 0, device).link_bytes == {}  # of one rank alone
    for ranks, link in (((0, 15), "node"), ((15, 16), "domain"), ((0, 768), "cluster")):
        assert link_bytes([call._replace(ranks=ranks)], 0, device) == {link: 12}


def test_micro_batches_that_add_different_calls_are_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlannedWorker.update_actor

    def twice(worker: PlannedWorker, data: DataProto) -> DataProto:
        """The second micro-batch adds less than the third."""
        found = plain(worker, data)
        return plain(worker, data) if len(data) > 4 else found

    monkeypatch.setattr(PlannedWorker, "update_actor", twice)
    with pytest.raises(ValueError, match="update_actor: micro-batches make different calls"):
        plan_rank(_config(model_dir, "tp2_pp2_uneven_ep2"), load_device("cpu"), 2, StepSize(10, 8))


def test_the_phases_of_a_step_come_in_order(model_dir: Path) -> None:
    plan = plan_rank(_config(model_dir, "one"), load_device("cpu"), 0, StepSize(10, 8))
    names = [phase.name for phase in plan.phases]
    order = ["wake_weights", "weight_sync", "wake_kv_cache", "decode", "prefill", "sleep", "compute_ref_log_prob"]
    assert [name for name in names if name in order] == order
    assert names[-2:] == ["update_actor", "save"]
    by_name = {phase.name: phase for phase in plan.phases}
    assert by_name["sleep"].after_bytes < by_name["wake_kv_cache"].after_bytes - plan.device_state["rollout kv_cache"]
    assert plan.num_parameters > 0
