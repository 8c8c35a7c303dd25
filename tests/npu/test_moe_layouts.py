"""On two devices over hccl, with native ops: split experts, both dispatchers, balance losses, replay equal a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.ops import TrainOps, reference_ops
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_model_parallel
from megatron.core.tensor_parallel.weight_init import WeightInit, init_weights
from megatron.core.transformer.moe.aux_loss import set_aux_loss_scale
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay
from mindspeed.ops import train_ops
from tests.megatron.model_helpers import one_process_groups, tiny_config
from tests.parallel.launcher import run_ranks

BOUNDS = torch.tensor([0, 7, 16], dtype=torch.int32)
LAYOUTS: list[dict[str, Any]] = [
    {"expert_tensor_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
]


def _outputs(groups: ProcessGroups, ops: TrainOps, device: torch.device, **changes: Any) -> list[torch.Tensor]:
    """y and the gate's gradient: of the gate's own choice with all losses on, and of a replayed one; on the CPU."""
    config = tiny_config(
        sequence_parallel=groups.tp.size() > 1,
        calculate_per_token_loss=True,
        moe_aux_loss_coeff=0.1,
        moe_z_loss_coeff=0.1,
        moe_router_load_balancing_type="seq_aux_loss",
        **changes,
    )
    layer = MoELayer(config, groups, ops)
    init_weights(layer, WeightInit(3, 0.2), "mlp")
    layer.to(device)
    set_aux_loss_scale(layer, 1 / 16)
    generator = torch.Generator().manual_seed(1)
    x_TH = torch.randn(16, config.hidden_size, generator=generator)
    chosen_TK = torch.rand(16, 8, generator=generator).argsort(-1)[:, :2].to(torch.uint8)
    params = PackedSeqParams(BOUNDS, 9, is_padding_T=(torch.arange(16) >= 12).to(device))
    if groups.tp.size() == 1 and groups.dp.size() == 2:  # one sequence for each replica
        mine = slice(0, 7) if groups.dp.rank() == 0 else slice(7, 16)
        bounds = torch.tensor([0, mine.stop - mine.start], dtype=torch.int32)
        assert params.is_padding_T is not None
        params = PackedSeqParams(bounds, int(bounds[1]), params.is_padding_T[mine])
        rows, chosen_TK = mine, chosen_TK[mine]
    else:
        part = 16 // groups.tp.size()
        rows = slice(part * groups.tp.rank(), part * (groups.tp.rank() + 1))
    found = []
    for routing in (None, RouterReplay(8, groups).replay({0: chosen_TK})):
        layer.zero_grad()
        y_TH = layer(x_TH[rows].to(device), replace(params, routing=routing))
        y_TH.square().sum().backward()
        grad = layer.router.weight.grad
        assert grad is not None
        for group in (groups.tp, groups.dp):
            dist.all_reduce(grad, group=group)
        found += [y_TH.detach().cpu(), grad.cpu()]
    return found


def _ranks(changes: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    found = []
    for sizes in LAYOUTS:
        for change in changes:
            groups = initialize_model_parallel(**sizes)
            device = torch.device("npu", torch.npu.current_device())
            found.append(_outputs(groups, train_ops(), device, **change))
            destroy_model_parallel()
    return found


def test_split_experts_and_both_dispatchers_equal_a_cpu() -> None:
    changes = [{"moe_token_dispatcher_type": kind} for kind in ("alltoall", "allgather")]
    with one_process_groups() as groups:
        expected = _outputs(groups, reference_ops(), torch.device("cpu"))
    by_rank = run_ranks(_ranks, 2, changes, device="npu", timeout_s=150)
    for case in zip(*by_rank, strict=True):
        for index, whole in enumerate(expected):
            parts = [found[index] for found in case]
            found = parts[1] if index % 2 else torch.cat(parts)
            assert (found - whole).abs().max() <= 1e-4 * whole.abs().max(), index
