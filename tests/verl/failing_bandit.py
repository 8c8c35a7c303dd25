"""The smallest policy with a worker that fails when it is told to, trained with restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from tests.verl.bandit import bandit_worker
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.recovery import fit_with_restarts
from verl.trainer.ppo.reward_process import make_reward_fn
from verl.utils.tokenizer import hf_tokenizer


def failing_worker(digits: list[int], failures: Path) -> type[Worker]:
    """A worker that fails in the step whose number names a file in ``failures``, which says how and how often.

    ``die 2``: SIGKILL to itself, twice; ``raise 1``: an exception, once; ``node 1``: SIGKILL to Ray on its node.
    """

    class FailingWorker(bandit_worker(digits)):  # type: ignore[misc]
        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="all"))
        def update_actor(self, data: DataProto) -> DataProto:
            order = failures / str(data.meta_info["global_step"])
            if self.rank == 0 and order.is_file():
                how, times = order.read_text().split()
                order.unlink() if times == "1" else order.write_text(f"{how} {int(times) - 1}")
                if how == "raise":
                    raise KeyError("bad data")
                if how == "node":
                    os.kill(int(os.environ["RAY_RAYLET_PID"]), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().update_actor(data)  # type: ignore[no-any-return]

    return FailingWorker


def run_failing(config: PPOTrainerConfig, failures: Path) -> list[RayPPOTrainer]:
    """Trains with restarts; the trainers that it took."""
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    digits = [int(tokenizer.get_vocab()[str(digit)]) for digit in range(10)]
    reward_fn = make_reward_fn(config, tokenizer)
    trainers = []

    def new_trainer(config: PPOTrainerConfig, metrics: Mapping[str, float]) -> RayPPOTrainer:
        trainers.append(
            RayPPOTrainer(config, tokenizer, failing_worker(digits, failures), reward_fn, run_metrics=metrics)
        )
        return trainers[-1]

    try:
        fit_with_restarts(config, new_trainer)
    finally:
        reward_fn.close()
    return trainers
