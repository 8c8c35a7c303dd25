"""Upstream's functions on batches and runs: micro-batches, statistics, checkpoints, models, operations."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from hf_formats.config import parse_hf_config
from hf_formats.layer_tensors import layer_tensors
from recipes.common.tokenizer import write_tokenizer
from tests.parallel.launcher import run_ranks
from tests.tiny_models import CONFIGS
from verl.protocol import DataProto
from verl.trainer.ppo import metric_utils
from verl.utils import model as model_utils
from verl.utils import seqlen_balancing as balancing
from verl.utils.checkpoint.checkpoint_manager import (
    find_latest_ckpt_path,
    get_checkpoint_tracker_filename,
    should_save_ckpt_esi,
)
from verl.utils.flops_counter import FlopsCounter, get_device_flops
from verl.utils.tokenizer import hf_processor, hf_tokenizer

LENGTHS = [5, 9, 2, 7, 7, 1, 4, 9]


def _rows(lengths: list[int]) -> DataProto:
    mask = (torch.arange(10)[None] < torch.tensor(lengths)[:, None]).long()
    names = np.array([f"row {row}" for row in range(len(lengths))], dtype=object)
    return DataProto.from_dict({"attention_mask": mask, "row": torch.arange(len(lengths))}, {"name": names}, {"a": 1})


def test_micro_batches_hold_their_tokens_and_come_back_in_order() -> None:
    data = _rows(LENGTHS)
    for options in ({}, {"min_num_micro_batch": 6}, {"num_batches_divided_by": 4}, {"use_dynamic_bsz_balance": False}):
        micros, parts = balancing.prepare_dynamic_batch(data, 14, **options)  # type: ignore[arg-type]
        assert all(int(micro.batch["attention_mask"].sum()) <= 14 for micro in micros)
        assert len(micros) >= options.get("min_num_micro_batch", 4)
        assert len(micros) % options.get("num_batches_divided_by", 1) == 0
        restored = balancing.restore_dynamic_batch(torch.cat([micro.batch["row"] for micro in micros]), parts)
        assert restored.tolist() == list(range(8))
        assert [micro.non_tensor_batch["name"].tolist() for micro in micros] == [
            [f"row {row}" for row in part] for part in parts
        ]
        assert all(micro.meta_info == {"a": 1} for micro in micros)
    sizes = [len(batch) for batch in balancing.rearrange_micro_batches(data.batch, 44)[0]]
    assert sizes == [8]
    with pytest.raises(ValueError, match="more than max_token_len 8"):
        balancing.rearrange_micro_batches(data.batch, 8)
    with pytest.raises(ValueError, match="8 rows cannot fill 9"):
        balancing.rearrange_micro_batches(data.batch, 44, min_num_micro_batch=9)


def test_the_heaviest_micro_batch_stands_in_the_middle() -> None:
    _, parts = balancing.rearrange_micro_batches(_rows([1, 2, 3, 4, 5]).batch, 5, min_num_micro_batch=5)
    assert [part[0] for part in parts] == [0, 2, 4, 3, 1]


def test_ranks_get_as_many_micro_batches() -> None:
    assert run_ranks(_number_of_micro_batches, 2) == [(4, 1), (4, 4)]


def _number_of_micro_batches() -> tuple[int, int]:
    lengths = [2, 2, 2, 2] if dist.get_rank() == 0 else [9, 9, 9, 9]
    batch, group = _rows(lengths).batch, dist.group.WORLD
    alike = balancing.rearrange_micro_batches(batch, 10, group)[0]
    own = balancing.rearrange_micro_batches(batch, 10, group, same_micro_num_in_dp=False)[0]
    return len(alike), len(own)


@pytest.mark.parametrize("partition", [balancing.karmarkar_karp, balancing.greedy_partition])
@pytest.mark.parametrize("equal_size", [False, True])
def test_partitions_are_balanced(partition: object, equal_size: bool) -> None:
    parts = partition(LENGTHS, 4, equal_size)  # type: ignore[operator]
    assert sorted(row for part in parts for row in part) == list(range(8))
    assert max(sum(LENGTHS[row] for row in part) for part in parts) <= 13
    assert not equal_size or {len(part) for part in parts} == {2}
    found = balancing.log_seqlen_unbalance(LENGTHS, parts, "tokens")
    assert (found["tokens/min"], found["tokens/max"], found["tokens/mean"]) == (8, 14, 11)
    assert found["tokens/minmax_diff"] == 6 and found["tokens/balanced_max"] <= 13


def test_small_sums_by_hand() -> None:
    assert balancing.calculate_workload([1, 2]).tolist() == [24577, 49156]
    assert (balancing.ceildiv(7, 2), balancing.roundup_divisible(7, 4)) == (4, 8)
    assert balancing.get_reverse_idx([2, 0, 1]) == [1, 2, 0]


def test_statistics_of_several_responses_to_a_problem() -> None:
    sources, uids = ["a", "a", "a", "a", "b"], ["p", "p", "q", "q", "r"]
    infos = {"score": [0.0, 1.0, 1.0, 1.0, 0.5], "pred": ["3", "4", "4", "4", "x"]}
    found = metric_utils.process_validation_metrics(sources, uids, infos)
    assert found["b"] == {"score": {"mean@1": 0.5}}
    of_a = found["a"]["score"]
    assert of_a["mean@2"] == 0.75 and of_a["std@2"] == 0.25
    assert of_a["best@2/mean"] == pytest.approx((0.75 + 1) / 2, abs=0.03)
    assert of_a["worst@2/mean"] == pytest.approx((0.25 + 1) / 2, abs=0.03)
    assert of_a["maj@2/mean"] == pytest.approx((0.5 + 1) / 2, abs=0.03) and "pred" not in found["a"]
    [(mean, spread), (most, _)] = metric_utils.bootstrap_metric([1, 2, 3, 4, 5], 3, [np.mean, np.max], n_bootstrap=500)
    assert mean == pytest.approx(3, abs=0.2) and spread == pytest.approx((2 / 3) ** 0.5, abs=0.1) and most > 3
    votes = [{"p": "A", "v": 0.1}, {"p": "B", "v": 0.2}, {"p": "B", "v": 0.3}]
    assert metric_utils.calc_maj_val(votes, "p", "v") == 0.2
    with pytest.raises(ValueError):
        metric_utils.bootstrap_metric([], 1, [np.mean])


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


def test_the_newest_checkpoint_is_the_one_that_the_tracker_names(tmp_path: Path) -> None:
    assert find_latest_ckpt_path(None) is None and find_latest_ckpt_path(str(tmp_path)) is None
    Path(get_checkpoint_tracker_filename(str(tmp_path))).write_text("20")
    assert find_latest_ckpt_path(str(tmp_path)) is None, "the folder is not there"
    (tmp_path / "global_step_20").mkdir()
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_20")


@pytest.mark.parametrize("variable", ["MLP", "SAGEMAKER"])
def test_a_checkpoint_is_due_before_the_machine_is_taken_back(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not should_save_ckpt_esi(60)
    for seconds, is_due in ((100, True), (1000, False), (-10, False)):
        monkeypatch.setenv(f"{variable}_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(time.time() + seconds))
        assert should_save_ckpt_esi(60) is is_due
    assert not should_save_ckpt_esi(0)
    monkeypatch.setenv(f"{variable}_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", "soon")
    assert not should_save_ckpt_esi(60)


def test_tokenizers_and_processors(tmp_path: Path) -> None:
    write_tokenizer(["a few words"] * 3, tmp_path, 270, 64)
    tokenizer = hf_tokenizer(str(tmp_path), trust_remote_code=True)
    assert tokenizer.pad_token_id is not None
    assert hf_processor(str(tmp_path), trust_remote_code=True, use_fast=True) is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ValueError, match="only models of text"):
        hf_processor(str(tmp_path))


def test_models_and_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = torch.nn.Linear(40, 50)
    assert model_utils.get_model_size(layer) == (2.05, "K")
    model_utils.print_model_size(layer, "mine")
    assert capsys.readouterr().out == "mine contains 2.05K parameters\n"
    config = PretrainedConfig(num_labels=2, mine={"a": 1})
    model_utils.update_model_config(config, {"num_labels": 3, "mine": {"a": 2}})
    assert config.num_labels == 3 and config.mine == {"a": 2}
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert model_utils.compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
    torch.manual_seed(0)
    drawn = model_utils.create_random_mask(torch.zeros(50, 20), 0.8, 0.3, 0.2)
    assert drawn.sum(-1).min() >= 4 and drawn.sum(-1).max() <= 16 and drawn[:, :6].sum(-1).min() >= 0
    assert (drawn.diff(dim=-1) == 1).sum(-1).max() <= 1, "one run of tokens"
    tokens, ends, longest = model_utils.pad_packed_inputs(torch.arange(5), torch.tensor([0, 2, 5]), 3, 4)
    assert tokens.tolist() == [0, 1, 2, 3, 4, 0, 0, 0] and ends.tolist() == [0, 2, 8] and longest == 6
    assert model_utils.get_generation_config(str(tmp_path)) is None
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "do_sample": True}))
    generation = model_utils.get_generation_config(str(tmp_path))
    assert generation is not None and generation.temperature == 0.3


def test_operations_of_each_kind_of_model_by_hand() -> None:
    dense = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    dense |= {"vocab_size": 10, "intermediate_size": 16}
    weights = 2 * (8 * 2 * (4 + 2 + 2 + 4) + 3 * 8 * 16) + 2 * 10 * 8
    counter = FlopsCounter(PretrainedConfig(model_type="qwen2", **dense))
    found, peak = counter.estimate_flops([3, 5], 2.0)
    assert found == pytest.approx((6 * weights * 8 + 12 * (9 + 25) * 2 * 4 * 2) / 2.0 / 1e12)
    assert peak == get_device_flops("T")

    experts = PretrainedConfig(
        model_type="qwen3_moe", head_dim=3, moe_intermediate_size=5, num_experts_per_tok=2, num_experts=7, **dense
    )
    weights = 2 * (8 * 3 * 12 + 3 * 8 * 5 * 2 + 8 * 7) + 2 * 10 * 8
    assert FlopsCounter(experts).estimate_flops([4], 1.0)[0] == pytest.approx(
        (6 * weights * 4 + 12 * 16 * 3 * 4 * 2) / 1e12
    )

    latent = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}
    latent |= {"moe_intermediate_size": 7, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    attention = 8 * 6 + 6 * 4 * 5 + 8 * (5 + 2) + 4 * (3 + 4) * 5 + 4 * 4 * 8
    weights = 2 * attention + (8 * 8 + 3 * 8 * 7 * 3) + 3 * 8 * 16 + 2 * 10 * 8
    config = PretrainedConfig(model_type="deepseek_v3", first_k_dense_replace=1, **dense, **latent)
    assert FlopsCounter(config).estimate_flops([4], 1.0)[0] == pytest.approx(
        (6 * weights * 4 + 12 * 16 * 5 * 4 * 2) / 1e12
    )
    assert FlopsCounter(PretrainedConfig(model_type="mamba")).estimate_flops([4], 1.0)[0] == 0
    with pytest.raises(ValueError, match="expected one of B, K, M"):
        get_device_flops("X")


@pytest.mark.parametrize("name", CONFIGS)
def test_operations_of_every_family_are_those_of_its_tensors(name: str) -> None:
    """A token meets every matrix but those of the experts that it is not sent to; embeddings count twice."""
    raw = CONFIGS[name]
    config, sizes = parse_hf_config(raw), {key: value for key, value in raw.items() if key != "rope_scaling"}
    met = range(config.num_experts_per_tok)
    weights = 2 * config.vocab_size * config.hidden_size
    for layer in range(config.num_hidden_layers):
        for tensor in layer_tensors(config, config.is_moe_layer(layer), met):
            weights += math.prod(tensor.shape) if len(tensor.shape) == 2 else 0
    heads = config.num_attention_heads * (config.qk_head_dim if config.is_mla else config.head_dim)
    expected = 6 * weights * 4 + 12 * 16 * heads * config.num_hidden_layers
    found, _ = FlopsCounter(PretrainedConfig(**sizes)).estimate_flops([4], 1.0)
    assert found * 1e12 == pytest.approx(expected)
