"""Commands of the pages as a user runs them: as printed, in a plain shell, on what a run has left; results are read.

``tests/test_page_commands.py`` has the table of all commands: which tests run the others, and what is not run, and why.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.system.command import Command, clean_environment, read_metrics
from tests.system.jobs import STEPS, Job, Prepared
from verl.trainer.config.override_text import override

pytestmark = pytest.mark.timeout(600)

OUTPUT = "outputs/r1_zero"
SCRIPT = "bash recipes/r1_zero/ray_start_grpo_npu.sh"
LEDGER = f"python -m tools.regrade {OUTPUT}/reward_ledger"


@dataclass(frozen=True)
class Shown:
    """A command that has ended, and the folder in which it ran."""

    code: int
    text: str
    folder: Path

    def score_after(self) -> float:
        """The mean score that ``tools.regrade`` prints last."""
        return float(self.text.split()[-1])


# Command, as a page prints it -> what must be so afterwards. ``outputs/r1_zero`` is a finished run.
LOOKS: dict[str, Callable[[Shown], bool]] = {
    f"python -m tools.report --run-dir {OUTPUT}": lambda shown: (
        shown.code == 0
        and "validation score" in shown.text
        and "Time of a step" in (shown.folder / OUTPUT / "report.html").read_text(encoding="utf-8")
    ),
    f"python -m tools.viewer {OUTPUT}": lambda shown: (
        shown.code == 0
        and f"{OUTPUT}/samples.html: " in shown.text
        and (shown.folder / OUTPUT / "samples.html").is_file()
    ),
    LEDGER: lambda shown: shown.code == 0 and re.search(r"^0 of \d+ differ; ", shown.text, re.MULTILINE) is not None,
    f"{LEDGER} --timeout 60": lambda shown: shown.code == 0,
    f"{LEDGER} --path my_reward.py": lambda shown: shown.code == 1 and shown.score_after() > 0,
    f"{LEDGER}/step_3.jsonl --path my_reward.py --kwargs '{{\"bonus\": 0.5}}'": lambda shown: (
        shown.code == 1 and shown.score_after() > 0
    ),
    f'grep -h \'"status": "timeout"\' {OUTPUT}/reward_ledger/step_*.jsonl': lambda shown: (
        shown.code == 1 and shown.text == ""  # grep's status where no grader was over its limit
    ),
    "python -m tools.doctor": lambda shown: (  # another run on this machine may have the port
        ("Ready for r1_zero_tiny." if shown.code == 0 else "Not ready: r1_zero_tiny") in shown.text
    ),
    "python -m tools.doctor --ports 6766": lambda shown: "port 6766" in shown.text and shown.code in (0, 1),
    "python -m tools.doctor --config r1_ascend_671b_256die": lambda shown: (
        shown.code == 1 and "Not ready: r1_ascend_671b_256die" in shown.text
    ),
    "source recipes/common/npu_env.sh && python -m tools.doctor --die": lambda shown: shown.code == 2,
    "python -m tools.download": lambda shown: shown.code == 0 and "deepscaler " in shown.text,
    "python -m tools.workshop.reference --check": lambda shown: shown.code == 0,
    "python -m tools.subtree list": lambda shown: shown.code == 0 and "core_v0.12.1" in shown.text,
    f"{SCRIPT} --print-plan": lambda shown: shown.code == 0 and "verl.trainer.main_ppo" in shown.text,
}


def _ends_finite(run: Path) -> bool:
    return all(math.isfinite(step["actor/grad_norm"]) for step in read_metrics(run)[1:])


def _has_scores(run: Path) -> bool:
    """Of ``my_reward.py``: a score above 0 in every step, of its bonus at least, and its own part."""
    return all(step["critic/score/mean"] > 0 and "reward/accuracy" in step for step in read_metrics(run)[1:])


def _has_spans(run: Path) -> bool:
    events = json.loads((run / "timeline" / "step_10.json").read_text(encoding="utf-8"))["traceEvents"]
    return {"gen", "update_actor"} <= {event["name"] for event in events}


# What follows the script's name, as a page prints it -> steps of the small run, and what must be so afterwards.
RUNS: dict[str, tuple[int, Callable[[Path], bool]]] = {
    "custom_reward_function.path=my_reward.py custom_reward_function.reward_kwargs.bonus=0.1": (2, _has_scores),
    "trainer.timeline_freq=10": (10, _has_spans),
    "trainer.timeline_freq=1": (2, lambda run: (run / "timeline" / "step_1.json").is_file()),
    "trainer.log_samples_freq=1": (2, lambda run: (run / "samples" / "step_1.jsonl").is_file()),
    "trainer.log_samples_freq=10 trainer.log_samples_rows=64": (
        10,
        lambda run: len((run / "samples" / "step_10.jsonl").read_text(encoding="utf-8").splitlines()) == 32,
    ),
    "global_profiler.tool=torch 'global_profiler.steps=[3]' actor_rollout_ref.actor.profiler.enable=True": (
        3,
        lambda run: (run / "profile" / "step_3" / "actor_rollout_ref_rank_0.json.gz").is_file(),
    ),
    "actor_rollout_ref.actor.optim.override_optimizer_config.on_non_finite_grads=stop "
    "actor_rollout_ref.actor.megatron.override_ddp_config.check_for_nan_in_grad=True": (2, _ends_finite),
    "trainer.exact_log_probs=True actor_rollout_ref.rollout.expert_exchange=dispatch": (
        2,
        lambda run: all(step["training/rollout_probs_diff_max"] == 0 for step in read_metrics(run)[1:]),
    ),
    "trainer.save_rollouts=True": (2, lambda run: (run / "rollouts" / "step_2.safetensors").is_file()),
    "trainer.rollout_only=True": (2, lambda run: (run / "rollouts" / "step_2.safetensors").is_file()),
    "trainer.schedule=fully_async actor_rollout_ref.hybrid_engine=False rollout.nnodes=1 rollout.n_gpus_per_node=2 "
    "async_training.staleness_threshold=2 'algorithm.rollout_correction={rollout_is:token}'": (
        2,
        lambda run: all(step["schedule/staleness/max"] <= 2 for step in read_metrics(run)[1:]),
    ),
}


def my_reward() -> str:
    """The function that docs/rewards.md shows first."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8"), re.DOTALL)[0]


