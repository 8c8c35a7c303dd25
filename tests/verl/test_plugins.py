"""What a user brings in files of their own runs in a job: two steps each, with the smallest policy."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.verl.bandit import RIGHT_DIGIT, bandit_config, run_bandit, write_inputs
from verl.trainer.config import validate_config
from verl.trainer.config.override_text import override
from verl.trainer.preflight import plugin_problems, reward_problems
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

from verl import DataProto
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
DATA = """
import json

from torch.utils.data import Dataset

from verl.experimental.dataset.sampler import AbstractCurriculumSampler
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.trainer.config.override_text import override


class Questions(Dataset):
    "Lines of JSON: a question and its answer."

    def __init__(self, data_files, tokenizer, processor, config):
        self.tokenizer, self.limit = tokenizer, config.get("max_prompt_length", 512)
        self.rows = [json.loads(line) for path in data_files for line in open(path)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        row = self.rows[item]
        chat = [{"role": "user", "content": row["question"]}]
        ids = self.tokenizer(self.tokenizer.apply_chat_template(chat, tokenize=False))["input_ids"]
        return {
            "raw_prompt_ids": ids[-self.limit :],
            "data_source": "questions",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": item},
            "index": item,
            "level": row["level"],
        }


class Longer(RLHFDataset):
    "Upstream's data set with a column more."

    def __getitem__(self, item):
        return {**super().__getitem__(item), "level": item}


class EasyFirst(AbstractCurriculumSampler):
    "The rows by level, and after an update from the highest level down if it turns."

    def __init__(self, data_source, data_config, turns=False):
        self.levels, self.turns = [data_source[i]["level"] for i in range(len(data_source))], turns
        self.downwards = False

    def __iter__(self):
        left = set(range(len(self.levels)))
        while left:
            pick = max if self.downwards else min
            left.remove(chosen := pick(left, key=lambda i: self.levels[i]))
            yield chosen

    def __len__(self):
        return len(self.levels)

    def update(self, batch):
        assert len(batch.batch["advantages"]) == len(batch.non_tensor_batch["level"])
        self.downwards = self.turns
        return {"order/turned": float(self.downwards)}
"""
FILTER = """
def keeps_mixed(config, group):
    return 0 < group.rewards.mean() < config.reward_model.num_workers
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(MANAGERS, "entries", dict(MANAGERS.entries))
    write_inputs(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "manager.py").write_text(MANAGER)
    (tmp_path / "data.py").write_text(DATA)
    lines = [{"question": f"digit {i}", "answer": str(RIGHT_DIGIT), "level": (i * 5) % 16} for i in range(16)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
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
        *reward_problems(config),
        *plugin_problems(config),
    ]


def _ledger(root: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "reward_ledger" / name).read_text().splitlines()]


MINE = ("reward_model.reward_manager=mine", "+reward_model.reward_kwargs.factor=0.5")


@pytest.mark.timeout(240)
def test_a_users_reward_manager_and_filter(local_ray: None, root: Path) -> None:
    """The manager runs in a process of its own, which imports external_lib, with the user's reward function."""
    records = _run(
        root,
        override("actor_rollout_ref.model.external_lib", root / "manager.py"),
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


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "files"), [("Questions", "data.jsonl"), ("Longer", "data.parquet")])
def test_a_users_data_set_and_sampler(local_ray: None, root: Path, name: str, files: str) -> None:
    """The curriculum turns round after the first step; the reward's ledger shows which rows a step had."""
    records = _run(
        root,
        f"data.custom_cls={{path:{root / 'data.py'},name:{name}}}",
        f"data.sampler={{class_path:{root / 'data.py'},class_name:EasyFirst,kwargs:{{turns:True}}}}",
        override("data.train_files", root / files),
        override("data.val_files", root / files),
    )
    assert [record["step"] for record in records] == [0, 1, 2]
    found = []
    for step in (1, 2):
        lines = _ledger(root, f"step_{step}.jsonl")
        asked = {int(re.findall(r"\d+", line["prompt"])[0]) for line in lines}
        found.append(sorted((i * 5) % 16 if name == "Questions" else i for i in asked))
        assert {line["data_source"] for line in lines} == {"questions" if name == "Questions" else "digits"}
    assert found == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert [record.get("order/turned") for record in records] == [None, 1.0, 1.0]


