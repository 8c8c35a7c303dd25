"""Reward managers by upstream's names and signatures: what each returns, by hand; what the config loads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from omegaconf import OmegaConf

from tests.verl.upstream_api import module_differences
from verl.protocol import DataProto
from verl.trainer.config import load_config
from verl.trainer.config.override_text import override
from verl.trainer.ppo.reward import compute_reward, get_custom_reward_fn, load_reward_manager
from verl.trainer.ppo.reward_process import manager_batch, reward_problem
from verl.trainer.preflight import reward_manager_problems
from verl.workers.reward_manager import (
    AbstractRewardManager,
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    get_reward_manager_cls,
    register,
)


class Words:
    """A tokenizer of numbers: token 7 is the text "7", and 0 is padding."""

    pad_token_id = 0
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def decode(self, ids: list[int], **given: bool) -> str:
        return " ".join(str(token) for token in ids)

    def batch_decode(self, rows: list[list[int]], **given: bool) -> list[str]:
        return [self.decode(row) for row in rows]

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def batch() -> DataProto:
    """Prompts "5" and "3 4" with the responses "7 8" and "9"; the right answers are 7 8 and 1."""
    tensors = {
        "prompts": torch.tensor([[0, 5], [3, 4]]),
        "responses": torch.tensor([[7, 8, 0], [9, 0, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]]),
    }
    columns = {
        "data_source": ["a", "b"],
        "reward_model": [{"ground_truth": "7 8"}, {"ground_truth": "1"}],
        "extra_info": [{"level": 1}, {"level": 2}],
    }
    return DataProto.from_dict(tensors, columns)


def correct(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": float(solution_str == ground_truth), "level": extra_info["level"], "read": solution_str}


async def slowly(solution_str: str, **given: Any) -> float:
    await asyncio.sleep(0)
    return float(len(solution_str))


PROMISED = {
    "verl.trainer.ppo.reward": ("get_custom_reward_fn", "load_reward_manager", "compute_reward"),
    "verl.workers.reward_manager": ("register", "get_reward_manager_cls", "PrimeRewardManager"),
    "verl.workers.reward_manager.abstract": ("RawRewardFn", "AbstractRewardManager"),
    "verl.workers.reward_manager.registry": ("register", "get_reward_manager_cls"),
    "verl.workers.reward_manager.naive": ("NaiveRewardManager",),
    "verl.workers.reward_manager.batch": ("BatchRewardManager",),
    "verl.workers.reward_manager.dapo": ("DAPORewardManager",),
    "verl.utils.dataset": ("RLHFDataset",),
    "verl.utils.dataset.rl_dataset": ("RLHFDataset", "collate_fn"),
    "verl.experimental.dataset.sampler": ("AbstractSampler", "AbstractCurriculumSampler"),
    "verl.utils.import_utils": ("import_external_libs", "load_extern_type"),
}


@pytest.mark.parametrize("name", PROMISED)
def test_the_names_of_plug_ins_have_upstreams_signatures(name: str) -> None:
    assert module_differences(name, *PROMISED[name]) == []


def test_naive_puts_the_score_on_the_last_token() -> None:
    manager = NaiveRewardManager(Words(), 1, correct)
    found = manager(batch(), return_dict=True)
    assert isinstance(found, dict)
    assert found["reward_tensor"].tolist() == [[0, 1, 0], [0, 0, 0]]
    assert found["reward_extra_info"] == {"score": [1.0, 0.0], "level": [1, 2], "read": ["7 8", "9"]}
    rewards = NaiveRewardManager(Words(), 0, slowly)(batch())
    assert isinstance(rewards, torch.Tensor) and rewards.tolist() == [[0, 3, 0], [1, 0, 0]]


def test_batch_is_one_call() -> None:
    calls = []

    def compute_score(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, scale: int) -> Any:
        calls.append((data_sources, ground_truths, extra_infos))
        return [{"score": scale * len(text)} for text in solution_strs]

    data = batch()
    rewards, extra = compute_reward(data, BatchRewardManager(Words(), 0, compute_score, scale=2))
    assert calls == [(["a", "b"], ["7 8", "1"], [{"level": 1, "prompt_end": "5"}, {"level": 2, "prompt_end": "3 4"}])]
    assert rewards.tolist() == [[0, 6, 0], [2, 0, 0]] and extra == {"score": [6, 2]}
    assert data.batch["acc"].tolist() == [6, 2]


@pytest.mark.parametrize("manager", [NaiveRewardManager, PrimeRewardManager, DAPORewardManager, BatchRewardManager])
def test_async_functions_have_one_loop_in_every_manager(manager: Any) -> None:
    loops = set()

    async def one(solution_str: str, **given: Any) -> float:
        loops.add(asyncio.get_running_loop())
        return float(len(solution_str))

    async def batched(solution_strs: list[str], **given: Any) -> list[float]:
        return await asyncio.gather(*(one(text) for text in solution_strs))

    for _ in range(2):
        rewards = manager(Words(), 0, batched if manager is BatchRewardManager else one)(batch())
        assert rewards.tolist() == [[0, 3, 0], [1, 0, 0]]
    assert len(loops) == 1, "a client of the function's module belongs to one loop"


def test_prime_gives_zero_where_the_grader_fails() -> None:
    def compute_score(solution_str: str, **given: Any) -> float:
        if solution_str == "9":
            raise KeyError("no grade")
        return 0.5

    rewards = PrimeRewardManager(Words(), 0, compute_score)(batch())
    assert isinstance(rewards, torch.Tensor) and rewards.tolist() == [[0, 0.5, 0], [0, 0, 0]]


def test_dapo_adds_the_papers_penalty() -> None:
    """L_max 3 and a buffer of 2: one token is free, the second costs half of the factor."""
    buffer = {"enable": True, "len": 2, "penalty_factor": 0.5, "log": True}
    manager = DAPORewardManager(Words(), 0, lambda **given: 1.0, max_resp_len=3, overlong_buffer_cfg=buffer)
    rewards, extra = compute_reward(batch(), manager)
    assert rewards.tolist() == [[0, 0.75, 0], [1, 0, 0]]
    assert extra == {"acc": [1.0, 1.0], "overlong_reward": [-0.25, 0.0], "overlong": [True, False]}
    attributes = OmegaConf.create({**buffer, "enable": False})
    plain = DAPORewardManager(Words(), 0, lambda **given: 1.0, overlong_buffer_cfg=attributes)
    assert compute_reward(batch(), plain)[0].sum() == 2
    with pytest.raises(ValueError, match="len is 2 and max_resp_len None; expected a buffer of 1 to max_resp_len"):
        DAPORewardManager(Words(), 0, overlong_buffer_cfg=buffer)


def test_scores_that_a_batch_brings_are_its_rewards() -> None:
    data = batch()
    data.batch["rm_scores"] = torch.ones(2, 3)
    assert torch.equal(compute_reward(data, NaiveRewardManager(Words(), 0, correct))[0], torch.ones(2, 3))


def test_what_the_config_names_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def grade(data_source, solution_str, ground_truth, extra_info=None, bonus=0):\n    return 1 + bonus\n"
        "def other(data_source, *given, **named):\n    return data_source\n"
    )
    named = (override("custom_reward_function.path", file), "custom_reward_function.name=grade")
    config = load_config([*named, "+custom_reward_function.reward_kwargs.bonus=2", "reward_model.reward_manager=dapo"])
    manager = load_reward_manager(config, Words(), num_examine=1, max_resp_len=9)
    assert isinstance(manager, DAPORewardManager) and manager.max_resp_len == 9 and manager.num_examine == 1
    assert compute_reward(batch(), manager)[0].sum() == 6
    assert get_custom_reward_fn(load_config()) is None
    sources = f"custom_reward_function.by_data_source={{b:{{path:{file},name:other}}}}"
    chosen = get_custom_reward_fn(load_config([*named, sources]))
    assert chosen is not None and (chosen("b", "x", "y"), chosen("a", "x", "y")) == ("b", 1)


def test_a_users_class_is_looked_at_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.reward_manager import MANAGERS

    monkeypatch.setattr(MANAGERS, "entries", dict(MANAGERS.entries))

    @register("by_level")
    class ByLevel(AbstractRewardManager):
        def __init__(
            self, tokenizer: Any, num_examine: int, compute_score: Any, reward_fn_key: str, scale: int
        ) -> None:
            self.scale = scale

        def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
            return torch.ones(2, 3) * self.scale

    @register("old")
    class Old:
        def __init__(self, tokenizer: Any) -> None: ...

    assert get_reward_manager_cls("by_level") is ByLevel
    names = [f"reward_model.reward_manager={name}" for name in ("by_level", "old")]
    scaled = load_config([names[0], "+reward_model.reward_kwargs.scale=2"])
    assert reward_manager_problems(scaled) == []
    assert "it must take them" in reward_manager_problems(load_config([names[0]]))[0]
    made, called = reward_manager_problems(load_config([names[1]]))
    assert "it must take them" in made and "must have the method __call__(self, data, return_dict" in called
    assert compute_reward(batch(), load_reward_manager(scaled, Words(), 0, scale=2))[0].sum() == 12


def test_the_batch_of_a_run_as_managers_know_it() -> None:
    columns = {"prompt_text": ["5", "3 4"], "data_source": ["a", "b"]}
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    given = DataProto.from_dict({"responses": batch().batch["responses"], "response_mask": mask}, columns)
    made = manager_batch(given, Words())  # type: ignore[arg-type]
    for key in ("prompts", "attention_mask"):
        assert made.batch[key].tolist() == batch().batch[key].tolist()
    assert made.batch["input_ids"].tolist() == [[0, 5, 7, 8, 0], [3, 4, 9, 0, 0]]
    assert made.batch["position_ids"].tolist() == [[0, 0, 1, 2, 2], [0, 1, 2, 2, 2]]


@pytest.mark.parametrize(
    ("rewards", "extra", "problem"),
    [
        (torch.zeros(2, 3), {"a": [1, 2], "b": ["x", None]}, None),
        (torch.zeros(2), {}, r"(2,); expected a tensor (2, 3)"),
        ([0.0, 1.0], {}, "list; expected a tensor (2, 3)"),
        (torch.tensor([[0, 0, float("nan")], [0, 0, 0]]), {}, "not finite, in 1 samples"),
        (torch.zeros(2, 3), {"a": [1]}, "1 values of 'a' in reward_extra_info; expected one for each of 2 samples"),
        (torch.zeros(2, 3), {"a": [1, float("inf")]}, "values of 'a' in reward_extra_info that are not finite"),
    ],
)
def test_an_answer_that_cannot_be_used_is_named(rewards: Any, extra: dict[str, Any], problem: str | None) -> None:
    found = reward_problem(rewards, extra, (2, 3))
    assert found is None if problem is None else problem in str(found)
