"""Reward managers that grade one sample at a time: what becomes of their answers, and what is refused before a run."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verl.bandit import write_inputs
from tests.verl.test_reward_managers import Words, batch, correct, slowly
from verl.experimental.reward_loop.reward_manager import RewardManagerBase, get_reward_manager_cls
from verl.protocol import DataProto
from verl.trainer.config import load_config, validate_config
from verl.trainer.config.override_text import override
from verl.trainer.ppo.reward import compute_reward, load_reward_manager
from verl.trainer.ppo.reward_process import PendingRewards, _ManagerProcess, manager_batch
from verl.trainer.ppo.ungraded import UngradedLimit
from verl.trainer.preflight import reward_manager_problems
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.reward_manager import MANAGERS
from verl.workers.reward_manager.pooled import grading_jobs
from verl.workers.reward_manager.sample_wise import GRADER_ERROR, SampleWiseManager, grades_samples

FILE = """
import inspect

from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase


@register("user_customized")
class Mine(RewardManagerBase):
    "As upstream's page has it, and as its own managers are made."

    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        self.scale = config.reward.reward_kwargs.get("scale", 1.0)
        assert reward_router_address is None and config.data.max_response_length > 0
        assert config.reward["reward_manager"].name == config.reward_model.reward_manager

    async def run_single(self, data):
        assert len(data) == 1
        item = data[-1]
        ids = item.batch["responses"]
        length = int(item.batch["attention_mask"][-ids.shape[-1] :].sum())
        text = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(ids[:length].tolist()))
        given = {
            "data_source": item.non_tensor_batch["data_source"],
            "solution_str": text,
            "ground_truth": item.non_tensor_batch["reward_model"]["ground_truth"],
            "extra_info": item.non_tensor_batch.get("extra_info", {}),
        }
        if self.is_async_reward_score:
            result = await self.compute_score(**given)
        else:
            result = await self.loop.run_in_executor(None, lambda: self.compute_score(**given))
        score = result["score"] if isinstance(result, dict) else result
        extra = result if isinstance(result, dict) else {"acc": result}
        return {"reward_score": self.scale * score, "reward_extra_info": {**extra, "text": text}}


class NotMade(RewardManagerBase):
    pass


class Asks(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, threshold):
        super().__init__(config, tokenizer, compute_score)

    async def run_single(self):
        return {}


def number():
    return 1
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(MANAGERS, "entries", dict(MANAGERS.entries))
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def _by_file(file: Path | str, name: str, *more: str) -> Any:
    """Upstream's keys; its ``reward.reward_manager.name`` is the class."""
    given = ["reward.reward_manager.source=importlib", override("reward.reward_manager.module.path", file), *more]
    return load_config([*given, f"reward.reward_manager.name={name}"])


@pytest.mark.parametrize("function", ["correct", "slowly"])
def test_a_manager_of_upstreams_form_grades_a_batch(file: Path, function: str) -> None:
    """From a file of the config, with the reward function that the config names, plain and async."""
    functions = f"custom_reward_function={{path:{Path(__file__).with_name('test_reward_managers.py')},name:{function}}}"
    config = _by_file(file, "Mine", functions, "+reward_model.reward_kwargs.scale=0.5")
    assert not config.reward_model.is_pooled
    assert [problem for problem in validate_config(config) if "reward_m" in problem] == []
    assert reward_manager_problems(config) == []
    manager = load_reward_manager(config, Words(), 0, **config.reward_model.reward_kwargs)
    rewards, extra = compute_reward(batch(), manager)
    scores = [1.0, 0.0] if function == "correct" else [3.0, 1.0]
    assert rewards.tolist() == [[0, 0.5 * scores[0], 0], [0.5 * scores[1], 0, 0]] and extra["text"] == ["7 8", "9"]
    assert extra["score"] == rewards.sum(-1).tolist() and (function == "correct" or extra["acc"] == scores)
    assert torch.equal(manager(batch()), rewards)  # type: ignore[arg-type]