@pytest.mark.timeout(240)
def test_the_classes_of_the_page_run(local_ray: None, root: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        (root / code.split()[1]).write_text(code)
    (root / "questions.jsonl").write_text((root / "data.jsonl").read_text())
    lines = "\n".join(re.findall(r"^    ((?:data|reward)\..*)$", page, flags=re.MULTILINE))
    given = [re.sub(r"\b(\w+\.(py|jsonl))\b", rf"{root}/\1", override) for override in lines.split()]
    assert len(given) == 7
    records = _run(root, *given, "trainer.val_before_train=False")
    graded = _ledger(root, "step_2.jsonl")
    assert len(graded) == 32 and {line["grader"]["name"] for line in graded} == {"Short"}
    for line in graded:
        is_right = line["parse"]["answer"] == str(RIGHT_DIGIT)
        assert line["score"] == pytest.approx(is_right - 0.001 * line["parts"]["length"])
    assert records[-1]["reward/length"] == pytest.approx(sum(line["parts"]["length"] for line in graded) / 32)


SAMPLES = """
import asyncio

from verl.experimental.reward_loop.reward_manager import RewardManagerBase, register


@register("halves")
class Halves(RewardManagerBase):
    async def run_single(self, data):
        if data[0].non_tensor_batch["index"] % 2:
            raise KeyError("an odd row")
        await asyncio.sleep(WAIT)
        return {"reward_score": 1.0}
"""


@pytest.mark.slow  # tests/verl/test_sample_managers.py has the manager without its process
@pytest.mark.timeout(240)
@pytest.mark.parametrize("wait", [0.0, 60.0])
def test_samples_without_a_grade_and_a_manager_that_waits(local_ray: None, root: Path, wait: float) -> None:
    """Rows with an odd index have no grade and train with 0; a call that takes too long ends the run."""
    (root / "halves.py").write_text(SAMPLES.replace("WAIT", str(wait)))
    given = [
        override("actor_rollout_ref.model.external_lib", root / "halves.py"),
        f"data.custom_cls={{path:{root / 'data.py'},name:Questions}}",
        override("data.train_files", root / "data.jsonl"),
        override("data.val_files", root / "data.jsonl"),
        "reward_model.reward_manager=halves",
        "reward_model.max_ungraded_ratio=0.9",
        f"reward_model.manager_timeout_s={5 if wait else 60}",
        "data.shuffle=False",
        "trainer.val_before_train=False",
    ]
    if wait:
        with pytest.raises(ValueError, match="the reward manager 'halves' took more than 5 s for 32 samples"):
            _run(root, *given)
        return
    records = _run(root, *given)
    assert [record["reward/ungraded"] for record in records] == [0.5, 0.5]
    lines = _ledger(root, "step_1.jsonl")
    assert {(line["status"], line["score"]) for line in lines} == {("ok", 1.0), ("error", 0.0)}
    errors = {line["error"] for line in lines if line["status"] == "error"}
    assert all(re.fullmatch(r"run_single of sample \d+: KeyError: 'an odd row'", error) for error in errors)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("data.custom_cls={path:DATA,name:EasyFirst}", "expected a class derived from torch.utils.data.Dataset"),
        ("data.custom_cls={path:DATA,name:Answers}", "defines no 'Answers'"),
        ("data.custom_cls={path:absent.py,name:Answers}", "data.custom_cls: absent.py does not exist"),
        ("data.sampler={class_path:DATA,class_name:Questions}", "expected a class derived from verl.experimental"),
        ("data.sampler={class_path:'pkg://no_such_package',class_name:X}", "pkg://no_such_package cannot be imported"),
    ],
)
def test_what_cannot_be_a_data_set_or_a_sampler_is_refused_before_a_run(root: Path, given: str, problem: str) -> None:
    [found] = plugin_problems(bandit_config(root, given.replace("DATA", str(root / "data.py"))))
    assert found.startswith("data.") and problem in found
    good = f"data.custom_cls={{path:{root / 'data.py'},name:Longer}}"
    assert plugin_problems(bandit_config(root, good)) == []


@pytest.mark.slow  # tests/verl/test_trackers.py has the trackers without a run, and without their packages
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("wandb", "mlflow"))),
    reason="needs wandb and mlflow: pip install wandb mlflow",
)
@pytest.mark.timeout(240)
def test_a_run_in_wandb_and_mlflow(local_ray: None, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("WANDB_MODE", "offline")
    mlflow.set_tracking_uri(f"sqlite:///{root}/mlflow.db")
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("digits", (root / "artifacts").as_uri()).strip())
    loggers = ("trainer.logger=[wandb,mlflow]", "trainer.project_name=digits", "trainer.log_val_generations=2")
    records = _run(root, f"custom_reward_function={{path:{root / 'rewards.py'},name:single}}", *loggers)
    state = json.loads((root / "trackers.json").read_text())
    assert {name: run["last_step"] for name, run in state.items()} == {"wandb": 2, "mlflow": 2}
    run = mlflow.MlflowClient(f"sqlite:///{root}/mlflow.db").get_run(state["mlflow"]["run_id"])
    assert run.data.metrics["critic/score/mean"] == pytest.approx(records[-1]["critic/score/mean"])
    assert run.data.params["data.train_batch_size"] == "4" and run.info.status == "FINISHED"
    shown = json.loads((root / "val_generations" / "step_2.jsonl").read_text().splitlines()[0])
    tables = [json.loads(path.read_text())["data"] for path in root.rglob("*.table.json")]
    expected = [shown["step"], shown["prompt"], shown["response"], shown["score"]]
    assert len(tables) == 2 and any(table[0] == expected for table in tables)
    assert len(list((root / "artifacts").rglob("val_generations/step_*.json"))) == 2


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
    library = override("actor_rollout_ref.model.external_lib", root / "manager.py")
    with pytest.raises(ValueError, match=f"the reward manager 'mine' {problem}"):
        _run(root, library, *MINE, function, "trainer.val_before_train=False")
