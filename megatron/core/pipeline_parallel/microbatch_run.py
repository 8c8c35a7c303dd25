"""Forward and backward of single micro-batches on one stage: the part that all schedules share."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from megatron.core.models.gpt.gpt_model import model_chunks
from megatron.core.parallel_state import ProcessGroups
from megatron.core.pipeline_parallel.p2p_communication import Shape
from megatron.core.transformer.moe.aux_loss import set_aux_loss_scale
from megatron.core.transformer.transformer_config import TransformerConfig

LossFunc = Callable[..., Any]
ForwardStepFunc = Callable[[Iterator[Any], nn.Module], tuple[Tensor, LossFunc]]


class MicroBatchRun:
    """Runs the chunks of ``model`` on micro-batches and collects what the loss function returns, in their order.

    ``data_iterator`` yields every micro-batch once, whatever the number of chunks. ``shapes[i]``: what travels between
    stages for micro-batch i.
    """

    def __init__(
        self,
        forward_step_func: ForwardStepFunc,
        data_iterator: Iterator[Any],
        model: nn.Module,
        groups: ProcessGroups,
        shapes: Sequence[Shape],
        forward_only: bool,
    ) -> None:
        self.forward_step_func = forward_step_func
        self.model = model
        self.chunks = model_chunks(model)
        self.data_iterators = itertools.tee(data_iterator, len(self.chunks))
        self.groups, self.shapes = groups, shapes
        self.config = cast(TransformerConfig, model.config)
        self.device = next(model.parameters()).device
        self.results: list[Any] = []
        is_sum = self.config.calculate_per_token_loss
        self.loss_scale = 1.0 if is_sum else 1.0 / len(shapes)
        if not is_sum and not forward_only:
            set_aux_loss_scale(model, self.loss_scale)
        self.forward_only = forward_only
        self._num_forwards = [0] * len(self.chunks)
        self._num_backwards = [0] * len(self.chunks)
        self._in_flight: list[deque[_InFlight]] = [deque() for _ in self.chunks]

    def forward(self, input_tensor: Tensor | None, chunk: int = 0) -> Tensor:
        """Return what ``chunk`` sends on for its next micro-batch; the last chunk returns its output or loss."""
        part = self.chunks[chunk]
        part.set_input_tensor(input_tensor)  # type: ignore[operator]
        microbatch = self._num_forwards[chunk]
        try:
            with record_function(f"micro_batch {microbatch} forward"):
                output, loss_func = self.forward_step_func(self.data_iterators[chunk], part)
        except StopIteration:
            raise ValueError(
                f"data_iterator ended after {microbatch} micro-batches; tensor_shapes announced {len(self.shapes)}"
            ) from None
        self._num_forwards[chunk] += 1
        if self.groups.is_last_stage and chunk == len(self.chunks) - 1:
            output = self._finish(output, loss_func)
        elif tuple(output.shape) != tuple(self.shapes[microbatch]):
            # The receiver has allocated the announced shape; another shape would be misread, or hang.
            raise ValueError(
                f"micro-batch {microbatch}: the output of chunk {chunk} of this stage is {tuple(output.shape)}; "
                f"tensor_shapes announced {tuple(self.shapes[microbatch])}"
            )
        if not self.forward_only:
            self._in_flight[chunk].append(_InFlight.of(input_tensor, output))
        return output

    def backward(self, output_grad: Tensor | None, chunk: int = 0) -> Tensor | None:
        """Back-propagate the next micro-batch of ``chunk``; returns its input's gradient (None where it has none)."""
        microbatch = self._num_backwards[chunk]
        self._num_backwards[chunk] += 1
        backward_of = getattr(self.model, "backward_of", None)
        # The last micro-batch of this chunk completes the gradients of its parameters, independent of the other chunks.
        is_last = microbatch == len(self.shapes) - 1
        in_order = backward_of(microbatch, is_last) if backward_of else nullcontext()
        with in_order, record_function(f"micro_batch {microbatch} backward"):
            return self._in_flight[chunk].popleft().backward(output_grad)

    def _finish(self, output: Tensor, loss_func: LossFunc) -> Tensor:
        loss, metrics = loss_func(output)
        self.results.append(metrics)
        scaled: Tensor = loss * self.loss_scale
        return scaled


@dataclass(frozen=True)
class _InFlight:
    """A micro-batch between its forward and its backward.

    It keeps the graph and not the output: the next stage has a copy of the output, and nothing here reads it again
    (upstream: ``deallocate_pipeline_outputs``).
    """

    input_tensor: Tensor | None
    root: Tensor
    grads: list[Tensor | None]

    @staticmethod
    def of(input_tensor: Tensor | None, output: Tensor) -> _InFlight:
        grads: list[Tensor | None] = []
        return _InFlight(input_tensor, _Root.apply(output, grads), grads)

    def backward(self, output_grad: Tensor | None) -> Tensor | None:
        self.grads.append(output_grad)
        self.root.backward()
        return None if self.input_tensor is None else self.input_tensor.grad


class _Root(torch.autograd.Function):
    """A scalar that stands for ``output`` in its graph; its backward starts with the gradient put into ``grads``."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, grads: list[Tensor | None]) -> Tensor:
        ctx.grads, ctx.is_loss = grads, output.dim() == 0
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        output_grad = ctx.grads.pop()
        if output_grad is None:
            assert ctx.is_loss, "only a loss, a scalar, has no gradient from the next stage"
            return torch.ones_like(grad), None
        return output_grad, None
