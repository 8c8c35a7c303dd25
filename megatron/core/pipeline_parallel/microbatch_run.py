"""Forward and backward of single micro-batches on one stage: what every schedule has in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from megatron.core.models.gpt.model_chunks import model_chunks
from megatron.core.parallel_state import ProcessGroups
from megatron.core.pipeline_parallel.p2p_communication import Shape
from megatron.core.transformer.moe.aux_loss import set_aux_loss_scale

LossFunc = Callable[..., Any]
ForwardStepFunc = Callable[[Iterator[Any], nn.Module], tuple[torch.Tensor, LossFunc]]


class MicroBatchRun:
    """Runs the chunks of ``model`` on micro-batches and collects what the loss function returns, in their order.

    ``data_iterator`` yields every micro-batch once, whatever the number of chunks; or is a list of one iterator for
    each chunk, as upstream. ``shapes[i]``: what travels between stages for micro-batch i.
    """

    def __init__(
        self,
        forward_step_func: ForwardStepFunc,
        data_iterator: Iterator[Any] | Sequence[Iterator[Any]],
        model: nn.Module,
        num_microbatches: int,
        groups: ProcessGroups,
        shapes: Sequence[Shape],
        collect_non_loss_data: bool,
        forward_only: bool,
    ) -> None:
        if collect_non_loss_data and not forward_only:
            raise ValueError("collect_non_loss_data needs forward_only: without a loss there is nothing to derive")
        self.forward_step_func = forward_step_func
        self.model = model
        self.chunks = _callable_chunks(model)
        self.data_iterators = _iterators(data_iterator, len(self.chunks))
        self.num_microbatches = num_microbatches
        self.shapes = shapes
        self.has_loss = groups.is_last_stage
        self.collect_non_loss_data = collect_non_loss_data
        self.results: list[Any] = []
        is_sum = model_config(model).calculate_per_token_loss
        self.loss_scale = 1.0 if is_sum else 1.0 / num_microbatches
        if not is_sum and not forward_only:
            set_aux_loss_scale(model, self.loss_scale)
        self._num_forwards = [0] * len(self.chunks)
        self._num_backwards = [0] * len(self.chunks)

    def forward(self, input_tensor: torch.Tensor | None, chunk: int = 0) -> torch.Tensor:
        """Output of ``chunk`` for its next micro-batch; of the model's last chunk the scaled loss."""
        part = self.chunks[chunk]
        part.set_input_tensor(input_tensor)  # type: ignore[operator]
        try:
            output, loss_func = self.forward_step_func(self.data_iterators[chunk], part)
        except StopIteration:
            raise ValueError(
                f"data_iterator ended after {self._num_forwards[chunk]} micro-batches; "
                f"num_microbatches is {self.num_microbatches}"
            ) from None
        microbatch = self._num_forwards[chunk]
        self._num_forwards[chunk] += 1
        if not self.has_loss or chunk != len(self.chunks) - 1:
            if tuple(output.shape) != tuple(self.shapes[microbatch]):
                # The receiver has allocated what was announced; anything else would be misread, or hang.
                raise ValueError(
                    f"micro-batch {microbatch}: the output of chunk {chunk} of this stage is {tuple(output.shape)}; "
                    f"tensor_shapes announced {tuple(self.shapes[microbatch])}"
                )
            return output
        if self.collect_non_loss_data:
            self.results.append(loss_func(output, non_loss_data=True))
            return output
        loss, metrics = loss_func(output)
        self.results.append(metrics)
        scaled: torch.Tensor = loss * self.loss_scale
        return scaled

    def backward(
        self,
        input_tensor: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_grad: torch.Tensor | None,
        chunk: int = 0,
    ) -> torch.Tensor | None:
        """Back-propagate the next micro-batch of ``chunk``; returns its input's gradient (None where it has none)."""
        microbatch = self._num_backwards[chunk]
        self._num_backwards[chunk] += 1
        backward_of = getattr(self.model, "backward_of", None)
        # The last one of this chunk completes the gradients of its parameters, whatever the other chunks still do.
        is_last = microbatch == self.num_microbatches - 1
        with backward_of(microbatch, is_last) if backward_of else nullcontext():
            torch.autograd.backward(output_tensor, grad_tensors=output_grad)
        return None if input_tensor is None else input_tensor.grad


def model_config(model: nn.Module) -> Any:
    """The config of the model, from whatever wraps it."""
    return model.config


def _callable_chunks(model: nn.Module) -> Sequence[nn.Module]:
    """The chunks, or the model as it was given: its wrapper's forward is part of it."""
    chunks = model_chunks(model)
    return chunks if len(chunks) > 1 else [model]


def _iterators(given: Iterator[Any] | Sequence[Iterator[Any]], num_chunks: int) -> Sequence[Iterator[Any]]:
    if not isinstance(given, Sequence):
        return itertools.tee(given, num_chunks) if num_chunks > 1 else [given]
    if len(given) != num_chunks:
        raise ValueError(f"data_iterator has {len(given)} iterators for {num_chunks} chunks of the model")
    return given
