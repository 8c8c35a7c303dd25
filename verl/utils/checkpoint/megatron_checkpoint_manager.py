"""Saving and resuming the actor: weights, optimizer, scheduler and random states of every rank."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import nn

from megatron.core.dist_checkpointing import load_checkpoint, save_checkpoint
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import ProcessGroups
from mindspeed_llm.hf_config import HFModelConfig
from mindspeed_llm.weights import export_weights, save_hf_checkpoint
from verl.workers.config import CheckpointConfig

logger = logging.getLogger(__name__)


class MegatronCheckpointManager:
    """Writes ``<local_path>/`` so that it exists only when complete, and reads it back bit for bit.

    Args:
        model: this rank's stage, without its DDP wrapper.
        hf_dir: the HF directory that config and tokenizer are copied from when ``hf_model`` is saved.
    """

    def __init__(
        self,
        checkpoint_config: CheckpointConfig,
        model: nn.Module,
        optimizer: DistributedOptimizer,
        scheduler: OptimizerParamScheduler,
        hf_config: HFModelConfig,
        hf_dir: str,
        groups: ProcessGroups,
    ) -> None:
        self.config = checkpoint_config
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.hf_config = hf_config
        self.hf_dir = hf_dir
        self.groups = groups

    def save_checkpoint(self, local_path: str, global_step: int = 0) -> None:
        """Collective. The HF form comes first, so the sharded checkpoint, whose manifest is last, completes it all."""
        if "hf_model" in self.config.save_contents:
            self.export_hf(str(Path(local_path).parent / "huggingface"))
        save_checkpoint(
            local_path, self.model, self.optimizer, self.scheduler, {"global_step": global_step}, self.groups
        )

    def load_checkpoint(self, local_path: str) -> int:
        """Collective. Restores everything that ``save_checkpoint`` wrote; returns its global step."""
        extra = load_checkpoint(local_path, self.model, self.optimizer, self.scheduler, self.groups)
        return int(extra["global_step"])

    def export_hf(self, path: str) -> None:
        """Collective. Writes the current weights as a Hugging Face directory that ``transformers`` loads."""
        stream = export_weights(self.model, self.hf_config, self.groups.layout, self.groups)
        save_hf_checkpoint(stream, path, self.hf_dir, is_writer=self.groups.rank == 0)
        if self.groups.layout.world_size > 1:
            torch.distributed.barrier()
