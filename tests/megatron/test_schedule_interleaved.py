"""Interleaved 1F1B: any stages, chunks and numbers of micro-batches give one process's losses and gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel, make_gpt_model
from megatron.core.ops import reference_ops
from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_model_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedule_table import (
    Task,
    get_pp_rank_microbatches,
    get_schedule_table,
    group_sizes,
    neighbour,
    rank_order,
    timetable,
)
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.megatron.model_helpers import PackedBatch, packed_batch, tiny_config
from tests.parallel.launcher import run_ranks
from tests.parallel.toy import HIDDEN, ToyStage, toy_batches, toy_config, toy_forward_step, toy_stage


def test_tables_are_upstreams() -> None:
    """Two stages, two chunks, five micro-batches in groups of three."""
    table = get_schedule_table(5, 2, 3)
    assert table == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    counts = get_pp_rank_microbatches(5, 2, 3, pipeline_size=2, pipeline_rank=1)
    assert counts == (10, False, 3, 7)
    order = rank_order(table, 2, 3, False, pipeline_size=2, rank=1)
    signed = [-task.chunk - 1 if is_backward else task.chunk + 1 for is_backward, task in order]
    assert signed == [1, 1, 1, 2, -2, 2, -2, 2, -2, 1, -1, 1, -1, 2, -1, 2, -2, -2, -1, -1]
    assert get_pp_rank_microbatches(5, 2, 3, True, pipeline_size=2, pipeline_rank=0) == (10, True, 10, 0)
    assert get_pp_rank_microbatches(5, 1, 3, pipeline_size=4, pipeline_rank=0) == (5, False, 3, 2)


def test_a_rest_smaller_than_the_pipeline_is_spread_over_the_groups() -> None:
    assert group_sizes(8, 4, 4) == (4, 4)
    assert group_sizes(18, 4, 4) == (5, 5, 4, 4)
    assert group_sizes(13, 8, 4) == (8, 5)
    assert group_sizes(3, 4, 4) == (3,)
    assert get_schedule_table(5, 2, 2, 2)[:6] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


def test_every_task_runs_once_and_every_transfer_has_two_ends() -> None:
    for num_stages, num_chunks, num_microbatches, is_forward in product(
        (2, 3, 4), (1, 2, 3), range(1, 12), (False, True)
    ):
        for group_size in (num_stages, num_stages + 1, 2 * num_stages):
            steps = timetable(num_microbatches, num_chunks, num_stages, group_size, is_forward)
            tasks = sorted(Task(i, chunk) for i in range(num_microbatches) for chunk in range(num_chunks))
            sent: dict[tuple[int, int, bool], list[Task]] = {}
            received: dict[tuple[int, int, bool], list[Task]] = {}
            for rank, own in enumerate(steps):
                for is_backward in (False,) if is_forward else (False, True):
                    assert sorted(s.task for s in own if s.task and s.is_backward == is_backward) == tasks
                for step in own:
                    onward = -1 if step.is_backward else 1
                    if step.sends and step.task:
                        target = neighbour(rank, step.task, onward, num_chunks, num_stages)
                        assert target is not None
                        sent.setdefault((rank, target[0], step.is_backward), []).append(target[1])
                    if step.receives:
                        origin = neighbour(rank, step.receives, -onward, num_chunks, num_stages)
                        assert origin is not None
                        received.setdefault((origin[0], rank, step.is_backward), []).append(step.receives)
            assert sent == received


def _makespan(num_microbatches: int, num_chunks: int, num_stages: int) -> int:
    """Time until the last stage is done when a chunk's forward takes 1, its backward 2 and a transfer nothing."""
    steps = timetable(num_microbatches, num_chunks, num_stages, num_stages, False)
    todo = [[(step.is_backward, step.task) for step in own if step.task] for own in steps]
    clock, done = [0] * num_stages, dict[tuple[bool, int, Task], int]()
    while any(todo):
        for rank, own in enumerate(todo):
            while own:
                is_backward, task = own[0]
                needed = neighbour(rank, task, 1 if is_backward else -1, num_chunks, num_stages)
                if needed is not None and (is_backward, *needed) not in done:
                    break
                start = max(clock[rank], done[is_backward, *needed] if needed else 0)
                done[is_backward, rank, task] = clock[rank] = start + (2 if is_backward else 1)
                own.pop(0)
    return max(clock)


