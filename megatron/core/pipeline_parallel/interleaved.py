"""Interleaved 1F1B: every stage has V chunks of the model, and the pipeline's bubble is V times smaller.

Narayanan et al. 2021 (arXiv 2104.04473, section 2.2), with upstream's tables of tasks. We differ in two points: any
number of micro-batches works (upstream refuses a last group smaller than the number of stages), and every transfer is
posted at once and waited for when it is used, so that it overlaps with computing (upstream's ``overlap_p2p_comm``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.parallel_state import ProcessGroups
from megatron.core.pipeline_parallel.agreement import microbatch_shapes
from megatron.core.pipeline_parallel.microbatch_run import ForwardStepFunc, MicroBatchRun, model_config
from megatron.core.pipeline_parallel.p2p_communication import Receiving, RingTransfers, Shape
from megatron.core.pipeline_parallel.schedule_table import Step, Task, timetable


def forward_backward_pipelining_with_interleaving(
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
    """1F1B over the chunks of ``model`` (``ModelChunks``, wrapped or not); arguments, result as without interleaving.

    ``forward_step_func`` is called with one chunk at a time. ``config.microbatch_group_size_per_vp_stage``
    micro-batches (default: the number of stages, which is also the least) run through one chunk before the next begins.
    """
    shapes = microbatch_shapes(
        tensor_shapes, num_microbatches, seq_length * micro_batch_size, model, groups, forward_only
    )
    run = MicroBatchRun(
        forward_step_func, data_iterator, model, num_microbatches, groups, shapes, collect_non_loss_data, forward_only
    )
    num_stages = groups.layout.pipeline_model_parallel_size
    num_chunks = groups.layout.virtual_pipeline_model_parallel_size
    if len(run.chunks) != num_chunks:
        raise ValueError(
            f"the model has {len(run.chunks)} chunks; virtual_pipeline_model_parallel_size is {num_chunks}"
        )
    steps = timetable(num_microbatches, num_chunks, num_stages, _group_size(model, num_stages), forward_only)
    transfers = RingTransfers(groups, model_config(model).pipeline_dtype, next(model.parameters()).device)
    with torch.set_grad_enabled(not forward_only):
        _run_steps(steps[groups.coords.pp], run, shapes, transfers)
    return run.results


def _run_steps(steps: Sequence[Step], run: MicroBatchRun, shapes: Sequence[Shape], transfers: RingTransfers) -> None:
    arriving: dict[tuple[bool, Task], Receiving] = {}
    for step in steps:
        result: torch.Tensor | None = None
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


def _group_size(model: nn.Module, num_stages: int) -> int:
    size = model_config(model).microbatch_group_size_per_vp_stage or num_stages
    if size < num_stages:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage is {size}; it must be at least the {num_stages} pipeline stages"
        )
    return int(size)
