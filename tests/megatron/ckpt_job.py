"""A tiny DeepSeek-V3 training job in any layout, on the same tokens, for the checkpoint tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.core.context_parallel.zigzag import zigzag_indices
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import make_gpt_model
from megatron.core.ops import reference_ops
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import ProcessGroups
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.megatron.model_helpers import PackedBatch, packed_batch, tiny_config

_LENGTHS = [[4, 8], [12], [4, 4, 4], [8, 4]]  # one micro-batch each, four a step; halves divide over CP 2


def job_config(**changes: Any) -> MLATransformerConfig:
    """Four layers, the first dense; a router bias that moves."""
    values = {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "vocab_size": 40,
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 16,
        "moe_layer_freq": (0, 1, 1, 1),
        "moe_router_bias_update_rate": 1e-2,
        "calculate_per_token_loss": True,
    }
    return replace(tiny_config(**values), **changes)


class TrainingJob:
    """Model, optimizer and scheduler of this rank; ``train`` continues wherever the state says."""

    def __init__(
        self, groups: ProcessGroups, *, seed: int = 7, optimizer: Mapping[str, Any] | None = None, **changes: Any
    ) -> None:
        self.groups = groups
        optimizer_config = OptimizerConfig(lr=1e-2, adam_eps=1e-4, **(optimizer or {}))
        config = job_config(sequence_parallel=groups.tp.size() > 1, **changes)
        module = make_gpt_model(config, groups, reference_ops())
        module.init_weights(seed)
        for name, param in module.named_parameters():
            param.requires_grad_(not name.endswith("router.weight"))  # frozen, and still in the checkpoint
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=optimizer_config.use_distributed_optimizer)
        self.model = DistributedDataParallel(config, ddp_config, module, groups)
        self.optimizer: DistributedOptimizer = get_megatron_optimizer(
            optimizer_config, self.model, groups, reference_ops()
        )
        self.scheduler = OptimizerParamScheduler(self.optimizer, max_lr=1e-2, lr_decay_steps=9, lr_decay_style="linear")

    @property
    def state(self) -> tuple[nn.Module, DistributedOptimizer, OptimizerParamScheduler]:
        """What checkpoints save and load."""
        return self.model, self.optimizer, self.scheduler

    def train(self, num_steps: int) -> list[float]:
        """Gradient norms of the next steps."""
        return [self._step() for _ in range(num_steps)]

    def _step(self) -> float:
        groups, config = self.groups, self.model.config
        step = self.optimizer.num_steps
        batches = [packed_batch(lengths, config.vocab_size, seed=10 * step + i) for i, lengths in enumerate(_LENGTHS)]
        own = batches[groups.coords.dp :: groups.layout.data_parallel_size]
        self.optimizer.zero_grad()
        get_forward_backward_func(groups)(
            forward_step_func=self._forward_step,
            data_iterator=iter(own),
            model=self.model,
            tensor_shapes=[(12 // groups.cp.size() // groups.tp.size(), config.hidden_size)] * len(own),
        )
        finalize_model_grads(self.model, groups)
        is_updated, grad_norm, _ = self.optimizer.step()
        assert is_updated
        self.scheduler.step()
        return grad_norm

    def _forward_step(
        self, batches: Iterator[PackedBatch], model: nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(batches)
        own = zigzag_indices(batch.params.cu_seqlens, self.groups.cp.size(), self.groups.cp.rank())

        def loss_func(loss_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            return loss_T.sum() / 48, {}

        ids_T, positions_T, labels_T = (values[own] for values in (batch.ids_T, batch.positions_T, batch.labels_T))
        return model(ids_T, positions_T, batch.params, labels_T=labels_T), loss_func


def seed_all(seed: int) -> None:
    """Seed python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def read_whole(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by torch's own reader; ``rng`` left out."""
    reader = dcp.FileSystemReader(directory)
    saved = reader.read_metadata().state_dict_metadata
    whole = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in saved.items()
        if not key.startswith("rng.")
    }
    dcp.load(whole, storage_reader=reader)
    return whole
