"""The layout that the planner chooses for a model of one's own: kept, made again where it must be, under the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.common.recipe import ROOT, load_recipe
from recipes.common.tiny_models import QWEN3
from tools.launch import __main__ as launch
from tools.launch.accelerators import count_accelerators
from tools.launch.dtype_choice import KEYS, chosen_dtypes
from tools.launch.job import Job, resolve_config
from tools.launch.layout_choice import FILE, LayoutChoice, choose_layout, without_layout
from tools.launch.settings import read_settings
from tools.plan.setup import MODELS

Printed = Callable[..., str]
BIG = MODELS / "qwen3_30b_a3b"
ENGINE = "actor_rollout_ref.actor.megatron"
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization=0.9"  # one share to try, and one form of memory
FEW = (SHARE, f"{ENGINE}.param_offload=false")


def job_of(tmp_path: Path, *overrides: str, devices: int = 0, kind: str = "cpu", **variables: str) -> Job:
    given = {"OUTPUT_DIR": str(tmp_path / "out"), "MODEL_PATH": str(QWEN3.directory), **variables}
    settings = read_settings(load_recipe("gsm8k"), overrides, given, kind, devices)
    return Job(settings, resolve_config(settings))


def chosen(job: Job, may_plan: bool = True) -> tuple[LayoutChoice, bool]:
    """The choice, and whether the planner was asked."""
    asked: list[str] = []
    return choose_layout(job, may_plan, asked.append), bool(asked)


def test_it_is_for_real_models_in_the_recipes_own_configs_and_all_accelerators(tmp_path: Path) -> None:
    recipe, model = load_recipe("gsm8k"), {"MODEL_PATH": str(QWEN3.directory)}
    assert not read_settings(recipe, [], {}, "npu", 16).chooses_layout
    assert not read_settings(recipe, [], model | {"CONFIG_NAME": "/my/own.yaml"}, "npu", 16).chooses_layout
    assert not read_settings(load_recipe("r1_zero"), [], model, "npu", 16).chooses_layout
    assert read_settings(recipe, [], {}, "npu", 16).num_devices is None
    for kind, given, devices in (("npu", (), 16), ("npu", ("trainer.device=cpu",), 1), ("cpu", (), 1), ("cuda", (), 8)):
        job = job_of(tmp_path, *given, devices=0 if kind == "cpu" else 8 if kind == "cuda" else 16, kind=kind)
        assert job.settings.chooses_layout and job.npus_per_node == devices
    assert job_of(tmp_path, devices=16, kind="npu", NPUS_PER_NODE="4").npus_per_node == 4
    assert job_of(tmp_path, "trainer.n_gpus_per_node=2", devices=16, kind="npu").npus_per_node == 2


def test_dies_are_counted_as_a_process_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_accelerators("cpu") == 0
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,1,7")
    assert count_accelerators("npu") == 3


def test_a_choice_is_kept_until_what_it_was_made_for_changes(tmp_path: Path) -> None:
    """A resumed run has its layout, whatever else of it has changed."""
    job = job_of(tmp_path, devices=2, kind="cuda", PLAN_DEVICE="h100")
    nothing, was_planned = chosen(job, may_plan=False)
    assert (nothing.overrides, was_planned) == ((), False) and nothing.applied(job).config == job.config
    nothing.write(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    replace(nothing, overrides=(f"{ENGINE}.tensor_model_parallel_size=2",), reasons=("two",)).write(tmp_path / "out")
    more = ("trainer.save_freq=7", "data.val_max_samples=3")
    longer = job_of(tmp_path, *more, devices=2, kind="cuda", PLAN_DEVICE="h100", STEPS="9", SEED="5")
    for may_plan in (True, False):
        kept, was_planned = chosen(longer, may_plan)
        assert not was_planned and kept.note == f"kept in {tmp_path}/out/{FILE} from an earlier start"
        assert kept.applied(longer).config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 2
    other = job_of(tmp_path, "data.max_response_length=32", devices=1, kind="cuda", PLAN_DEVICE="h100")
    assert chosen(other, may_plan=False)[0].note == (
        f"--no-plan: the config's own, on 1 cuda device(s); nothing is chosen, because {tmp_path}/out/{FILE} is for "
        "other devices and settings"
    )
    big = job_of(tmp_path, devices=2, kind="cuda", PLAN_DEVICE="h100", MODEL_PATH=str(BIG))
    assert "is for other model" in chosen(big, may_plan=False)[0].note


def test_the_dtype_of_a_cpu_is_measured_once_and_holds(tmp_path: Path) -> None:
    """Of two starts in one OUTPUT_DIR the second computes as the first did, on whatever machine and in what layout."""
    measured = chosen_dtypes(1)
    assert {text.rpartition("=")[2] for text in measured} <= {"bfloat16", "float32"} and len(measured) == 2
    for dtype in ("bfloat16", "float32"):
        chosen_before = tuple(f"{key}={dtype}" for key in KEYS)
        LayoutChoice(chosen_before, ("quicker",), {"devices": "others"}, "").write(tmp_path / "out")
        job = job_of(tmp_path)
        choice, _ = chosen(job, may_plan=False)
        assert "is for other" in choice.note and choice.overrides == chosen_before
        config = choice.applied(job).config.actor_rollout_ref
        assert (config.actor.megatron.dtype, config.rollout.dtype) == (dtype, dtype)
    given = job_of(tmp_path, f"{KEYS[0]}=bfloat16")
    choice, _ = chosen(given, may_plan=False)
    assert choice.applied(given).config.actor_rollout_ref.actor.megatron.dtype == "bfloat16"


@pytest.mark.slow
def test_a_choice_is_the_planners(tmp_path: Path) -> None:
    """It is made again for other devices, also beside a checkpoint, which any layout reads."""
    job = job_of(tmp_path, *FEW, devices=2, kind="cuda", PLAN_DEVICE="h100")
    first, was_planned = chosen(job)
    assert was_planned and first.note == "chosen for 1 x 2 H100 SXM5 of 79.6 GiB"
    assert any("a step is predicted to take" in reason for reason in first.reasons)
    assert first.applied(job).config != job.config
    assert not (tmp_path / "out").exists(), "whoever asks writes it"
    first.write(tmp_path / "out")
    again, was_planned = chosen(job)
    assert (again.overrides, again.reasons, was_planned) == (first.overrides, first.reasons, False)
    checkpoints = tmp_path / "out" / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("20")
    other, was_planned = chosen(job_of(tmp_path, *FEW, devices=1, kind="cuda", PLAN_DEVICE="h100"))
    assert was_planned and other.note.endswith(
        "was for other devices; the checkpoint of step 20 is read into the new layout"
    )


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / FILE).write_text('{"overrides": 3}')
    with pytest.raises(ValueError, match=rf"out/{FILE} is not a layout that the launcher has written .*; remove it"):
        chosen(job_of(tmp_path))


def test_the_users_own_stand_over_what_is_chosen(tmp_path: Path) -> None:
    job = job_of(tmp_path, f"{ENGINE}.tensor_model_parallel_size=2", "data.seed=7", devices=2, kind="cuda")
    choice = LayoutChoice((f"{ENGINE}.tensor_model_parallel_size=1", f"{ENGINE}.context_parallel_size=2"), (), {}, "")
    engine = choice.applied(job).config.actor_rollout_ref.actor.megatron
    assert (engine.tensor_model_parallel_size, engine.context_parallel_size) == (2, 2)
    plain = without_layout(job).config
    assert (plain.actor_rollout_ref.actor.megatron.tensor_model_parallel_size, plain.data.seed) == (1, 7)


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """What --print-plan shows of a run with these variables."""

    def show(*arguments: str, **variables: object) -> str:
        given = {"MODEL_PATH": QWEN3.directory, "OUTPUT_DIR": tmp_path / "out", "CONFIG_NAME": "gsm8k"} | variables
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        assert launch.main(["gsm8k", "--print-plan", *arguments]) == 0
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().out

    return show


def test_what_cannot_be_chosen_is_refused_and_no_plan_chooses_nothing(printed: Printed) -> None:
    refusal = "- no layout can be chosen: no device 'abacus'; known devices: a2, "
    plan = printed(PLAN_DEVICE="abacus")
    assert refusal in plan and "; --no-plan starts with the config's own, which overrides can change" in plan
    plan = printed("--no-plan", PLAN_DEVICE="h100")
    assert "layout: --no-plan: the config's own, on 1 cpu device(s); nothing is chosen" in plan


@pytest.mark.slow
def test_a_device_that_is_too_small_is_refused(tmp_path: Path, printed: Printed) -> None:
    small = tmp_path / "small.toml"
    text = (ROOT / "tools" / "plan" / "devices" / "h100.toml").read_text(encoding="utf-8")
    small.write_text(text.replace("memory_gib = 79.6", "memory_gib = 2.1"), encoding="utf-8")
    plan = printed(*FEW, PLAN_DEVICE=small)
    assert "- no layout fits 1 x 1 H100 SXM5 of 2.1 GiB:" in plan and "shorter rows, more devices" in plan


@pytest.mark.slow
@pytest.mark.parametrize(("device", "count"), [("a2", 8), ("a3", 16), ("h100", 8)])
def test_a_node_trains_the_published_moe_without_a_word(
    tmp_path: Path, printed: Printed, device: str, count: int
) -> None:
    """``MODEL_PATH=Qwen/Qwen3-30B-A3B``, of which config.json is here, on one node."""
    kind = "cuda" if device == "h100" else "npu"
    plan = printed(f"trainer.device={kind}", MODEL_PATH=BIG, NPUS_PER_NODE=count, PLAN_DEVICE=device)
    assert f"Plan: gsm8k on 1 x {count} {kind} devices" in plan
    assert f"layout: chosen for 1 x {count} " in plan and "GiB stay free" in plan
    assert "enable_expert_parallel: true" in plan
