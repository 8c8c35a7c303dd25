"""``checkpoint.save_contents`` and ``load_contents``: what is written, what is read, what is refused or named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hf_formats.config import load_hf_config
from megatron.core.dist_checkpointing import saved_contents
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.ops.reference import reference_ops
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from mindspeed_llm.model import build_model
from tests.megatron.model_helpers import one_process_groups
from tests.mindspeed_llm.tiny import write_tiny_checkpoint
from verl.trainer.ppo.checkpointing import Checkpoint
from verl.utils.checkpoint import MegatronCheckpointManager
from verl.workers.config import ActorConfig, CheckpointConfig

EVERYTHING = ["model", "optimizer", "extra"]


@dataclass
class Job:
    model: DistributedDataParallel
    optimizer: DistributedOptimizer
    scheduler: OptimizerParamScheduler
    manager: MegatronCheckpointManager

    def train(self) -> None:
        """One optimizer step on gradients of one."""
        self.model.zero_grad_buffer()
        for buffer in self.model.param_and_grad_buffers:
            buffer.grads.tensor.fill_(1.0)
        self.model.grads_are_final = True
        assert self.optimizer.step()[0]
        self.scheduler.step(1)

    def moments(self) -> torch.Tensor:
        return torch.cat([shard.exp_avg.current for shard in self.optimizer.shards])

    def masters(self) -> dict[str, torch.Tensor]:
        return {part.name: part.tensors["master"] for part in self.optimizer.param_shards()}

    def params(self) -> dict[str, torch.Tensor]:
        return {name: param.detach().flatten().float() for name, param in self.model.module.named_parameters()}


@contextmanager
def _job(hf_dir: Path, seed: int, save: list[str], load: list[str] | None = None) -> Iterator[Job]:
    hf = load_hf_config(str(hf_dir))
    with one_process_groups() as groups:
        module = build_model(hf, groups, reference_ops(), params_dtype=torch.bfloat16)
        module.init_weights(seed)
        model = DistributedDataParallel(module.config, DistributedDataParallelConfig(), module, groups)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), model, groups, reference_ops())
        scheduler = OptimizerParamScheduler(optimizer, max_lr=1e-2, lr_decay_steps=9)
        config = CheckpointConfig(save_contents=save, load_contents=load)
        manager = MegatronCheckpointManager(config, module, optimizer, scheduler, hf, str(hf_dir), groups)
        yield Job(model, optimizer, scheduler, manager)


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    write_tiny_checkpoint(tmp_path / "hf")
    return tmp_path / "hf"


def test_a_checkpoint_of_the_model_alone_is_small_and_can_be_resumed(hf_dir: Path, tmp_path: Path) -> None:
    whole, alone = tmp_path / "whole" / "actor", tmp_path / "alone" / "actor"
    with _job(hf_dir, 3, EVERYTHING) as job:
        job.train()
        job.manager.save_checkpoint(str(whole), global_step=5)
        trained = job.params()
    with _job(hf_dir, 4, ["model"]) as job:
        job.manager.config = CheckpointConfig(save_contents=["model"], load_contents=EVERYTHING)
        assert job.manager.load_checkpoint(str(whole)) == 5
        assert job.moments().abs().max() > 0 and job.scheduler.num_steps == 1
        job.manager.save_checkpoint(str(alone), global_step=6)
    assert saved_contents(whole) == ("model", "optimizer", "extra")
    assert saved_contents(alone) == ("model",)
    size_of = {path: sum(file.stat().st_size for file in path.iterdir()) for path in (whole, alone)}
    # bf16 weights beside fp32 masters and two moments: 2 of 14 bytes a parameter, and the headers of both
    assert size_of[alone] < 0.35 * size_of[whole]

    with _job(hf_dir, 9, ["model"]) as job:
        torch.manual_seed(11)
        before = torch.get_rng_state()
        assert job.manager.load_checkpoint(str(alone)) == 6
        torch.testing.assert_close(job.params(), trained, rtol=0, atol=0)
        torch.testing.assert_close(job.masters(), trained, rtol=0, atol=0)  # what the next update starts from
        assert job.moments().abs().max() == 0 and job.scheduler.num_steps == 0
        assert torch.equal(torch.get_rng_state(), before)


def test_what_a_resume_would_lack_is_named(hf_dir: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "global_step_6")
    with _job(hf_dir, 4, ["model"]) as job:
        job.manager.save_checkpoint(str(checkpoint.actor), global_step=6)
    checkpoint.check_contents(["model"])
    with pytest.raises(ValueError, match=r"holds model and no optimizer, extra .*load_contents=\[model\]'"):
        checkpoint.check_contents(EVERYTHING)


def test_contents_that_cannot_be_resumed_are_refused() -> None:
    def problems_of(save: list[str], load: list[str] | None = None) -> str:
        actor = ActorConfig(ppo_micro_batch_size_per_gpu=1, checkpoint=CheckpointConfig(save, load))
        return "\n".join(actor.problems("actor"))

    assert problems_of(["model", "hf_model"]) == ""
    assert "save_contents is ['hf_model']; it must have model" in problems_of(["hf_model"])
    assert "load_contents has weights; expected model, optimizer, extra, hf_model" in problems_of(
        EVERYTHING, ["model", "weights"]
    )
    assert CheckpointConfig(["model", "hf_model"]).loaded_contents == ("model",)
