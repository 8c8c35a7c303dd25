"""Saving and resuming the actor: weights, optimizer, scheduler and random states of every rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hf_formats.config import HFModelConfig
from megatron.core.dist_checkpointing import CheckpointSaver, load_checkpoint, verify_checkpoint
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import ProcessGroups
from mindspeed_llm.export_weights import export_weights
from mindspeed_llm.hf_checkpoint import save_hf_checkpoint
from verl.workers.config import CheckpointConfig

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class MegatronCheckpointManager:
    """Writes ``<local_path>/`` so that it exists only when complete; any layout reads it, the same one bit for bit.

    With ``async_save`` files are written beside the next steps; ``check`` and ``wait`` raise the failures.

    Attributes:
        model: this rank's stage, without its DDP wrapper.
        hf_dir: the HF directory that config and tokenizer are copied from when ``hf_model`` is saved.
    """

    config: CheckpointConfig
    model: nn.Module
    optimizer: DistributedOptimizer
    scheduler: OptimizerParamScheduler
    hf_config: HFModelConfig
    hf_dir: str
    groups: ProcessGroups

    def __post_init__(self) -> None:
        self.saver = CheckpointSaver(self.groups)

    def save_checkpoint(self, local_path: str, global_step: int = 0, latest_path: str | None = None) -> None:
        """Collective. The HF form comes first, so the sharded checkpoint, whose manifest is last, completes it all.

        ``latest_path`` gets the step's number after that, whoever is still alive then.
        """
        if "hf_model" in self.config.save_contents:
            self.export_hf(str(Path(local_path).parent / "huggingface"))
        contents = self.config.save_contents
        self.saver.save(
            local_path,
            self.model,
            self.optimizer if "optimizer" in contents else None,
            self.scheduler if "extra" in contents else None,
            {"global_step": global_step},
            random_states="extra" in contents,
            async_save=self.config.async_save,
            latest=None if latest_path is None else (latest_path, str(global_step)),
        )

    def check(self) -> None:
        """Raise ``OSError`` when this rank's part of a running save has failed; does not wait."""
        self.saver.check()

    def wait(self) -> None:
        """Collective. Wait until a running save is complete; ``OSError`` on all ranks when it failed."""
        self.saver.wait()

    def problems_of(self, local_path: str) -> list[str]:
        """Collective. Every file of a checkpoint that is missing or damaged by size or digest; ranks share the work."""
        return verify_checkpoint(local_path, self.groups)

    def load_checkpoint(self, local_path: str) -> int:
        """Collective. Restores what ``load_contents`` lists, all of which must be there; returns the global step.

        Without ``optimizer`` the master weights become the loaded ones and the moments stay as they are (zero in a new
        run); without ``extra`` the learning rate's schedule and the random generators stay as they are.
        """
        contents = self.config.loaded_contents
        extra = load_checkpoint(
            local_path,
            self.model,
            self.optimizer if "optimizer" in contents else None,
            self.scheduler if "extra" in contents else None,
            self.groups,
            random_states="extra" in contents,
        )
        if "optimizer" not in contents:
            self.optimizer.reload_model_params()
        return int(extra["global_step"])

    def export_hf(self, path: str) -> None:
        """Collective. Writes the current weights as a Hugging Face directory that ``transformers`` loads."""
        stream = export_weights(self.model, self.hf_config, self.groups)
        save_hf_checkpoint(stream, path, self.hf_dir, is_writer=self.groups.rank == 0)
        if self.groups.layout.world_size > 1:
            torch.distributed.barrier(self.groups.world)