@pytest.fixture(scope="module")
def checkout(uninterrupted: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with the results of a run in ``outputs/r1_zero`` and the reader's ``my_reward.py``."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in ("outputs", ".git"):
            (folder / path.name).symlink_to(path)
    shutil.copytree(uninterrupted.output_dir, folder / OUTPUT, symlinks=True)
    (folder / "my_reward.py").write_text(my_reward(), encoding="utf-8")
    return folder


# The same tools on other arguments, which tests of their own have.
LONG_LOOKS = {
    f"{LEDGER} --timeout 60",
    "python -m tools.doctor --ports 6766",
    "python -m tools.doctor --config r1_ascend_671b_256die",
    "source recipes/common/npu_env.sh && python -m tools.doctor --die",
    "python -m tools.workshop.reference --check",
    f"{SCRIPT} --print-plan",  # tests/recipes/test_launcher.py
}


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=pytest.mark.slow) if line in LONG_LOOKS else line for line in LOOKS]
)
def test_a_look_at_a_run(checkout: Path, line: str) -> None:
    python = shlex.quote(sys.executable)  # what an activated environment calls python
    done = subprocess.run(
        ["bash", "-c", re.sub(r"(?<![\w.])python(?= )", lambda _: python, line)],
        cwd=checkout,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert LOOKS[line](Shown(done.returncode, done.stdout, checkout)), f"{done.returncode}\n{done.stdout}{done.stderr}"


@pytest.mark.slow  # test_six_commands.py has the first, tests/verl what the others ask for
@pytest.mark.parametrize("arguments", RUNS)
def test_a_run(converted: Prepared, tmp_path: Path, arguments: str) -> None:
    """The small job with the arguments of a page."""
    (tmp_path / "my_reward.py").write_text(my_reward(), encoding="utf-8")
    steps, is_right = RUNS[arguments]
    more = [word.replace("=my_reward.py", f"={tmp_path}/my_reward.py") for word in shlex.split(arguments)]
    run = _finished(converted, tmp_path / "run", steps, *more)
    assert is_right(run)
    assert read_metrics(run)[-1]["step"] == steps


@pytest.mark.slow  # tests/mindspeed_llm holds what each conversion gives
def test_conversions_of_the_base_model(prepared: Prepared, tmp_path: Path) -> None:
    """docs/weights.md's commands that fit a small model: each reads what the one before has written."""
    page = (ROOT / "docs" / "weights.md").read_text(encoding="utf-8")
    folder = prepared.model_path
    for name, is_next in (("fp8_cast_bf16", True), ("fp8_quantize", True), ("plain_config", False),
                          ("convert_ckpt_torch_dist", True)):  # fmt: skip
        [line] = re.findall(rf"^    (python -m mindspeed_llm\.{name} .*)$", page, re.MULTILINE)
        _, _, *words = shlex.split(line)
        assert words.count("DIR") == 2, line
        words[words.index("DIR")] = str(folder)
        words[words.index("DIR")] = str(tmp_path / name)
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / name).is_dir()
        folder = tmp_path / name if is_next else folder


