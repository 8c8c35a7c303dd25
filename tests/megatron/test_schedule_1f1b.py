"""Pipeline schedules: any number of stages and micro-batches gives one process's losses, outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.parallel_state import ProcessGroups, initialize_model_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import PipelineLink
from tests.parallel.launcher import run_ranks
from tests.parallel.toy import HIDDEN, ToyStage, toy_batches, toy_config, toy_forward_step, toy_output_step, toy_stage


def _one_process(batches: list, num_layers: int, is_mean: bool) -> tuple[nn.Module, list[float], list[torch.Tensor]]:
    model = ToyStage(toy_config(), range(num_layers))
    losses, outputs = [], []
    for batch in batches:
        output, loss_func = toy_forward_step(iter([batch]), model)
        loss, _ = loss_func(output)  # type: ignore[operator]
        (loss / len(batches) if is_mean else loss).backward()
        losses.append(loss.item())
        outputs.append(output.detach())
    return model, losses, outputs


def _check_against_one_process(
    num_layer_list: tuple[int, ...], sizes: list[int], groups: ProcessGroups, is_mean: bool = False
) -> None:
    num_layers = sum(num_layer_list)
    batches = toy_batches(sizes)
    whole, losses, outputs = _one_process(batches, num_layers, is_mean)
    stage = toy_stage(groups, toy_config(calculate_per_token_loss=not is_mean), num_layers)
    common = {
        "forward_step_func": toy_forward_step,
        "model": stage,
        "tensor_shapes": [(size, HIDDEN) for size in sizes],
    }
    run = get_forward_backward_func(groups)
    metrics = run(data_iterator=iter(batches), **common)
    assert [m["loss"] for m in metrics] == pytest.approx(losses if groups.is_last_stage else [], rel=1e-6)
    of_whole = dict(whole.named_parameters())
    for name, param in stage.named_parameters():
        torch.testing.assert_close(param.grad, of_whole[name].grad, rtol=1e-5, atol=1e-6)

    stage.zero_grad()
    metrics = run(data_iterator=iter(batches), forward_only=True, **common)
    assert [m["loss"] for m in metrics] == pytest.approx(losses if groups.is_last_stage else [], rel=1e-6)
    assert all(param.grad is None for param in stage.parameters())
    seen = run(data_iterator=iter(batches), forward_only=True, **common | {"forward_step_func": toy_output_step})
    assert len(seen) == (len(sizes) if groups.is_last_stage else 0)
    for got, want in zip(seen, outputs, strict=False):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def _exchange_large_tensors_both_ways(groups: ProcessGroups) -> None:
    link = PipelineLink.of(groups, torch.float32, torch.device("cpu"))
    shape = (1 << 21,)  # 8 MiB: more than any socket buffers, so one-sided sends would block
    mine = torch.full(shape, float(groups.rank))
    for _ in range(3):
        if groups.is_first_stage:
            got = link.exchange(send_next=mine, recv_next=shape)
        else:
            got = link.exchange(send_prev=mine, recv_prev=shape)
        assert got is not None
        assert got.requires_grad == groups.is_last_stage
        assert got.eq(1 - groups.rank).all()
    assert link.exchange(recv_prev=shape) is None if groups.is_first_stage else True
    if groups.is_first_stage:
        link.exchange(send_next=mine)
    else:
        link.exchange(recv_prev=shape)


def _two_stages() -> None:
    groups = initialize_model_parallel(1, 2, num_layer_list=(3, 2))
    for sizes in ([5], [4, 7], [3, 1, 6, 2, 4]):
        _check_against_one_process((3, 2), sizes, groups)
    _check_against_one_process((3, 2), [3, 3, 3], groups, is_mean=True)
    _exchange_large_tensors_both_ways(groups)


def _three_stages() -> None:
    groups = initialize_model_parallel(1, 3, num_layer_list=(1, 3, 2))
    for sizes in ([5], [4, 7], [3, 1, 6, 2, 4, 8, 2]):
        _check_against_one_process((1, 3, 2), sizes, groups)


def test_two_uneven_stages_equal_one_process() -> None:
    run_ranks(_two_stages, 2, timeout_s=60)


def test_three_uneven_stages_equal_one_process_also_with_fewer_micro_batches() -> None:
    run_ranks(_three_stages, 3, timeout_s=60)


def test_one_stage_equals_one_process(one_rank: ProcessGroups) -> None:
    _check_against_one_process((2,), [5, 3], groups=one_rank)
    _check_against_one_process((2,), [5, 3], is_mean=True, groups=one_rank)
