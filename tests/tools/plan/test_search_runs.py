"""The layout that the search finds for a 16B Moonlight on 8 GPUs runs: a step on 8 processes, with a small width."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.mindspeed_llm.tiny import tiny_moonlight_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.tools.plan.training_calls import run_training
from tools.plan.collectives import CollectiveLog
from tools.plan.device import MemoryMeter
from tools.plan.devices import load_device
from tools.plan.search.rank import ranking
from tools.plan.search.verify import verified
from tools.plan.setup import planned_run
from tools.plan.timing.constants import load_constants
from tools.plan.timing.run_shape import RunShape
from tools.plan.training import UPDATE, StepSize, batch_of
from verl.protocol import DataProto
from verl.trainer.config import load_config, validate_config
from verl.trainer.config.override_text import override
from verl.workers.megatron_workers import ActorRolloutRefWorker

ENGINE, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
NUM_RANKS, PROMPT, RESPONSE, SAMPLES = 8, 8, 4, 2
LAYOUT_KEYS = ("parallel_size", "num_layer_list", "moe_tp_extend_ep", "enable_expert_parallel", "expert_exchange")


def found_layout() -> list[str]:
    """The layout keys of the fastest whose plan fits."""
    device = load_device("h100")
    run = planned_run("moonlight_16b_8gpu", [], device, nodes=None, model=None)
    assert run.config.trainer.world_size == NUM_RANKS
    size = StepSize(run.config.data.max_prompt_length, run.config.data.max_response_length)
    fastest = ranking(run, RunShape.of(run.config, run.hf), size, load_constants()).best
    tried = verified(run, fastest, size, 1)
    best = next(found for found in tried if not found.problems)
    return [text for text in best.overrides if text.partition("=")[0].endswith(LAYOUT_KEYS)]


def step(model_dir: str, layout: list[str]) -> dict[str, float]:
    """Runs in every rank: weight sync and generation, log-probs of the reference, an update; the update's metrics."""
    config = load_config(
        [
            "trainer.device=cpu",
            "trainer.hang_timeout_s=0",
            f"trainer.n_gpus_per_node={NUM_RANKS}",
            override("trainer.report_dir", f"{model_dir}/run"),
            override("actor_rollout_ref.model.path", model_dir),
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={RESPONSE}",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
            f"{ENGINE}.dtype=float32",
            f"{ENGINE}.param_offload=true",
            f"{ENGINE}.grad_offload=true",
            f"{ENGINE}.optimizer_offload=true",
            f"{ROLLOUT}.n={SAMPLES}",
            f"{ROLLOUT}.dtype=float32",
            f"{ROLLOUT}.ignore_eos=true",
            f"{ROLLOUT}.enforce_eager=true",
            f"{ROLLOUT}.max_num_seqs=8",
            f"{ROLLOUT}.max_num_batched_tokens=32",
            f"{ROLLOUT}.num_gpu_blocks_override=64",
            *layout,
        ]
    )
    assert validate_config(config) == []
    worker = ActorRolloutRefWorker(config, "actor_rollout_ref")
    worker.init_model()
    worker.generate_sequences(_prompts(8 * SAMPLES // config.rollout_replicas))
    data_parallel = worker.groups.layout.data_parallel_size
    rows, size = 8 * SAMPLES // data_parallel, StepSize(PROMPT, RESPONSE)
    run_training(worker, rows, size, CollectiveLog(), MemoryMeter())
    metrics = getattr(worker, UPDATE)(batch_of(rows, size, config)).meta_info["metrics"]
    worker.row_store.close()
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def _prompts(num_rows: int) -> DataProto:
    raw = np.empty(num_rows, dtype=object)
    raw[:] = [[5 + row] * PROMPT for row in range(num_rows)]
    return DataProto.from_dict(
        non_tensors={"raw_prompt_ids": raw, "sampling_seeds": np.arange(num_rows).astype(object)},
        meta_info={"eos_token_id": 1, "pad_token_id": 1},
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_best_layout_of_moonlight_runs(tmp_path: Path) -> None:
    model, layout = tmp_path / "model", found_layout()
    config = tiny_moonlight_config(
        num_hidden_layers=27, n_routed_experts=64, num_experts_per_tok=6, num_attention_heads=16
    )
    write_tiny_checkpoint(model, config, seed=1, dtype=torch.float32)
    metrics = run_ranks(step, NUM_RANKS, str(model), layout, timeout_s=500)
    assert len(metrics) == NUM_RANKS
    for found in metrics:
        assert math.isfinite(found["actor/grad_norm"])
