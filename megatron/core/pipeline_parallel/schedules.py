"""Runs the micro-batches of one step through the stages: without pipelining, as 1F1B, or as interleaved 1F1B."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.parallel_state import ProcessGroups
from megatron.core.pipeline_parallel import p2p_communication as p2p
from megatron.core.pipeline_parallel.agreement import microbatch_shapes
from megatron.core.pipeline_parallel.microbatch_run import ForwardStepFunc, MicroBatchRun
from megatron.core.pipeline_parallel.p2p_communication import PipelineLink, Receiving, RingTransfers, Shape
from megatron.core.pipeline_parallel.schedule_table import Task, timetable


def get_forward_backward_func(groups: ProcessGroups) -> Callable[..., list[Any]]:
    """``forward_backward`` with ``groups`` bound."""
    return functools.partial(forward_backward, groups=groups)


def forward_backward(
    *,
    forward_step_func: ForwardStepFunc,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]],
    model: nn.Module,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    groups: ProcessGroups,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    tensor_shapes: Sequence[Shape] | None = None,
) -> list[Any]:
    """Forward and backward of every micro-batch, in the schedule for this pipeline size and number of chunks.

    ``forward_step_func(data_iterator, model) -> (output, loss_func)`` runs on every stage, with one chunk at a time;
    ``loss_func(output) -> (loss, metrics)`` on the last one. ``tensor_shapes[i]`` is the shape (T_i / TP, H) of what
    travels for micro-batch i, equal on all stages; by default all are (seq_length * micro_batch_size / TP, H). Ranks
    that do not agree on the micro-batches raise ``ValueError`` before anything moves (``agreement``); collective over
    the world.

    Gradients: with ``config.calculate_per_token_loss`` their plain sum over micro-batches (the caller has normalised
    the loss over the whole batch), else their mean. Nothing is reduced over data parallel ranks here.

    Returns the metrics of every micro-batch on the last stage and [] elsewhere; with ``collect_non_loss_data`` the
    results of ``loss_func(output, non_loss_data=True)`` instead, which needs ``forward_only``.
    """
    shapes = microbatch_shapes(
        tensor_shapes, num_microbatches, seq_length * micro_batch_size, model, groups, forward_only
    )
    run = MicroBatchRun(forward_step_func, data_iterator, model, groups, shapes, collect_non_loss_data, forward_only)
    with torch.set_grad_enabled(not forward_only):
        if groups.layout.pipeline_model_parallel_size == 1:
            forward_backward_no_pipelining(run)
        elif groups.layout.virtual_pipeline_model_parallel_size > 1:
            forward_backward_pipelining_with_interleaving(run)
        else:
            forward_backward_pipelining_without_interleaving(run)
    return run.results


def forward_backward_no_pipelining(run: MicroBatchRun) -> None:
    """Forward and backward of each micro-batch in turn."""
    for _ in run.shapes:
        run.forward(None)
        if not run.forward_only:
            run.backward(None)


def forward_backward_pipelining_without_interleaving(run: MicroBatchRun) -> None:
    """1F1B (PipeDream-Flush, arXiv 2006.09503): at most PP - stage micro-batches are in flight on a stage.

    Warm-up forwards, steady pairs, cool-down backwards; the i-th backward is that of the i-th forward.
    """
    groups, shapes, num_microbatches = run.groups, run.shapes, len(run.shapes)
    link = PipelineLink.of(groups, run.config.pipeline_dtype, run.device)
    num_warmup = min(groups.layout.pipeline_model_parallel_size - 1 - groups.coords.pp, num_microbatches)
    if run.forward_only:
        num_warmup = num_microbatches
    num_steady = num_microbatches - num_warmup

    for i in range(num_warmup):
        p2p.send_forward(run.forward(p2p.recv_forward(shapes[i], link)), link)
    if run.forward_only:
        return

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


def forward_backward_pipelining_with_interleaving(run: MicroBatchRun) -> None:
    """Interleaved 1F1B: every stage has V chunks of the model, and the pipeline's bubble is V times smaller.

    Narayanan et al. 2021 (arXiv 2104.04473, section 2.2), with upstream's tables of tasks.
    As many micro-batches as there are stages, upstream's default, run through one chunk before the next begins. We
    differ in two points: any number of micro-batches works (upstream refuses a last group smaller than the number of
    stages), and every transfer is posted at once and waited for when it is used, so that it overlaps with computing
    (upstream's ``overlap_p2p_comm``).
    """
    groups, shapes = run.groups, run.shapes
    num_stages = groups.layout.pipeline_model_parallel_size
    num_chunks = groups.layout.virtual_pipeline_model_parallel_size
    if len(run.chunks) != num_chunks:
        raise ValueError(
            f"the model has {len(run.chunks)} chunks; virtual_pipeline_model_parallel_size is {num_chunks}"
        )
    steps = timetable(len(shapes), num_chunks, num_stages, num_stages, run.forward_only)[groups.coords.pp]
    transfers = RingTransfers(groups, run.config.pipeline_dtype, run.device)
    arriving: dict[tuple[bool, Task], Receiving] = {}
    for step in steps:
        result: Tensor | None = None
        if step.task is not None:
            receiving = arriving.pop((step.is_backward, step.task), None)
            received = None if receiving is None else receiving.wait()
            # The chunk's micro-batches come in ascending order in both directions.
            compute = run.backward if step.is_backward else run.forward
            result = compute(received, step.task.chunk)
        posted = transfers.exchange(
            step.is_backward,
            result if step.sends else None,
            None if step.receives is None else shapes[step.receives.microbatch],
            f"micro-batch {step.receives.microbatch}, chunk {step.receives.chunk}" if step.receives else "",
        )
        if step.receives is not None and posted is not None:
            arriving[step.is_backward, step.receives] = posted
    transfers.finish()
    assert not arriving, f"received and not used: {sorted(arriving)}"
