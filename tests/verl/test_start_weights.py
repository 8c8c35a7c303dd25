"""A worker starts from an HF directory in FP8, from shards of either kind and from a training checkpoint alike."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import destroy_model_parallel
from mindspeed_llm import convert_ckpt_deepseek3, convert_ckpt_torch_dist, fp8_cast_bf16
from mindspeed_llm.fp8_quantize import quantize_checkpoint
from recipes.common.tokenizer import write_tokenizer
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.parallel.test_grpo_step import ENGINE, config_overrides
from verl.trainer.config import load_config
from verl.trainer.preflight import preflight_problems
from verl.workers.megatron_workers import ActorRolloutRefWorker

SHARDS = f"{ENGINE}.use_dist_checkpointing=true"
WORKERS = "verl.workers.megatron_workers"


class Lines(logging.Handler):
    """What is logged, kept."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def start(model_dir: str, overrides: list[str], save_to: str | None) -> tuple[dict[str, Tensor], str]:
    """The actor's weights on this rank, and the line that says where they come from."""
    config = load_config([*config_overrides(model_dir, dist.get_world_size()), *overrides])
    said, logger = Lines(), logging.getLogger(WORKERS)
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    worker = ActorRolloutRefWorker(config, "actor_rollout")
    worker.init_model()
    logger.removeHandler(said)
    if save_to is not None:
        worker.save_checkpoint(save_to)
    worker.actor_module.onload_params()
    weights = {name: tensor.clone() for name, tensor in worker.actor_module.module.state_dict().items()}
    worker.rollout.inference_engine.shutdown()
    destroy_model_parallel()
    return weights, next(line for line in said.lines if line.startswith("weights from "))


def start_from_all(root: str) -> list[str]:
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()), LOCAL_RANK=str(rank))
    common = [f"{ENGINE}.dtype=bfloat16"]
    expected, line = start(f"{root}/bf16", common, f"{root}/saved/actor")
    lines = [line]
    for model, overrides in (
        ("fp8", []),
        ("fp8", ["actor_rollout_ref.rollout.quantization=dequantize"]),
        ("bf16", [SHARDS, f"{ENGINE}.dist_checkpointing_path={root}/legacy"]),
        ("bf16", [SHARDS, f"{ENGINE}.dist_checkpointing_path={root}/dcp"]),
        ("bf16", [SHARDS, f"{ENGINE}.dist_checkpointing_path={root}/saved/actor"]),
    ):
        weights, line = start(f"{root}/{model}", [*common, *overrides], None)
        assert weights.keys() == expected.keys()
        wrong = [name for name, value in expected.items() if not weights[name].equal(value)]
        assert not wrong, (overrides, wrong)
        lines.append(line)
    return lines


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One model in FP8, in BF16, as shards of TP 2 and as a distributed checkpoint."""
    write_tiny_checkpoint(tmp_path / "base", tiny_hf_config(), dtype=torch.bfloat16)
    quantize_checkpoint(tmp_path / "base", tmp_path / "fp8")
    paths = ["--input-fp8-hf-path", str(tmp_path / "fp8"), "--output-bf16-hf-path", str(tmp_path / "bf16")]
    assert fp8_cast_bf16.main(paths) == 0
    load = ["--load-dir", str(tmp_path / "fp8"), "--save-dir"]
    layout = ["--target-tensor-parallel-size", "2", "--moe-grouped-gemm"]
    assert convert_ckpt_deepseek3.main([*load, str(tmp_path / "legacy"), *layout]) == 0
    assert convert_ckpt_torch_dist.main([*load, str(tmp_path / "dcp")]) == 0
    return tmp_path


def test_workers_start_with_the_same_weights_from_every_form(root: Path) -> None:
    [lines] = run_ranks(start_from_all, 1, str(root))
    plain, fp8, _, legacy, dcp, training = lines
    assert "Hugging Face directory" in plain and " 0 of them in FP8" in plain
    assert "Hugging Face directory" in fp8 and " 0 of them in FP8" not in fp8
    assert "mp_rank shards for ParallelLayout(world_size=2, tensor_model_parallel_size=2" in legacy
    assert "a distributed checkpoint of weights" in dcp
    assert "the model part of a training checkpoint that ParallelLayout(world_size=1" in training


def test_preflight_takes_every_form_and_names_a_cut_one(root: Path) -> None:
    for model in ("bf16", "fp8"):
        write_tokenizer(["a tiny tokenizer"], root / model, 300, 512)

    def weight_problems(model: str, *overrides: str) -> list[str]:
        config = load_config([*config_overrides(str(root / model), 1), *overrides])
        return [problem for problem in preflight_problems(config) if "actor_rollout_ref" in problem]

    from_dcp = [SHARDS, f"{ENGINE}.dist_checkpointing_path={root}/dcp"]
    assert weight_problems("fp8") == weight_problems("bf16", *from_dcp) == []
    [file] = (root / "dcp").glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    [problem] = weight_problems("bf16", *from_dcp)
    assert "actor.megatron.dist_checkpointing_path" in problem and "__0_0.distcp is truncated" in problem
    assert "model.decoder" in problem