@pytest.mark.slow
def test_runs_that_start_from_another(converted: Prepared, uninterrupted: Job, tmp_path: Path) -> None:
    """docs/debugging.md's training on saved rollouts, and its resume from a checkpoint that the default run keeps."""
    text = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    [records] = re.findall(rf"trainer.train_only={OUTPUT}/(\S+)", text)
    run = _finished(
        converted,
        tmp_path / "again",
        STEPS,
        override("trainer.train_only", uninterrupted.output_dir / records),
        "--no-plan",
    )
    mine, expected = (read_metrics(folder)[-1] for folder in (run, uninterrupted.output_dir))
    assert mine["actor/grad_norm"] == expected["actor/grad_norm"]

    [(mode, path)] = re.findall(rf"trainer.resume_mode=(\S+) trainer.resume_from_path={OUTPUT}/checkpoints/(\S+)", text)
    assert mode == "resume_path" and int(path.removeprefix("global_step_")) in _kept_by_the_default_run()
    copy = Path(shutil.copytree(uninterrupted.output_dir, tmp_path / "resumed", symlinks=True))
    start = copy / "checkpoints" / f"global_step_{STEPS - 1}"
    arguments = (f"trainer.resume_mode={mode}", override("trainer.resume_from_path", start))
    _finished(uninterrupted.prepared, copy, STEPS, *arguments)
    assert read_metrics(copy)[-1]["actor/grad_norm"] == expected["actor/grad_norm"]


def _kept_by_the_default_run() -> list[int]:
    """The steps whose checkpoints ``r1_zero_tiny`` leaves."""
    text = (ROOT / "recipes" / "r1_zero" / "config" / "r1_zero_tiny.yaml").read_text(encoding="utf-8")
    steps, every, kept = (
        int(re.findall(rf"^  {key}: (\d+)", text, re.MULTILINE)[0])
        for key in ("total_training_steps", "save_freq", "max_actor_ckpt_to_keep")
    )
    return list(range(every, steps + 1, every))[-kept:]


def _finished(prepared: Prepared, run: Path, steps: int, *arguments: str) -> Path:
    environment = prepared.environment(run, STEPS=steps, NNODES=1)  # as the page of schedules has it
    with Command(run.with_suffix(".log"), environment, [*prepared.arguments, *arguments, "--no-plan"]) as command:
        assert command.wait() == 0, command.tail()
    return run
