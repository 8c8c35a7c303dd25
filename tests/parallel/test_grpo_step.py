"""One whole GRPO step of the worker, at several layouts, against one process: same tokens, loss, norm and weights.

The one process trains on a batch that comes through the controller; the others on rows that the workers kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.mindspeed_llm.tiny import tiny_hf_config, tiny_qwen3_config, tiny_v2_lite_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from verl.protocol import DataProto
from verl.trainer.config import load_config, validate_config
from verl.trainer.config.override_text import override
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.row_server import RowsUnavailableError
from verl.workers.row_store import worker_batch

NUM_PROMPTS, NUM_SAMPLES, PROMPT_LENGTH, NUM_TRAINED = 8, 2, 10, 12
VOCAB_SIZE = int(tiny_hf_config()["vocab_size"])
ENGINE = "actor_rollout_ref.actor.megatron"
LAYOUTS = {
    "tp2_pp2_ep2": (
        4,
        [
            f"{ENGINE}.tensor_model_parallel_size=2",
            f"{ENGINE}.pipeline_model_parallel_size=2",
            f"{ENGINE}.num_layer_list=[2,1]",
            f"{ENGINE}.expert_model_parallel_size=2",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            "actor_rollout_ref.actor.router_replay.mode=R3",
        ],
    ),
    "cp2_pp2_vpp2_replay": (
        4,
        [
            f"{ENGINE}.context_parallel_size=2",
            f"{ENGINE}.pipeline_model_parallel_size=2",
            f"{ENGINE}.virtual_pipeline_model_parallel_size=2",
            f"{ENGINE}.override_transformer_config.noop_layers='1'",
            f"{ENGINE}.expert_model_parallel_size=2",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24",
            "actor_rollout_ref.actor.router_replay.mode=R2",
            "actor_rollout_ref.rollout.calculate_log_probs=False",
        ],
    ),
    "dp2_ep2_swap": (
        2,
        [
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            "actor_rollout_ref.actor.router_replay.mode=R3",
            f"{ENGINE}.expert_model_parallel_size=2",
            f"{ENGINE}.swap_optimizer=True",
            f"{ENGINE}.optimizer_offload=False",
            "algorithm.rollout_correction={rollout_is:token,rollout_rs:geometric}",  # of no effect: both agree
        ],
    ),
}

OTHER_MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "qwen3 tied, rollout over tp": (
        tiny_qwen3_config(tie_word_embeddings=True),
        [
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "actor_rollout_ref.rollout.enable_expert_parallel=False",
        ],
    ),
    "deepseek-v2, routing of the rollout": (
        tiny_v2_lite_config(n_group=4, topk_group=2, topk_method="group_limited_greedy"),
        [
            f"{ENGINE}.expert_model_parallel_size=2",
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            "actor_rollout_ref.actor.router_replay.mode=R3",
        ],
    ),
}


def config_overrides(model_dir: str, world_size: int) -> list[str]:
    return [
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={world_size}",
        override("trainer.report_dir", f"{model_dir}/run"),
        override("actor_rollout_ref.model.path", model_dir),
        f"data.max_prompt_length={PROMPT_LENGTH}",
        "data.max_response_length=8",
        f"data.train_batch_size={NUM_PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_PROMPTS}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.ref.megatron.load_weight=False",  # not the actor itself, so that the KL term counts
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"{ENGINE}.dtype=float32",
        f"{ENGINE}.param_offload=True",
        f"{ENGINE}.grad_offload=True",
        f"{ENGINE}.optimizer_offload=True",
        f"actor_rollout_ref.rollout.n={NUM_SAMPLES}",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "actor_rollout_ref.rollout.num_gpu_blocks_override=64",
    ]


def prompts() -> DataProto:
    generator = torch.Generator().manual_seed(3)
    num_rows = NUM_PROMPTS * NUM_SAMPLES
    lengths = torch.randint(3, PROMPT_LENGTH + 1, (num_rows,), generator=generator)
    mask = (torch.arange(PROMPT_LENGTH) >= PROMPT_LENGTH - lengths[:, None]).long()
    ids = torch.randint(2, VOCAB_SIZE, mask.shape, generator=generator) * mask
    raw = np.empty(num_rows, dtype=object)
    raw[:] = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    return DataProto.from_dict(
        non_tensors={"raw_prompt_ids": raw, "sampling_seeds": np.arange(num_rows).astype(object)},
        meta_info={"eos_token_id": 1, "pad_token_id": 1},
    )


def grpo_step(model_dir: str, out_dir: str, overrides: list[str]) -> dict[str, Any] | None:
    """Runs in every rank; returns what the collecting rank of data-parallel rank 0 saw."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    config = load_config(config_overrides(model_dir, world_size) + overrides)
    assert validate_config(config) == []
    worker = ActorRolloutRefWorker(config, "actor_rollout_ref")
    worker.init_model()

    rollout_tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    mine = prompts().chunk(world_size // rollout_tp)[rank // rollout_tp]
    generated: list[Any] = [None] * world_size
    dist.all_gather_object(generated, worker.generate_sequences(mine))
    batch = DataProto.concat(generated[::rollout_tp])
    assert batch.row_refs is not None and "input_ids" in batch.row_refs and "input_ids" not in batch.batch
    batch.meta_info |= {"temperature": 1.0, "rollout_n": NUM_SAMPLES, "global_step": 1}
    generator = torch.Generator().manual_seed(5)
    batch.batch["advantages"] = torch.randn(len(batch), 1, generator=generator) * batch.batch["response_mask"]
    responses = batch.batch["responses"].long()
    batch.reorder(torch.randperm(len(batch), generator=generator)[:NUM_TRAINED])  # as balancing and filters do

    groups = worker.groups
    if world_size == 1:
        batch = worker.row_store.fetch(worker_batch(batch, "advantages"), worker.actor.trained_columns)
    dp, num_parts = groups.coords.dp, groups.dp.size()

    def on_my_part(method: Callable[[DataProto], DataProto], *columns: str) -> DataProto:
        return method(worker_batch(batch, *columns).chunk(num_parts)[dp])

    for method in (worker.compute_log_prob, worker.compute_ref_log_prob):
        outputs: list[Any] = [None] * world_size
        dist.all_gather_object(outputs, on_my_part(method))
        is_collect: list[Any] = [None] * world_size
        dist.all_gather_object(is_collect, (groups.coords.dp, worker._query_mesh("train")[1]))
        parts = [outputs[is_collect.index((part, True))] for part in range(num_parts)]
        batch = batch.union(DataProto.concat(parts))
    metrics = on_my_part(worker.update_actor, "advantages").meta_info["metrics"]
    worker.row_store.drop()
    dist.barrier()
    if world_size > 1:
        with pytest.raises((RowsUnavailableError, ValueError), match="of which nothing is stored"):
            on_my_part(worker.compute_log_prob)
    worker.export_hf(out_dir)
    is_collected = groups.coords.dp == 0 and worker._query_mesh("train")[1]
    return {"responses": responses, "metrics": metrics} if is_collected else None


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(path, tiny_hf_config(), seed=1, dtype=torch.float32)
    return str(path)


@pytest.fixture(scope="module")
def one_process(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out_dir = tmp_path_factory.mktemp("one") / "hf"
    (result,) = run_ranks(grpo_step, 1, model_dir, str(out_dir), [])
    return result, out_dir


def exported(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_other_models_sync_generate_and_train(name: str, tmp_path: Path) -> None:
    """Rollout and training give the same log-probs, so every weight and the whole forward pass agree."""
    config, overrides = OTHER_MODELS[name]
    write_tiny_checkpoint(tmp_path / "model", config, seed=1, dtype=torch.float32)
    results = run_ranks(grpo_step, 2, str(tmp_path / "model"), str(tmp_path / "hf"), overrides)
    metrics = next(r for r in results if r is not None)["metrics"]
    assert metrics["training/rollout_probs_diff_max"] <= 1e-4
    assert metrics["actor/grad_norm"] > 0
    before, after = exported(tmp_path / "model"), exported(tmp_path / "hf")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[tensor], after[tensor]) for tensor in before if tensor.endswith("_proj.weight"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(
    name: str, model_dir: str, one_process: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    world_size, overrides = LAYOUTS[name]
    expected, expected_dir = one_process
    results = run_ranks(grpo_step, world_size, model_dir, str(tmp_path / "hf"), overrides)
    (result,) = [r for r in results if r is not None]
    assert torch.equal(result["responses"], expected["responses"])
    for metric in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy"):
        assert result["metrics"][metric] == pytest.approx(expected["metrics"][metric], rel=1e-4), metric
    assert result["metrics"].get("training/rollout_probs_diff_max", 0.0) <= 1e-4
    assert ("training/rollout_probs_diff_max" in result["metrics"]) == (name != "cp2_pp2_vpp2_replay")
    if "rollout_corr/kl" in result["metrics"]:
        assert abs(result["metrics"]["rollout_corr/kl"]) < 1e-5
        assert result["metrics"]["rollout_corr/rollout_rs_masked_fraction"] == 0.0
    assert ("rollout_corr/kl" in result["metrics"]) == (name == "dp2_ep2_swap")
    ours, theirs = exported(tmp_path / "hf"), exported(expected_dir)
    assert ours.keys() == theirs.keys()
    before = exported(Path(model_dir))
    for tensor_name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[tensor_name], rtol=1e-4, atol=1e-4, msg=tensor_name)
    assert any(not torch.equal(tensor, before[tensor_name]) for tensor_name, tensor in ours.items())
