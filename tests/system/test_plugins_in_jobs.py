"""All kinds of plug-ins together train the tiny model: files of a user, of which each process imports what it needs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.system.command import read_metrics
from tests.system.in_process import fit, in_process_config
from tests.system.jobs import Prepared
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.override_text import override
from verl.trainer.preflight import preflight_problems

ROOT = Path(__file__).resolve().parents[2]
RECORD = """
import os, pathlib, sys
pathlib.Path({folder!r}, str(os.getpid())).write_text(sys.argv[0] if sys.argv else "")
"""
DATA = """
from verl.experimental.dataset.sampler import AbstractSampler
from verl.utils.dataset.rl_dataset import RLHFDataset


class Numbered(RLHFDataset):
    def __getitem__(self, item):
        return {**super().__getitem__(item), "number": item}


class Backwards(AbstractSampler):
    def __init__(self, data_source, data_config):
        self.size = len(data_source)

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))
"""
MANAGER = """
import torch

from verl import DataProto
from verl.workers.reward_manager import NaiveRewardManager, register


@register("numbered")
class NumberedRewardManager(NaiveRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", scale=1.0):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.scale = scale

    def __call__(self, data: DataProto, return_dict=False):
        found = super().__call__(data, return_dict=True)
        noise = torch.tensor([len(str(n)) + i % 3 for i, n in enumerate(data.non_tensor_batch["number"])])
        lengths = data.batch["response_mask"].sum(-1)
        found["reward_tensor"][torch.arange(len(data)), lengths - 1] += self.scale * noise
        found["reward_extra_info"]["number"] = list(data.non_tensor_batch["number"])
        return found if return_dict else found["reward_tensor"]
"""

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("registries_as_before")]


def _two_steps(config: PPOTrainerConfig, folder: Path) -> list[dict[str, float]]:
    """The metrics of the job's two steps, each of which has learned something."""
    assert preflight_problems(config) == []
    fit(config)
    rows = [row for row in read_metrics(folder) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 and math.isfinite(row["actor/pg_loss"]) for row in rows)
    return rows


@pytest.mark.slow  # tests/verl/test_plugins.py has each kind with a policy of ten logits
def test_plug_ins_together(local_ray: None, converted: Prepared, tmp_path: Path) -> None:
    """Data set, sampler, estimator, policy loss and manager; two ranks, the driver and the manager's process import."""
    seen = tmp_path / "seen"
    seen.mkdir()
    page = (ROOT / "docs" / "algorithms.md").read_text()
    [algorithms] = re.findall(r"```python\n# my_algorithms.py\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "library.py").write_text(RECORD.format(folder=str(seen)) + algorithms + MANAGER)
    (tmp_path / "data.py").write_text(DATA)
    config = in_process_config(
        converted,
        tmp_path,
        2,
        2,
        override("actor_rollout_ref.model.external_lib", tmp_path / "library.py"),
        "algorithm.adv_estimator=centred",
        "actor_rollout_ref.actor.policy_loss.loss_mode=plain",
        "reward_model.reward_manager=numbered",
        "+reward_model.reward_kwargs.scale=0.5",
        f"data.custom_cls={{path:{tmp_path / 'data.py'},name:Numbered}}",
        f"data.sampler={{class_path:{tmp_path / 'data.py'},class_name:Backwards}}",
        "trainer.val_before_train=False",
        "trainer.test_last=False",
    )
    rows = _two_steps(config, tmp_path)
    assert all("actor/largest_ratio" in row for row in rows)
    numbers = []
    for step in (1, 2):
        lines = (tmp_path / "reward_ledger" / f"step_{step}.jsonl").read_text().splitlines()
        numbers.append({int(json.loads(line)["parts"]["number"]) for line in lines})
    assert min(numbers[0]) > max(numbers[1]), "the sampler takes the rows from the last"
    assert len(list(seen.iterdir())) == 4, "the driver, two workers and the manager's process"


REWARDS = """
import asyncio


def one_by_one(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return {"score": scale * (len(solution_str) % 3), "length": len(solution_str)}


async def waiting(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    await asyncio.sleep(0)
    return one_by_one(data_source, solution_str, ground_truth, extra_info, scale)


def in_batches(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    rows = zip(data_sources, solution_strs, ground_truths, strict=True)
    return [one_by_one(*row, scale=scale) for row in rows]
"""
FILTER = """
from pathlib import Path
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.override_text import override


def keeps(config, group):
    with Path(__file__).with_suffix(".seen").open("a") as file:
        file.write(f"{len(group.rewards)}\\n")
    return True
"""


@pytest.mark.slow  # as above
@pytest.mark.parametrize(("name", "manager"), [("one_by_one", "naive"), ("waiting", "prime"), ("in_batches", "batch")])
def test_a_reward_function_of_each_sort_and_a_filter(
    local_ray: None, converted: Prepared, tmp_path: Path, name: str, manager: str
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "filters.py").write_text(FILTER)
    config = in_process_config(
        converted,
        tmp_path,
        2,
        2,
        f"custom_reward_function={{path:{tmp_path / 'rewards.py'},name:{name},reward_kwargs:{{scale:0.5}}}}",
        f"reward_model.reward_manager={manager}",
        f"algorithm.filter_groups={{enable:True,filter_path:{tmp_path / 'filters.py'}:keeps}}",
        "trainer.val_before_train=False",
        "trainer.test_last=False",
    )
    assert preflight_problems(config) == []
    fit(config)
    rows = [row for row in read_metrics(tmp_path) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2] and all(math.isfinite(row["actor/pg_loss"]) for row in rows)
    for step in (1, 2):
        lines = (tmp_path / "reward_ledger" / f"step_{step}.jsonl").read_text().splitlines()
        for line in map(json.loads, lines):
            assert line["score"] == 0.5 * (line["parts"]["length"] % 3)
    groups = (tmp_path / "filters.seen").read_text().split()
    assert len(groups) == 2 * config.data.train_batch_size
    assert set(groups) == {str(config.actor_rollout_ref.rollout.n)}


NEWER = """
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
import numpy as np
import torch


@register_adv_est("less_the_mean")
def less_the_mean(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, epsilon: float = 1e-6,
    config=None, **kwargs
):
    scores = token_level_rewards.sum(dim=-1)
    groups = {name: scores[torch.from_numpy(index == name)] for name in set(index)}
    centred = torch.stack([score - groups[name].mean() for score, name in zip(scores, index)])
    if config.get("norm_adv_by_std_in_grpo", True) and config.norm_adv_by_std_in_grpo:
        centred = centred / (torch.stack([groups[name].std() for name in index]) + epsilon)
    return centred[:, None] * response_mask, centred[:, None] * response_mask


@register_policy_loss("clipped")
def clipped(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    assert not config.policy_loss.get("unknown", None) and config.clip_ratio == config["clip_ratio"]
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0))
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio))
    losses = losses if rollout_is_weights is None else losses * rollout_is_weights
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode)
    return loss, {"actor/mean_ratio": ratio.mean().detach().item()}
"""
CHATS = """
import pyarrow.parquet
from torch.utils.data import Dataset


class Chats(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        files = [data_files] if isinstance(data_files, str) else data_files
        self.prompt_key = config.prompt_key
        self.rows = [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        row = dict(self.rows[item])
        row["raw_prompt"] = row.pop(self.prompt_key)
        return {**row, "index": item, "agent_name": "single_turn_agent", "tools_kwargs": {}, "interaction_kwargs": {}}
"""
GRADER = """
import asyncio
import inspect

from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase


async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.01)
    return {"score": len(solution_str) % 3, "of_row": extra_info["index"]}


class Scaled(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        self.scale = config.reward.get("reward_kwargs", {}).get("scale", 1.0)

    async def run_single(self, data: DataProto) -> dict:
        assert len(data) == 1 and self.is_async_reward_score
        item = data[-1]
        ids = item.batch["responses"]
        length = item.batch["attention_mask"][-ids.shape[-1] :].sum()
        decode = lambda: self.tokenizer.decode(ids[:length], skip_special_tokens=True)
        result = await self.compute_score(
            data_source=item.non_tensor_batch["data_source"],
            solution_str=await self.loop.run_in_executor(None, decode),
            ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
            extra_info=item.non_tensor_batch.get("extra_info", {}) | {"index": item.non_tensor_batch["index"]},
        )
        return {"reward_score": self.scale * result["score"], "reward_extra_info": {**result, "acc": result["score"]}}
"""


@pytest.mark.slow  # tests/verl/test_sample_managers.py, test_data.py and test_plugins.py have each alone
def test_plug_ins_of_verl_0_9_together(local_ray: None, converted: Prepared, tmp_path: Path) -> None:
    """Data set of chats, estimator, policy loss, an async reward function and a manager of samples by its file."""
    for name, text in (("algorithms", NEWER), ("chats", CHATS), ("grader", GRADER)):
        (tmp_path / f"{name}.py").write_text(text)
    config = in_process_config(
        converted,
        tmp_path,
        2,
        2,
        override("actor_rollout_ref.model.external_lib", tmp_path / "algorithms.py"),
        "algorithm.adv_estimator=less_the_mean",
        "actor_rollout_ref.actor.policy_loss.loss_mode=clipped",
        "reward.reward_manager.source=importlib",
        override("reward.reward_manager.module.path", tmp_path / "grader.py"),
        "reward.reward_manager.name=Scaled",
        "+reward_model.reward_kwargs.scale=0.5",
        override("custom_reward_function.path", tmp_path / "grader.py"),
        f"data.custom_cls={{path:{tmp_path / 'chats.py'},name:Chats}}",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_last=False",
    )
    rows = _two_steps(config, tmp_path)
    assert all("actor/mean_ratio" in row and row["reward/ungraded"] == 0 for row in rows)
    for step in (1, 2):
        for line in map(json.loads, (tmp_path / "reward_ledger" / f"step_{step}.jsonl").read_text().splitlines()):
            assert line["grader"]["name"] == "Scaled" and line["parts"]["acc"] == len(line["response"]) % 3
            assert line["parts"]["of_row"] >= 0 and line["prompt"]