def test_it_can_be_registered_and_named_with_older_keys_and_a_module(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = override("actor_rollout_ref.model.external_lib", file)
    registered = load_config([library, "reward_model.reward_manager=user_customized"])
    assert [problem for problem in validate_config(registered) if "reward_m" in problem] == []
    assert get_reward_manager_cls("user_customized").__name__ == "Mine" and reward_manager_problems(registered) == []
    monkeypatch.syspath_prepend(str(file.parent))
    older = ["reward_loop_source=importlib", "reward_loop_module_path=pkg://mine", "reward_loop_class_name=Mine"]
    section = ["source=importlib", "name=Mine", "module.path=pkg://mine", "module.name=custom"]  # v0.7.0's own, too
    MANAGERS.entries.pop("user_customized")
    for given in (
        [f"+reward_model.{key}" for key in older],
        ["+reward_model.use_reward_loop=True", *(f"+reward_manager.{key}" for key in section)],
    ):
        config = load_config(given)
        assert config.reward_model.manager_spec is not None and reward_manager_problems(config) == []


def _answers(*answers: Any, most: int = 16) -> tuple[list[list[float]], dict[str, Any]]:
    class Answers:
        def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None:
            self.left = list(answers)

        def run_single(self, data: DataProto) -> Any:
            answer = self.left.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer

    manager = SampleWiseManager(Answers, dict.fromkeys(("config", "tokenizer", "compute_score")), most)
    rewards, extra = compute_reward(batch(), manager)
    return rewards.tolist(), extra


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"score": 1.0}, "it returned {'score': 1.0}; expected a dict with reward_score"),
        (0.5, "it returned 0.5; expected a dict with reward_score"),
        (None, "it returned None; expected a dict"),
        ({"reward_score": float("nan")}, "numbers that are not finite: ['score']"),
        ({"reward_score": 1, "reward_extra_info": {"a": float("inf")}}, "numbers that are not finite: ['a']"),
        ({"reward_score": [1.0]}, "TypeError"),
        ({"reward_score": None}, "TypeError"),
        ({"reward_score": 1.0, "reward_extra_info": 3}, "TypeError"),
        (KeyError("no such thing"), "KeyError: 'no such thing'"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_an_answer_without_a_grade_is_named_and_the_others_stay(answer: Any, problem: str) -> None:
    rewards, extra = _answers({"reward_score": 2, "reward_extra_info": {"a": True, "b": "x"}}, answer)
    assert rewards == [[0, 2, 0], [0, 0, 0]]
    assert (extra["a"], extra["b"], extra[GRADER_ERROR][0]) == ([1.0, None], ["x", None], None)
    assert extra[GRADER_ERROR][1].startswith("run_single of sample 1: ") and problem in extra[GRADER_ERROR][1]


def test_calls_wait_side_by_side_up_to_the_limit() -> None:
    class Waits(RewardManagerBase):
        now = most = 0

        async def run_single(self, data: DataProto) -> dict[str, Any]:
            Waits.now += 1
            Waits.most = max(Waits.most, Waits.now)
            await asyncio.sleep(0.05)
            Waits.now -= 1
            return {"reward_score": float(data.non_tensor_batch["number"][0])}

    data = DataProto.concat([batch()] * 10)
    data.non_tensor_batch["number"] = torch.arange(20).numpy()
    for limit in (16, 3):
        Waits.most = 0
        manager = SampleWiseManager(Waits, dict.fromkeys(("config", "tokenizer", "compute_score")), limit)
        started = time.monotonic()
        rewards, _ = compute_reward(data, manager)
        assert Waits.most == limit and time.monotonic() - started < 20 * 0.05
        assert rewards.sum(-1).tolist() == list(range(20)), "in the order of the rows"


@pytest.mark.parametrize(
    ("file_name", "name", "problem"),
    [
        ("absent.py", "Mine", "absent.py does not exist"),
        ("mine.py", "Yours", "defines no 'Yours'"),
        ("mine.py", "naive", "defines no 'naive'"),
        ("mine.py", "number", "is no class"),
        ("mine.py", "NotMade", "must have the method __call__(self, data, return_dict=False), or run_single("),
        ("mine.py", "Asks", "is made with the arguments config, tokenizer, compute_score; it must take them"),
        ("pkg://no_such_package", "Mine", "pkg://no_such_package cannot be imported"),
    ],
)
def test_what_cannot_grade_is_refused_before_a_run(file: Path, file_name: str, name: str, problem: str) -> None:
    path = file_name if file_name.startswith("pkg:") else file.with_name(file_name)
    problems = reward_manager_problems(_by_file(path, name))
    assert problem in problems[0] and problems[0].startswith("reward_model.manager_path=")
    assert len(problems) == (2 if name == "Asks" else 1)


def test_a_source_without_a_file_is_refused() -> None:
    config = load_config(["reward.reward_manager.source=importlib"])
    assert "reward_model.manager_source is importlib, but manager_path, the file of" in "\n".join(
        validate_config(config)
    )
    assert reward_manager_problems(config) == []
    assert "expected one of register, importlib" in "\n".join(
        validate_config(load_config(["reward_model.manager_source=file"]))
    )


def test_its_process_grades_what_a_step_sampled(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but Ray: files by paths that count from the driver's folder, the run's batch, metrics and ledger lines."""
    write_inputs(file.parent)
    file.with_name("graders.py").write_text(
        "async def odd(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1.0, 'index': extra_info['index']} if extra_info['index'] else {}['no grade']\n"
    )
    monkeypatch.chdir(file.parent.parent)  # and it is this folder again after the test
    folder = str(file.parent)
    config = _by_file(
        "mine.py", "Mine", "custom_reward_function={path:graders.py,name:odd}", "data.max_response_length=2"
    )
    model = replace(config.actor_rollout_ref.model, path=str(file.parent / "model"))
    config = replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, model=model))
    process = _ManagerProcess(config, folder)
    tokenizer = hf_tokenizer(model.path)
    mask = torch.tensor([[1, 1], [1, 0]])
    columns = {
        "prompt_text": ["digit 1", "digit 2"],
        "data_source": ["a", "b"],
        "extra_info": [{"index": 0}, {"index": 3}],
    }
    columns |= {"reward_model": [{"ground_truth": "1"}] * 2, "uid": ["x", "y"]}
    data = DataProto.from_dict({"responses": torch.tensor([[5, 6], [7, 0]]), "response_mask": mask}, columns)
    rewards, extra = process.score(manager_batch(data, tokenizer), False)
    rows = list(grading_jobs(data, ["5 6", "7"]))
    found = PendingRewards(None, config, rows, (2, 2), time.monotonic())._scores(rewards, extra)
    assert found.token_level_scores.tolist() == [[0, 0], [1, 0]]
    assert found.parts["ungraded"].tolist() == found.parts["grader_error"].tolist() == [1, 0]
    assert found.parts["index"].tolist() == [0, 3] and found.parts["score"].tolist() == [0, 1]
    failed, graded = (sample.result for sample in found.samples)
    assert (failed.status, failed.error) == ("error", "run_single of sample 0: KeyError: 'no grade'")
    assert graded.is_graded and graded.function is not None and graded.function.name == "Mine" and graded.parse["text"]
    with pytest.raises(ValueError, match=r"1 of 2 .* failed in Mine of .*mine.py: error: run_single of sample 0"):
        UngradedLimit(0.4, 2).check(found.samples, "a step")


def test_a_class_of_both_forms_is_called_with_batches() -> None:
    class Both(RewardManagerBase):
        async def run_single(self, data: DataProto) -> dict[str, Any]:
            return {}

        def __call__(self, data: DataProto, return_dict: bool = False) -> Any: ...

    assert not grades_samples(Both) and grades_samples(type("One", (), {"run_single": correct, "x": slowly}))


def test_a_reward_function_may_be_in_a_module(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.utils.reward_score.functions import load_reward_function
    from verl.utils.reward_score.static_check import file_problem

    file.with_name("my_rewards.py").write_text("def grade(data_source, solution_str, ground_truth, extra_info): ...\n")
    monkeypatch.syspath_prepend(str(file.parent))
    spec = load_config(["custom_reward_function={path:'pkg://my_rewards',name:grade}"]).custom_reward_function.default
    assert spec is not None and file_problem(spec) is None and load_reward_function(spec).is_by_name
