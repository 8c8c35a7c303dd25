"""The memory ledger beside the device's allocator: predicted, real, offloaded, and with the state on the host."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.memory_ledger import LedgerEntry, ledger, total_bytes
from megatron.core.models.gpt import make_gpt_model
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import ProcessGroups
from mindspeed.core.optimizer.swap_optimizer import get_swap_optimizer
from mindspeed.ops import train_ops
from tests.megatron.ledger_oracles import predict_ledger
from tests.megatron.model_helpers import tiny_config
from tests.npu.device_memory import held_bytes

DEVICE = torch.device("npu:0")
BF16_MOMENTS = {
    "adam_beta2": 0.98,
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.bfloat16,
}
Entries = list[LedgerEntry]


def _leave(optimizer: DistributedOptimizer) -> None:
    optimizer.model.offload_params()
    optimizer.model.offload_grads()
    optimizer.offload()


@pytest.mark.parametrize(
    "optimizer_config",
    [
        OptimizerConfig(),
        OptimizerConfig(optimizer_cpu_offload=True),
        OptimizerConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5, **BF16_MOMENTS),
    ],
    ids=["plain", "cpu_adam", "half_of_it_in_bfloat16"],
)
def test_the_allocator_holds_what_the_ledger_says(groups: ProcessGroups, optimizer_config: OptimizerConfig) -> None:
    config, ddp_config = tiny_config(params_dtype=torch.bfloat16), DistributedDataParallelConfig()
    start = held_bytes()
    with DEVICE:
        model = make_gpt_model(config, groups, train_ops())
    ddp = DistributedDataParallel(config, ddp_config, model, groups)
    optimizer = get_megatron_optimizer(optimizer_config, ddp, groups, train_ops())
    entries = ledger(ddp, optimizer)
    assert entries == predict_ledger(config, ParallelLayout(), 0, ddp_config, optimizer_config)
    # Small buffers (biases, frequencies, counts) take a block of 512 bytes each.
    assert held_bytes() - start == pytest.approx(total_bytes(entries, "device"), rel=0.02)
    _leave(optimizer)
    left = {entry.what for entry in ledger(ddp, optimizer) if entry.device == "device"}
    assert left == {"buffer"}
    assert held_bytes() - start < 16384


def test_a_swapped_state_is_on_the_host(groups: ProcessGroups) -> None:
    config = tiny_config(params_dtype=torch.bfloat16)
    with DEVICE:
        model = make_gpt_model(config, groups, train_ops())
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model, groups)
    held = held_bytes()
    swapped = ledger(ddp, get_swap_optimizer(OptimizerConfig(), ddp, groups, train_ops()))
    assert held_bytes() == held
    assert total_bytes(swapped, "host") == 12 * sum(buffer.numel for buffer in ddp.param_and_grad_buffers)
    with pytest.raises(ValueError, match="exp_avg_dtype is torch.bfloat16; the swap optimizer keeps float32"):
        get_swap_optimizer(OptimizerConfig(**BF16_MOMENTS), ddp, groups, train_ops())
