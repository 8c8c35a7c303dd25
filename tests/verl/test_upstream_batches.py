"""Upstream's functions on batches and runs: micro-batches, statistics, checkpoints, models, operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes.common.tokenizer import write_tokenizer
from verl.protocol import DataProto
from verl.trainer.ppo import metric_utils
from verl.utils import model as model_utils
from verl.utils.tokenizer import hf_processor, hf_tokenizer


def test_metrics_of_an_upstream_batch() -> None:
    ones = torch.ones(2, 2)
    tensors = {
        "responses": torch.zeros(2, 2),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]),
        "token_level_scores": torch.tensor([[0.0, 1.0], [0.5, 0.0]]),
        "token_level_rewards": torch.tensor([[0.0, 1.0], [0.5, 0.0]]),
        "advantages": ones,
        "returns": torch.tensor([[1.0, 2.0], [3.0, 0.0]]),
        "values": torch.tensor([[1.0, 2.0], [2.0, 0.0]]),
    }
    batch = DataProto.from_dict(tensors, meta_info={"global_token_num": [3, 3]})
    found = metric_utils.compute_data_metrics(batch)
    assert found["critic/score/mean"] == 0.75 and found["critic/values/max"] == 2.0
    assert found["critic/vf_explained_var"] == pytest.approx(1 - (1 / 3) / 1.0, abs=1e-4)
    assert (found["prompt_length/mean"], found["response_length/mean"]) == (1.5, 1.5)
    assert "critic/values/max" not in metric_utils.compute_data_metrics(batch, use_critic=False)
    times = metric_utils.compute_timing_metrics(batch, {"gen": 0.3, "update_critic": 0.6})
    assert times["timing_per_token_ms/gen"] == pytest.approx(100) and times["timing_s/gen"] == 0.3
    assert times["timing_per_token_ms/update_critic"] == pytest.approx(100)
    assert metric_utils.compute_throughout_metrics(batch, {"step": 2.0}, 3)["perf/throughput"] == 1.0


def test_tokenizers_and_processors(tmp_path: Path) -> None:
    write_tokenizer(["a few words"] * 3, tmp_path, 270, 64)
    tokenizer = hf_tokenizer(str(tmp_path), trust_remote_code=True)
    assert tokenizer.pad_token_id is not None
    assert hf_processor(str(tmp_path), trust_remote_code=True, use_fast=True) is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ValueError, match="only models of text"):
        hf_processor(str(tmp_path))


def test_positions_of_a_padded_batch() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert model_utils.compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