def test_the_bubble_is_as_small_as_interleaving_allows_also_with_a_rest() -> None:
    for num_stages, num_chunks, num_microbatches in ((4, 1, 9), (4, 2, 16), (4, 2, 18), (4, 3, 15), (2, 2, 7)):
        work = 3 * num_microbatches * num_chunks
        assert _makespan(num_microbatches, num_chunks, num_stages) == work + 3 * (num_stages - 1)


def _check_against_one_process(groups: ProcessGroups, num_layers: int, sizes: list[int], is_mean: bool = False) -> None:
    config = toy_config(calculate_per_token_loss=not is_mean)
    batches = toy_batches(sizes)
    whole = ToyStage(config, range(num_layers))
    losses, outputs = [], []
    for batch in batches:
        output, loss_func = toy_forward_step(iter([batch]), whole)
        loss, _ = loss_func(output)  # type: ignore[operator]
        (loss / len(batches) if is_mean else loss).backward()
        losses.append(loss.item())
        outputs.append(output.detach())
    stage = toy_stage(groups, config, num_layers)
    common: dict[str, Any] = {
        "forward_step_func": toy_forward_step,
        "model": stage,
        "num_microbatches": len(sizes),
        "seq_length": sizes[0],
        "micro_batch_size": 1,
        "tensor_shapes": [(size, HIDDEN) for size in sizes],
    }
    run = get_forward_backward_func(groups)
    metrics = run(data_iterator=iter(batches), **common)
    assert [m["loss"] for m in metrics] == pytest.approx(losses if groups.is_last_stage else [], rel=1e-6)
    wanted = dict(whole.named_parameters())
    for name, param in stage.named_parameters():
        torch.testing.assert_close(param.grad, wanted[name.split(".", 2)[2]].grad, rtol=1e-5, atol=1e-6)

    stage.zero_grad()
    num_chunks = groups.layout.virtual_pipeline_model_parallel_size
    seen = run(
        data_iterator=[iter(batches) for _ in range(num_chunks)],
        forward_only=True,
        collect_non_loss_data=True,
        **common,
    )
    assert all(param.grad is None for param in stage.parameters())
    assert len(seen) == (len(sizes) if groups.is_last_stage else 0)
    for got, want in zip(seen, outputs, strict=False):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def _stages(num_stages: int, num_chunks: int, num_layers: int, layouts: list[dict[str, Any]]) -> None:
    for layout in layouts:
        groups = initialize_model_parallel(1, num_stages, num_chunks, **layout)
        for sizes in ([5], [4, 7], [3, 1, 6, 2, 4], [2, 3, 1, 2, 4, 1, 2, 3, 1]):
            _check_against_one_process(groups, num_layers, sizes)
        _check_against_one_process(groups, num_layers, [3, 3, 3, 3], is_mean=True)
        destroy_model_parallel()


def test_two_stages_of_two_chunks_equal_one_process() -> None:
    run_ranks(_stages, 2, 2, 2, 6, [{"num_layer_list": (2, 4)}, {"noop_layers": (6, 7)}], timeout_s=60)


