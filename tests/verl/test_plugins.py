"""What a user brings in files of their own runs in a job: two steps each, with the smallest policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.verl.bandit import RIGHT_DIGIT, bandit_config, run_bandit, write_inputs
from verl.trainer.config import validate_config
from verl.trainer.preflight import reward_problems
from verl.workers.reward_manager import MANAGERS

STEPS = ("trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.save_last=False", "trainer.export_hf=False")
REWARDS = """
import asyncio

def single(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    return {"score": scale * (solution_str == ground_truth), "seen": 1.0, "source": data_source}

async def waiting(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    await asyncio.sleep(0.001)
    return scale * (solution_str == ground_truth)

def batched(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    return [scale * (text == truth) for text, truth in zip(solution_strs, ground_truths)]
"""
MANAGER = """
from collections import defaultdict

import torch

from verl.protocol import DataProto
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


@register("mine")
class MyRewardManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", **reward_kwargs):
        self.tokenizer, self.num_examine, self.compute_score = tokenizer, num_examine, compute_score
        self.reward_fn_key, self.factor = reward_fn_key, reward_kwargs["factor"]

    def __call__(self, data: DataProto, return_dict=False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            prompt_ids = item.batch["prompts"]
            width = prompt_ids.shape[-1]
            num_prompt = item.batch["attention_mask"][:width].sum()
            length = item.batch["attention_mask"][width:].sum()
            prompt = self.tokenizer.decode(prompt_ids[-num_prompt:])
            answer = self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
            score = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=answer,
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info", {}),
            )
            rewards[i, length - 1] = self.factor * score["score"]
            extra["asked"].append("digit" in prompt)
            extra["answer"].append(answer)
            extra["examined"].append(self.num_examine)
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards
"""
FILTER = """
def keeps_mixed(config, group):
    return 0 < group.rewards.mean() < config.reward_model.num_workers
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(MANAGERS, "_entries", dict(MANAGERS._entries))
    write_inputs(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "manager.py").write_text(MANAGER)
    (tmp_path / "filters.py").write_text(FILTER)
    return tmp_path


def _run(root: Path, *overrides: str) -> list[dict[str, Any]]:
    """Two steps and a validation before and after; the metrics of each."""
    config = bandit_config(root, *STEPS, *overrides)
    assert validate_config_of_plugins(config) == []
    run_bandit(config)
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def validate_config_of_plugins(config: Any) -> list[str]:
    """The checks before a start, without those of the model, which the smallest policy does not have."""
    return [p for p in validate_config(config) if "reward_model" in p or "external_lib" in p] + [
        *reward_problems(config)
    ]


def _ledger(root: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "reward_ledger" / name).read_text().splitlines()]


MINE = ("reward_model.reward_manager=mine", "+reward_model.reward_kwargs.factor=0.5")


@pytest.mark.timeout(240)
def test_a_users_reward_manager_and_filter(local_ray: None, root: Path) -> None:
    """The manager runs in a process of its own, which imports external_lib, with the user's reward function."""
    records = _run(
        root,
        f"actor_rollout_ref.model.external_lib={root / 'manager.py'}",
        *MINE,
        f"custom_reward_function={{path:{root / 'rewards.py'},name:single,reward_kwargs:{{scale:2.0}}}}",
        f"algorithm.filter_groups={{enable:True,filter_path:{root / 'filters.py'}:keeps_mixed}}",
        "data.gen_batch_size=4",
    )
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records[1:]:
        assert (record["critic/score/min"], record["critic/score/max"]) == (0.0, 1.0), "0.5 of a score of 2"
        assert record["reward/asked"] == 1.0 and record["reward/examined"] == 0.0
    assert records[0]["val/examined"] == 1.0
    lines = _ledger(root, "step_1.jsonl")
    assert {line["grader"]["name"] for line in lines} == {"MyRewardManager"}
    assert all((line["parse"]["answer"] == str(RIGHT_DIGIT)) == (line["score"] == 1.0) for line in lines)


@pytest.mark.slow  # tests/verl/test_reward_functions.py calls functions of each sort, the test above runs one
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "manager"), [("single", "dapo"), ("waiting", "prime"), ("batched", "batch")])
def test_a_users_reward_function(local_ray: None, root: Path, name: str, manager: str) -> None:
    """Each sort of function under a manager; dapo takes a penalty of 0.5 from answers of the full length."""
    penalty = "overlong_buffer_cfg:{enable:True,len:1,penalty_factor:0.5,log:True},max_resp_len:2"
    records = _run(
        root,
        f"custom_reward_function={{path:{root / 'rewards.py'},name:{name},reward_kwargs:{{scale:2.0}}}}",
        f"reward_model.reward_manager={manager}",
        *([f"reward_model.reward_kwargs={{{penalty}}}"] if manager == "dapo" else []),
    )
    penalised = -0.5 if manager == "dapo" else 0.0
    assert {record["critic/score/min"] for record in records[1:]} == {penalised}
    assert max(record["critic/score/max"] for record in records[1:]) == 2.0 + penalised
    if manager == "dapo":
        assert records[1]["reward/overlong_reward"] == -0.5 and records[1]["reward/overlong"] == 1.0
        assert records[1]["reward/acc"] == records[1]["reward/score"] and records[1]["reward/seen"] == 1.0


@pytest.mark.slow  # as above
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("compute_score(", "no_such_function("), "failed on 32 samples:(.|\n)*no_such_function"),
        (('"reward_tensor": rewards', '"reward_tensor": rewards[:1]'), "returned \\(1, 2\\); expected a tensor"),
    ],
)
def test_a_manager_that_fails_is_named(local_ray: None, root: Path, change: tuple[str, str], problem: str) -> None:
    (root / "manager.py").write_text(MANAGER.replace(*change))
    function = f"custom_reward_function={{path:{root / 'rewards.py'},name:single}}"
    library = f"actor_rollout_ref.model.external_lib={root / 'manager.py'}"
    with pytest.raises(ValueError, match=f"the reward manager 'mine' {problem}"):
        _run(root, library, *MINE, function, "trainer.val_before_train=False")
