"""This repository's training engine in one process, as benchmarks and a GPU day drive it without a recipe.

Letters: B sequences of a micro-batch, T tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel, ModelChunks
from megatron.core.ops import TrainOps
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups, initialize_model_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from mindspeed_llm.model import build_model
from tools.workshop.bench.models import Batch, parsed

TokenLoss = Callable[[Tensor], Tensor]
"""From a token's loss, minus its label's log-prob, [T] of a whole batch to what is made smaller."""


class MicroBatch(NamedTuple):
    """Token ids, positions and labels [T], weights fp32 [T]: 0 at the end of a sequence, which has no label."""

    ids_T: Tensor
    positions_T: Tensor
    labels_T: Tensor
    weights_T: Tensor
    packed: PackedSeqParams


class TrainEngine:
    """A model, its gradients in flat buffers and its optimizer, which updates fp32 master weights.

    Without ``tokens_per_micro_batch`` a packed batch is one micro-batch. ``model_fields``: of the model's config.
    """

    def __init__(
        self,
        raw: dict[str, Any],
        ops: TrainOps,
        device: str,
        params_dtype: torch.dtype,
        optimizer: OptimizerConfig,
        ddp: DistributedDataParallelConfig,
        tokens_per_micro_batch: int | None = None,
        **model_fields: Any,
    ) -> None:
        self.hf, self.groups = parsed(raw), _groups()
        self.device, self.tokens_per_micro_batch = torch.device(device), tokens_per_micro_batch
        with self.device:
            model = build_model(
                self.hf, self.groups, ops, params_dtype=params_dtype, calculate_per_token_loss=True, **model_fields
            )
        _init_weights(model, self.device)
        self.model = DistributedDataParallel(model.config, ddp, model, self.groups)
        self.optimizer = get_megatron_optimizer(optimizer, self.model, self.groups, ops)
        self.grad_norm = 0.0  # before clipping, of the last update

    def step(self, batch: Batch, loss: TokenLoss | None = None) -> float:
        """Forward, backward and update on all sequences; returns the loss, by default the mean of a token."""
        value = self.gradients(batch, loss)
        _, self.grad_norm, _ = self.optimizer.step()
        return value

    def gradients(self, batch: Batch, loss: TokenLoss | None = None) -> float:
        """Forward and backward; the loss. A ``loss`` sees the batch as one micro-batch."""
        num_labels = batch.num_tokens - len(batch.sequences)
        max_tokens = self.tokens_per_micro_batch or batch.num_tokens
        parts = list(micro_batches(batch, max_tokens))
        assert loss is None or len(parts) == 1, f"a loss of its own over {len(parts)} micro-batches"

        def forward_step(rest: Iterator[list[tuple[int, ...]]], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            micro = micro_batch(next(rest), self.device)
            losses_T = model(micro.ids_T, micro.positions_T, micro.packed, micro.labels_T)

            def loss_func(losses_T: Tensor) -> tuple[Tensor, Tensor]:
                value = (losses_T * micro.weights_T).sum() / num_labels if loss is None else loss(losses_T)
                return value, value.detach()

            return losses_T, loss_func

        self.optimizer.zero_grad()
        values = get_forward_backward_func(self.groups)(
            forward_step_func=forward_step,
            data_iterator=iter(parts),
            model=self.model,
            num_microbatches=len(parts),
            seq_length=max_tokens,
            micro_batch_size=1,
        )
        finalize_model_grads(self.model, self.groups)
        return sum(float(value) for value in values)


@cache
def _groups() -> ProcessGroups:
    """Those of the one process, which no collective leaves."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return initialize_model_parallel()


@torch.no_grad()
def _init_weights(model: GPTModel | ModelChunks, device: torch.device) -> None:
    """The model's own draw, for which a host takes ten seconds a billion; an accelerator's is another of its kind."""
    if device.type == "cpu":
        model.init_weights(0)
        return
    for name, param in model.named_parameters():
        if param.ndim == 1:
            param.fill_(0.0 if name.endswith("bias") else 1.0)  # or a norm
        else:
            param.normal_(std=model.config.init_method_std)
    for name, buffer in model.named_buffers():
        if name.endswith(("expert_bias", "local_tokens_per_expert")):
            buffer.zero_()


def micro_batch(sequences: list[tuple[int, ...]], device: torch.device) -> MicroBatch:
    """The sequences one after another."""
    lengths = [len(ids) for ids in sequences]
    ids_T = torch.tensor([token for ids in sequences for token in ids])
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    labels_T = torch.tensor([token for ids in sequences for token in [*ids[1:], 0]])
    weights_T = torch.tensor([float(i < length - 1) for length in lengths for i in range(length)])
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    ids_T, positions_T, labels_T, weights_T = (x.to(device) for x in (ids_T, positions_T, labels_T, weights_T))
    return MicroBatch(ids_T, positions_T, labels_T, weights_T, PackedSeqParams(bounds, max(lengths)))


def micro_batches(batch: Batch, max_tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Sequences in order, as many as fit."""
    current: list[tuple[int, ...]] = []
    for ids in batch.sequences:
        if current and sum(map(len, current)) + len(ids) > max_tokens:
            yield current
            current = []
        current.append(ids)
    yield current