def test_three_uneven_stages_of_three_chunks_equal_one_process() -> None:
    layouts = [{"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 3}]
    run_ranks(_stages, 3, 3, 3, 12, layouts, timeout_s=60)


def _outputs_in_memory(num_chunks: int) -> int:
    """The most outputs of the first stage that were in memory when it began another forward."""
    groups = initialize_model_parallel(1, 2, num_chunks)
    outputs: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def forward_step(batches: Iterator[Any], model: nn.Module) -> tuple[torch.Tensor, object]:
        nonlocal most
        most = max(most, sum(output() is not None for output in outputs))
        output, loss_func = toy_forward_step(batches, model)
        outputs.append(weakref.ref(output))
        return output, loss_func

    get_forward_backward_func(groups)(
        forward_step_func=forward_step,
        data_iterator=iter(toy_batches([3] * 6)),
        model=toy_stage(groups, toy_config(), 8),
        num_microbatches=6,
        seq_length=3,
        micro_batch_size=1,
        tensor_shapes=[(3, HIDDEN)] * 6,
    )
    destroy_model_parallel()
    return most if groups.is_first_stage else 0


def _outputs_of_both_schedules() -> list[int]:
    return [_outputs_in_memory(num_chunks) for num_chunks in (1, 2)]


def test_what_was_sent_is_not_kept() -> None:
    """Micro-batches wait on the first stage for their gradients; their outputs are on the next one and not here."""
    assert run_ranks(_outputs_of_both_schedules, 2, timeout_s=60)[0] == [0, 0]


def _forward_step(batches: Iterator[PackedBatch], model: nn.Module) -> tuple[torch.Tensor, Callable]:
    batch = next(batches)

    def loss_func(logits_TV: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = vocab_parallel_cross_entropy(logits_TV, batch.labels_T, model.groups.tp, reference_ops()).sum()
        return loss, {"loss": loss.item()}

    return model(batch.ids_T, batch.positions_T, batch.params), loss_func


def _train_step(groups: ProcessGroups, recompute: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of this rank under their global names, and the loss on the last stage."""
    config = tiny_config(
        num_layers=5, moe_layer_freq=[0, 1, 1, 1, 1], calculate_per_token_loss=True, moe_router_bias_update_rate=0.0
    )
    tp, dp = groups.layout.tensor_model_parallel_size, groups.layout.data_parallel_size
    config = replace(config, sequence_parallel=tp > 1)
    if recompute:
        config = replace(config, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    model = make_gpt_model(config, groups, reference_ops())
    model.init_weights(7)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=False, overlap_grad_reduce=True, bucket_size=4000
    )
    ddp = DistributedDataParallel(config, ddp_config, model, groups)
    batches = [packed_batch(lengths, config.vocab_size, i) for i, lengths in enumerate(BATCHES)][groups.coords.dp :: dp]
    metrics = get_forward_backward_func(groups)(
        forward_step_func=_forward_step,
        data_iterator=iter(batches),
        model=ddp,
        num_microbatches=len(batches),
        seq_length=1,
        micro_batch_size=1,
        tensor_shapes=[(len(batch.ids_T) // tp, config.hidden_size) for batch in batches],
    )
    finalize_model_grads(ddp, groups)
    grads = {"loss": torch.tensor(sum(metric["loss"] for metric in metrics))}
    num_chunks = groups.layout.virtual_pipeline_model_parallel_size
    for chunk in range(num_chunks):
        part = model if isinstance(model, GPTModel) else model.chunks[chunk]
        layers = groups.layout.chunk_layers(groups.coords.pp, chunk, config.num_layers)
        for name, param in part.named_parameters():
            for local, layer in enumerate(layers):
                if name.startswith(f"decoder.layers.{local}."):
                    name = name.replace(f"layers.{local}.", f"layers.{layer}.", 1)
                    break
            grads[name] = param.main_grad.clone()
    return grads


BATCHES = [[5, 6, 1], [9, 1], [3, 4, 1], [7, 8, 1], [4, 2], [6, 4]]


def _check_model(wanted: dict[str, torch.Tensor]) -> None:
    for pp, tp, recompute, layout in (
        (2, 1, False, {"num_layers_in_first_pipeline_stage": 2, "noop_layers": (5,)}),
        (2, 2, True, {"num_layers_in_first_pipeline_stage": 4, "noop_layers": (0,), "expert_model_parallel_size": 2}),
        (4, 1, False, {"num_layer_list": (2, 2, 2, 2), "noop_layers": (1, 4, 7)}),
    ):
        groups = initialize_model_parallel(tp, pp, 2, **layout)
        found, num_compared = _train_step(groups, recompute), 0
        for name, grad in found.items():
            if name == "loss":
                torch.distributed.all_reduce(grad, group=groups.dp)
            if grad.shape == wanted[name].shape and (name != "loss" or groups.is_last_stage):
                error = (grad - wanted[name]).abs().max() / wanted[name].abs().max()
                assert error <= 1e-5, f"{layout} {name} {error}"
                num_compared += 1
        assert num_compared > 4, "whole tensors; those that TP and EP split are compared elsewhere"
        destroy_model_parallel()


def test_chunks_of_a_model_give_one_process_gradients(one_rank: ProcessGroups) -> None:
    run_ranks(_check_model, 4, _train_step(one_rank), timeout_s=120)
