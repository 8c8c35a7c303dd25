"""Records of samples: whole groups, texts of tokens that join to the response, only JSON's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.common.tokenizer import write_tokenizer
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.parallel.test_grpo_step import config_overrides, prompts
from verl.protocol import DataProto
from verl.trainer.config import load_config, validate_config
from verl.trainer.config.validate import config_warnings
from verl.trainer.ppo.sample_records import ROLLOUT, TRAINING, SampleRecords, chosen_rows, token_texts
from verl.trainer.ppo.scores import REWARD_PARTS
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.row_store import worker_batch

TEXT = "Füße 为什么 🦊!"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(["why? 1 + 2"], folder, 300, 64)
    return hf_tokenizer(str(folder))


def test_whole_groups_are_chosen_in_the_order_of_their_prompts() -> None:
    uids = np.array(["7-10", "7-9", "7-0", "7-10", "7-9", "7-0"], dtype=object)
    assert chosen_rows(uids, 4) == [2, 5, 1, 4]
    assert chosen_rows(uids, 5) == [2, 5, 1, 4]
    assert chosen_rows(uids, 100) == [2, 5, 1, 4, 0, 3]
    assert chosen_rows(uids, 1) == [2]


def test_texts_of_tokens_join_to_the_text(tokenizer) -> None:
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    pieces = token_texts(tokenizer.decode, ids)
    assert "".join(pieces) == TEXT and len(pieces) == len(ids)
    assert pieces.count("") >= 3  # bytes of the fox that wait for the last one
    cut = token_texts(tokenizer.decode, ids[:-2])
    assert "".join(cut) == tokenizer.decode(ids[:-2]), "a character that never became whole is shown as such"
    assert token_texts(tokenizer.decode, []) == []


def _batch(tokenizer) -> DataProto:
    ids = torch.tensor([tokenizer("1 + 2", add_special_tokens=False)["input_ids"]] * 3)
    mask = torch.ones_like(ids)
    mask[1, 2:] = 0
    log_probs = torch.full(ids.shape, -0.5)
    log_probs[2, 0], log_probs[2, 1] = float("-inf"), float("nan")
    scores = torch.zeros(ids.shape)
    scores[:, 0] = torch.tensor([1.0, 0.0, float("nan")])
    tensors = {"responses": ids, "response_mask": mask, "old_log_probs": log_probs}
    tensors |= {"token_level_scores": scores, "advantages": torch.full(ids.shape, 0.25)}
    columns = {
        "uid": ["5-0", "5-0", "5-1"],
        "data_source": ["digits"] * 3,
        "prompt_text": ["what?\ud800"] * 3,
        "reward_model": [{"ground_truth": 3}] * 3,
        REWARD_PARTS: [{"score": 1.0, "accuracy": 1.0}, {"score": 0.0}, {"score": float("nan")}],
    }
    return DataProto.from_dict(tensors, columns)


def test_a_record_says_what_there_is(tokenizer, tmp_path: Path) -> None:
    records = SampleRecords(str(tmp_path), freq=5, max_rows=3, tokenizer=tokenizer)
    assert [step for step in range(1, 12) if records.wants(step)] == [5, 10]
    assert not SampleRecords(str(tmp_path), freq=-1, max_rows=3, tokenizer=tokenizer).wants(1)
    for step in (5, 10):
        records.write(step, records.chosen(_batch(tokenizer)))
    lines = (tmp_path / "samples" / "step_5.jsonl").read_text().splitlines()
    assert all(word not in line for line in lines for word in ("NaN", "Infinity"))
    first, second, third = map(json.loads, lines)
    length = len(first["tokens"])
    assert (first["uid"], first["reward"], first["length"], first["advantage"]) == ("5-0", 1.0, length, 0.25)
    assert "".join(first["tokens"]) == "1 + 2" and first["prompt"] == "what?\ud800" and first["ground_truth"] == "3"
    assert first["log_probs"] == [-0.5] * length and first["rollout_log_probs"] is None
    assert first["versions"] == [[4, length]] and first["finish_reason"] is None
    assert second["length"] == 2 == len(second["tokens"]) == len(second["log_probs"])
    assert third["log_probs"][:3] == [None, None, -0.5] and third["reward"] is None and third["parts"]["score"] is None
    records.cut_back(6)
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_5.jsonl"]


def test_values_that_record_nothing_are_told() -> None:
    found = validate_config(load_config(["trainer.log_samples_freq=0", "trainer.log_samples_rows=0"]))
    assert any("trainer.log_samples_freq is 0; use -1 for never" in problem for problem in found)
    assert any("trainer.log_samples_rows is 0; it must be at least 1" in problem for problem in found)
    without = load_config(["trainer.log_samples_freq=5", "actor_rollout_ref.rollout.calculate_log_probs=False"])
    assert any("the records will have no log-probs of the rollout" in warning for warning in config_warnings(without))


def _two_steps(model_dir: str, is_recorded: bool) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics and weights of a worker's steps, with what the trainer does for a record or without it."""
    worker = ActorRolloutRefWorker(load_config(config_overrides(model_dir, 1)), "actor_rollout_ref")
    worker.init_model()
    metrics = []
    for step in range(2):
        batch = worker.generate_sequences(prompts())
        batch.meta_info = {"temperature": 1.0, "rollout_n": 2, "global_step": step + 1}
        batch = batch.union(worker.compute_ref_log_prob(worker_batch(batch)))
        noise = torch.randn(len(batch), 1, generator=torch.Generator().manual_seed(step))
        batch.batch["advantages"] = noise * batch.batch["response_mask"]
        if is_recorded:
            scored = worker.compute_log_prob(worker_batch(batch))
            rows = batch.select().union(scored).select_idxs([1, 0])
            worker.fetch_columns(worker_batch(rows), (ROLLOUT, TRAINING))
        found = worker.update_actor(worker_batch(batch, "advantages")).meta_info["metrics"]
        metrics.append({name: value for name, value in found.items() if not name.startswith("perf/")})
    worker.actor_module.onload_params()
    state = worker.actor_module.module.state_dict()
    return metrics, {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.mark.timeout(120)
def test_a_record_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_hf_config(), seed=1, dtype=torch.float32)
    ((metrics, weights),) = run_ranks(_two_steps, 1, str(tmp_path), False)
    ((recorded_metrics, recorded_weights),) = run_ranks(_two_steps, 1, str(tmp_path), True)
    assert recorded_metrics == metrics and metrics[1]["actor/grad_norm"] > 0
    assert all(torch.equal(recorded_weights[name], weights[name]) for name in weights)
