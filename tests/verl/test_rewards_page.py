"""What docs/rewards.md tells the reader to write and run works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.pages import users_environment
from tools.regrade import EXIT_DIFFERENT, main
from verl.protocol import DataProto
from verl.trainer.config import load_config, validate_config
from verl.trainer.ppo.reward import compute_reward, load_reward_manager
from verl.trainer.ppo.reward_ledger import RewardLedger
from verl.trainer.preflight import reward_manager_problems
from verl.utils.import_utils import import_external_libs
from verl.utils.reward_score.code_answers import compute_score
from verl.utils.reward_score.default import DEFAULT_SOURCES
from verl.utils.reward_score.scoring_pool import ScoringJob, ScoringPool
from verl.workers.config import CustomRewardFunctionConfig
from verl.workers.reward_manager import MANAGERS, GradedSample

ROOT = Path(__file__).resolve().parents[2]
RESPONSE = "<think>40 + 2</think><answer>\\boxed{{{}}}</answer>"  # as the default run writes them
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def _commands(start: str) -> list[list[str]]:
    return [shlex.split(line) for line in re.findall(rf"^    ({start}.*)$", PAGE, flags=re.MULTILINE)]


def test_the_manager_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MANAGERS, "entries", dict(MANAGERS.entries))
    _, manager = _blocks("python")
    (tmp_path / "my_manager.py").write_text(manager)
    [line] = re.findall(r"^    (actor_rollout_ref.model.external_lib=.*)$", PAGE, flags=re.MULTILINE)
    config = load_config(shlex.split(line.replace("my_manager.py", str(tmp_path / "my_manager.py"))))
    import_external_libs(config.actor_rollout_ref.model.external_lib)
    assert reward_manager_problems(config) == []
    made = load_reward_manager(config, None, 0, **config.reward_model.reward_kwargs)
    mask = (torch.arange(120) < torch.tensor([[3], [110]])).long()
    data = DataProto.from_dict({"responses": torch.ones(2, 120, dtype=torch.long), "response_mask": mask})
    rewards, extra = compute_reward(data, made)
    assert (rewards.sum(-1).tolist(), rewards[0, 2], extra) == ([0.5, 0.0], 0.5, {"short": [True, False]})


@pytest.mark.timeout(60)
def test_the_function_grades_and_its_ledger_is_graded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    function, _ = _blocks("python")
    Path("my_reward.py").write_text(function)
    [command] = _commands("bash recipes/r1_zero/ray_start_grpo_npu.sh")
    config = load_config(command[2:]).custom_reward_function
    assert config.default is not None and config.default.kwargs == {"bonus": 0.1}
    pool = ScoringPool(config.default, num_workers=1, timeout_s=10.0)
    jobs = [ScoringJob("s", answer, "42", {}) for answer in (RESPONSE.format("42"), RESPONSE.format("41"), "42")]
    samples = [
        GradedSample("3-0", "?", job, future.result()) for job, future in zip(jobs, pool.submit(jobs), strict=True)
    ]
    pool.close()
    assert [sample.result.parts["score"] for sample in samples] == [1.1, 0.1, 0.0]
    ledger = RewardLedger("outputs/r1_zero", "texts")
    ledger.add(samples)
    ledger.write(3)
    same, other = _commands("python -m tools.regrade")
    assert main(same[3:]) == 0
    assert main(other[3:]) == EXIT_DIFFERENT
    assert "step_3.jsonl:1 uid 3-0 s: score 1.1 -> 1.5" in capsys.readouterr().out


def test_the_sections_are_sections_and_each_key_exists() -> None:
    for block in _blocks("yaml"):
        section = OmegaConf.to_container(OmegaConf.create(block))["custom_reward_function"]  # type: ignore[index,call-overload]
        config = CustomRewardFunctionConfig(**section)
        assert config.problems("custom_reward_function") == []
        for spec in config.sources.values():
            if spec.path.endswith("code_answers.py"):
                assert Path(spec.path).is_file()
    keys = sorted(set(re.findall(r"`(reward_model\.[a-z_]+)", PAGE)))
    values = {
        "reward_model.ledger": "off",
        "reward_model.reward_manager": "naive",
        "reward_model.max_ungraded_ratio": 1,
    }
    problems = validate_config(load_config([f"{key}={values.get(key, 3)}" for key in keys]))
    assert keys and not [problem for problem in problems if "reward_model" in problem]
    assert all(f"`{source}`" in PAGE for source in DEFAULT_SOURCES)


def test_the_tests_of_a_program_have_the_form_that_is_shown() -> None:
    [truth] = _blocks("json")
    assert compute_score("code", "```\nprint(int(input()) ** 2)\n```", truth)["score"] == 1.0


def test_the_sandbox_says_what_it_has() -> None:
    [command] = _commands("python -c")
    shown = subprocess.run(
        [sys.executable, *command[1:]], cwd=ROOT, env=users_environment(), capture_output=True, text=True, timeout=60
    )
    assert "seccomp" in shown.stdout, shown.stderr
