"""Pipeline schedules over hccl on the simulator: both kinds equal one process, and ranks that disagree say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from tests.parallel.launcher import run_ranks
from tests.parallel.toy import HIDDEN, ToyStage, toy_batches, toy_config, toy_forward_step, toy_stage

NUM_LAYERS, SIZES = 6, [3, 1, 4, 2, 3]


def _gradients() -> dict[str, torch.Tensor]:
    whole = ToyStage(toy_config(), range(NUM_LAYERS))
    for batch in toy_batches(SIZES):
        output, loss_func = toy_forward_step(iter([batch]), whole)
        loss_func(output)[0].backward()  # type: ignore[operator]
    return {name: param.grad for name, param in whole.named_parameters() if param.grad is not None}


def _run_on_npu(wanted: dict[str, torch.Tensor], num_stages: int) -> None:
    device = torch.device("npu", torch.npu.current_device())
    for num_chunks in (1, 2):
        groups = initialize_model_parallel(1, num_stages, num_chunks, num_layer_list=(2, 4))
        stage = toy_stage(groups, toy_config(), NUM_LAYERS).to(device)
        batches = [(x.to(device), target.to(device)) for x, target in toy_batches(SIZES)]
        arguments: dict[str, Any] = {
            "forward_step_func": toy_forward_step,
            "model": stage,
            "tensor_shapes": [(size, HIDDEN) for size in SIZES],
        }
        run = get_forward_backward_func(groups)
        run(data_iterator=iter(batches), **arguments)
        for name, param in stage.named_parameters():
            name = name.split(".", 2)[2] if name.startswith("chunks.") else name
            torch.testing.assert_close(param.grad.cpu(), wanted[name], rtol=1e-4, atol=1e-5)
        if groups.rank == 1:
            arguments |= {"tensor_shapes": arguments["tensor_shapes"][:4]}
        with pytest.raises(ValueError, match="rank 0 has 5 micro-batches, rank 1 has 4 micro-batches"):
            run(data_iterator=iter(batches), **arguments)
        destroy_model_parallel()


def test_stages_over_hccl_equal_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NPU_COUNT", "2")
    run_ranks(_run_on_npu, 2, _gradients(), 2, device="npu", timeout_s=120)
