"""The smallest policy that the trainer can train: ten logits, one digit per answer.

``python -m tests.verl.bandit DIRECTORY [key=value ...]`` runs it as a driver of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megatron.core.dist_checkpointing.common import COMMON
from megatron.core.dist_checkpointing.manifest import (
    Manifest,
    file_problems,
    read_manifest,
    record_file,
    write_json,
    write_manifest,
)
from megatron.core.parallel_layout import ParallelLayout
from recipes.common.tokenizer import write_tokenizer
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.config import PPOTrainerConfig, load_config
from verl.trainer.config.override_text import override
from verl.trainer.ppo.observers import StepObserver
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.reward_process import make_reward_fn
from verl.trainer.ppo.stop_request import StopRequest
from verl.utils.tokenizer import hf_tokenizer

FUNCTION = str(Path(__file__).with_name("rewards_for_tests.py"))
RIGHT_DIGIT = 7


def write_inputs(root: Path) -> None:
    """Prompts whose answer is always the same digit, and a tokenizer."""
    row = {"data_source": "digits", "reward_model": {"ground_truth": str(RIGHT_DIGIT)}, "extra_info": {"index": 0}}
    rows = [{**row, "prompt": [{"role": "user", "content": f"digit {i}"}]} for i in range(16)]
    pq.write_table(pa.Table.from_pylist(rows), root / "data.parquet")
    write_tokenizer([f"digit {i}" for i in range(100)], root / "model", 300, 64)


def bandit_config(root: Path, *overrides: str) -> PPOTrainerConfig:
    """Six steps of four prompts, saved every second step."""
    return load_config(
        [
            override("data.train_files", root / "data.parquet"),
            override("data.val_files", root / "data.parquet"),
            "data.max_prompt_length=16",
            "data.max_response_length=2",
            "data.train_batch_size=4",
            override("actor_rollout_ref.model.path", root / "model"),
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.n=8",
            override("custom_reward_function.path", FUNCTION),
            "reward_model.num_workers=1",
            "trainer.n_gpus_per_node=1",
            "trainer.device=cpu",
            "trainer.total_training_steps=6",
            "trainer.save_freq=2",
            "trainer.test_freq=3",
            "trainer.log_val_generations=4",
            "trainer.max_actor_ckpt_to_keep=2",
            "trainer.logger=[console]",
            override("trainer.default_local_dir", root / "checkpoints"),
            override("trainer.report_dir", root),
            "ray_kwargs.num_cpus_per_worker=0.25",
            *overrides,
        ]
    )


def run_bandit(
    config: PPOTrainerConfig, observers: Sequence[StepObserver] = (), stop_request: StopRequest | None = None
) -> RayPPOTrainer:
    """Train on the Ray that is there; the workers and graders are gone when this returns or raises."""
    vocabulary = hf_tokenizer(config.actor_rollout_ref.model.path).get_vocab()
    worker = bandit_worker([int(vocabulary[str(digit)]) for digit in range(10)])
    return run_trainer(config, worker, None, observers, stop_request)


def run_trainer(
    config: PPOTrainerConfig,
    training_class: type,
    rollout_class: type | None = None,
    observers: Sequence[StepObserver] = (),
    stop_request: StopRequest | None = None,
) -> RayPPOTrainer:
    """Train with workers of these classes on the Ray that is there; as ``run_bandit``."""
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    reward_fn = make_reward_fn(config, tokenizer)
    trainer = RayPPOTrainer(config, tokenizer, training_class, reward_fn, rollout_class, None, stop_request)
    try:
        trainer.init_workers()
        trainer.observers += observers
        trainer.fit()
    finally:
        try:
            trainer.shutdown()
        finally:
            reward_fn.close()
    return trainer


def bandit_worker(digits: list[int]) -> type[Worker]:
    """Built in a function so that it is pickled by value: actors cannot import test modules."""
    dispatch = make_nd_compute_dataproto_dispatch_fn(mesh_name="all")

    class BanditWorker(Worker):
        def __init__(self, config: PPOTrainerConfig, role: str) -> None:
            super().__init__()
            self.logits = torch.zeros(10)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def init_model(self) -> None:
            torch.distributed.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
            self._register_dispatch_collect_info("all", self.rank, True)

        @register(dispatch_mode=dispatch)
        def generate_sequences(self, prompts: DataProto) -> DataProto:
            log_probs = self.logits.log_softmax(-1)
            seeds = prompts.non_tensor_batch["sampling_seeds"]
            picks = [
                int(torch.multinomial(log_probs.exp(), 1, generator=torch.Generator().manual_seed(int(s))))
                for s in seeds
            ]
            response = torch.tensor([[digits[pick], prompts.meta_info["eos_token_id"]] for pick in picks])
            tensors = {"responses": response, "response_mask": torch.ones_like(response)}
            return DataProto.from_dict(tensors, meta_info={"timing": {"generate_sequences": 0.0}})

        @register(dispatch_mode=dispatch)
        def update_actor(self, data: DataProto) -> DataProto:
            token_to_digit = {token: digit for digit, token in enumerate(digits)}
            picks = torch.tensor([token_to_digit[int(row[0])] for row in data.batch["responses"]])
            steps = torch.nn.functional.one_hot(picks, 10) - self.logits.softmax(-1)
            gradient = (data.batch["advantages"][:, :1] * steps).sum(0)
            torch.distributed.all_reduce(gradient)
            self.logits += 0.05 * gradient
            return DataProto(meta_info={"metrics": {"actor/grad_norm": float(gradient.norm())}})

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def save_checkpoint(self, checkpoint_path: str, **_unused: Any) -> None:
            if self.rank == 0:
                directory = Path(checkpoint_path)
                directory.mkdir(parents=True, exist_ok=True)
                torch.save({"logits": self.logits}, directory / "logits.pt")
                write_json(directory / COMMON, {})
                files = {name: record_file(directory / name) for name in ("logits.pt", COMMON)}
                write_manifest(directory, Manifest(ParallelLayout(world_size=self.world_size), files))
            torch.distributed.barrier()

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def verify_checkpoint(self, checkpoint_path: str) -> list[str]:
            return file_problems(Path(checkpoint_path), read_manifest(Path(checkpoint_path)), verify_digests=True)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def load_checkpoint(self, checkpoint_path: str) -> None:
            self.logits = torch.load(Path(checkpoint_path) / "logits.pt", weights_only=True)["logits"]

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def export_hf(self, path: str) -> None:
            if self.rank == 0:
                Path(path).mkdir(parents=True, exist_ok=True)
                (Path(path) / "best_digit").write_text(str(int(self.logits.argmax())))

    return BanditWorker


if __name__ == "__main__":
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    run_bandit(bandit_config(Path(sys.argv[1]), *sys.argv[2:]))
