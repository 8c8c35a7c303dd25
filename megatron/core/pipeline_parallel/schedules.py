"""Runs the micro-batches of one step through the stages: without pipelining, as 1F1B, or as interleaved 1F1B."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.parallel_state import ProcessGroups
from megatron.core.pipeline_parallel import p2p_communication as p2p
from megatron.core.pipeline_parallel.agreement import microbatch_shapes
from megatron.core.pipeline_parallel.interleaved import forward_backward_pipelining_with_interleaving
from megatron.core.pipeline_parallel.microbatch_run import ForwardStepFunc, MicroBatchRun, model_config
from megatron.core.pipeline_parallel.p2p_communication import PipelineLink, Shape
from megatron.core.pipeline_parallel.schedule_table import (
    convert_schedule_table_to_order,
    get_pp_rank_microbatches,
    get_schedule_table,
)

__all__ = [
    "convert_schedule_table_to_order",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "get_forward_backward_func",
    "get_pp_rank_microbatches",
    "get_schedule_table",
]


def get_forward_backward_func(groups: ProcessGroups) -> Callable[..., list[Any]]:
    """The schedule for this pipeline size, with ``groups`` bound; its keywords are those of the functions here."""
    if groups.layout.pipeline_model_parallel_size == 1:
        return functools.partial(forward_backward_no_pipelining, groups=groups)
    if groups.layout.virtual_pipeline_model_parallel_size > 1:
        return functools.partial(forward_backward_pipelining_with_interleaving, groups=groups)
    return functools.partial(forward_backward_pipelining_without_interleaving, groups=groups)


def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStepFunc,
    data_iterator: Iterator[Any],
    model: nn.Module,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    groups: ProcessGroups,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    tensor_shapes: Sequence[Shape] | None = None,
) -> list[Any]:
    """Forward and backward of every micro-batch in turn; see the pipelined schedule for arguments and result."""
    shapes = microbatch_shapes(
        tensor_shapes, num_microbatches, seq_length * micro_batch_size, model, groups, forward_only
    )
    run = MicroBatchRun(
        forward_step_func, data_iterator, model, num_microbatches, groups, shapes, collect_non_loss_data, forward_only
    )
    with torch.set_grad_enabled(not forward_only):
        for _ in range(num_microbatches):
            run.forward(None)
            if not forward_only:
                run.backward(None)
    return run.results


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: ForwardStepFunc,
    data_iterator: Iterator[Any],
    model: nn.Module,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    groups: ProcessGroups,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    tensor_shapes: Sequence[Shape] | None = None,
) -> list[Any]:
    """1F1B (PipeDream-Flush, arXiv 2006.09503): at most PP - stage micro-batches are in flight on a stage.

    ``forward_step_func(data_iterator, model) -> (output, loss_func)`` runs on every stage; ``loss_func(output) ->
    (loss, metrics)`` on the last one. ``tensor_shapes[i]`` is the shape (T_i / TP, H) of what travels for
    micro-batch i, equal on all stages; by default all are (seq_length * micro_batch_size / TP, H). Ranks that do not
    agree on the micro-batches raise ``ValueError`` before anything moves (``agreement``); collective over the world.

    Gradients: with ``config.calculate_per_token_loss`` their plain sum over micro-batches (the caller has normalised
    the loss over the whole batch), else their mean. Nothing is reduced over data parallel ranks here.

    Returns the metrics of every micro-batch on the last stage and [] elsewhere; with ``collect_non_loss_data`` the
    results of ``loss_func(output, non_loss_data=True)`` instead, which needs ``forward_only``.
    """
    shapes = microbatch_shapes(
        tensor_shapes, num_microbatches, seq_length * micro_batch_size, model, groups, forward_only
    )
    link = PipelineLink.of(groups, model_config(model).pipeline_dtype, next(model.parameters()).device)
    run = MicroBatchRun(
        forward_step_func, data_iterator, model, num_microbatches, groups, shapes, collect_non_loss_data, forward_only
    )
    with torch.set_grad_enabled(not forward_only):
        if forward_only:
            _all_forward(run, link, shapes)
        else:
            _one_forward_one_backward(run, link, shapes, groups)
    return run.results


def _all_forward(run: MicroBatchRun, link: PipelineLink, shapes: Sequence[Shape]) -> None:
    for shape in shapes:
        p2p.send_forward(run.forward(p2p.recv_forward(shape, link)), link)


def _one_forward_one_backward(
    run: MicroBatchRun, link: PipelineLink, shapes: Sequence[Shape], groups: ProcessGroups
) -> None:
    """Warm-up forwards, steady pairs, cool-down backwards; the i-th backward is that of the i-th forward."""
    num_stages, num_microbatches = groups.layout.pipeline_model_parallel_size, len(shapes)
    num_warmup = min(num_stages - 1 - groups.coords.pp, num_microbatches)
    num_steady = num_microbatches - num_warmup

    for i in range(num_warmup):
        p2p.send_forward(run.forward(p2p.recv_forward(shapes[i], link)), link)

    input_tensor = p2p.recv_forward(shapes[num_warmup], link) if num_steady else None
    for i in range(num_steady):
        output_grad = p2p.send_forward_recv_backward(run.forward(input_tensor), shapes[i], link)
        input_grad = run.backward(output_grad)
        if i + 1 < num_steady:
            input_tensor = p2p.send_backward_recv_forward(input_grad, shapes[num_warmup + i + 1], link)
        else:
            p2p.send_backward(input_grad, link)

    for i in range(num_steady, num_microbatches):
        p2p.send_backward(run.backward(p2p.recv_backward(shapes[i], link)), link)
