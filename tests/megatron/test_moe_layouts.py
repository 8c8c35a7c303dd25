"""A MoE layer gives one process's output and gradients over expert, expert-tensor and tensor parallel ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.ops import reference_ops
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_model_parallel
from megatron.core.transformer.moe.expert_load import collect_expert_loads
from megatron.core.transformer.moe.uneven_rows import gather_rows, reduce_scatter_rows
from tests.megatron.model_helpers import one_process_groups, one_process_world, tiny_config
from tests.megatron.moe_helpers import (
    assert_close,
    assert_layouts_equal_one_process,
    local_part,
    make_layer,
    rows_of_rank,
    tokens,
)
from tests.parallel.launcher import run_ranks

DISPATCHERS = [{"moe_token_dispatcher_type": kind} for kind in ("alltoall", "allgather")]
ONE_EXPERT_EACH = {"num_moe_experts": 4, "moe_router_num_groups": 2, "moe_router_group_topk": 1}


def _layout(tp: int = 1, ep: int = 1, etp: int = 1, order: str = "tp-cp-ep-dp-pp") -> dict[str, object]:
    return {
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "order": order,
    }


def test_two_ranks_equal_one_process() -> None:
    layouts = [_layout(etp=2), _layout(tp=2, etp=2), _layout(tp=2, ep=2), _layout(ep=2), _layout(tp=2)]
    assert_layouts_equal_one_process(2, layouts, [*DISPATCHERS, {"moe_shared_expert_overlap": True}])


def test_four_ranks_equal_one_process() -> None:
    """Among them experts over ETP only, over both, a rank order in which EP varies fastest, replicas of experts."""
    layouts = [
        _layout(ep=2, etp=2),
        _layout(tp=2, ep=2, etp=2),
        _layout(tp=2, etp=2),
        _layout(tp=2, ep=4),
        _layout(etp=4),
        _layout(ep=2, etp=2, order="ep-dp-tp-cp-pp"),
    ]
    assert_layouts_equal_one_process(4, layouts, [*DISPATCHERS, {**DISPATCHERS[0], **ONE_EXPERT_EACH}])


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_the_load_of_expert_ranks_is_that_of_the_routers_choices(dispatcher: str) -> None:
    for measured, counted in run_ranks(_loads, 4, _layout(tp=2, ep=2, order="tp-cp-ep-dp-pp"), dispatcher):
        mean, most = sum(counted) / len(counted), max(counted)
        assert measured == (pytest.approx(mean), pytest.approx(most))
        assert 1.0 < mean < most <= 2.0


def _loads(sizes: dict[str, object], dispatcher: str) -> tuple[tuple[float, float], list[float]]:
    """(mean, largest) as collected, and the loads of all dispatches counted from all ranks' choices."""
    groups = initialize_model_parallel(**sizes)  # type: ignore[arg-type]
    layer = make_layer(groups, moe_token_dispatcher_type=dispatcher)
    layer(tokens()[0])  # forgotten by the first collection
    assert collect_expert_loads(layer, groups) is not None
    chosen: list[torch.Tensor] = []
    layer.router.register_forward_hook(lambda module, args, out: chosen.append(out[1]))
    for part in (slice(0, 7), slice(7, 9), slice(9, 22)):
        layer(tokens()[0][part] * (1 + groups.rank))
    measured = collect_expert_loads(layer, groups)
    assert measured is not None
    assert collect_expert_loads(layer, groups) is None
    loads = []
    for mine_TK in chosen:
        all_GK = gather_rows(mine_TK, groups.etp_ep, [len(mine_TK)] * groups.etp_ep.size())
        rows = torch.bincount(all_GK.flatten(), minlength=layer.router.num_experts).view(groups.ep.size(), -1).sum(1)
        loads.append(float(rows.max() / rows.float().mean()))
    everywhere: list[list[float]] = [[] for _ in range(4)]
    dist.all_gather_object(everywhere, loads)
    destroy_model_parallel()
    return measured, [load for of_rank in everywhere for load in of_rank]


def _mean_grads(sizes: dict[str, object]) -> tuple[int, dict[str, torch.Tensor]]:
    """Every data-parallel replica has its own loss, gradients are the mean of theirs; as DDP leaves them."""
    groups = initialize_model_parallel(**sizes)  # type: ignore[arg-type]
    layer = make_layer(groups)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False)
    model = DistributedDataParallel(layer.router.config, ddp_config, layer, groups)
    x_TH, weight_TH = tokens()
    rows = rows_of_rank(groups)
    (model(x_TH[rows]) * weight_TH[rows]).sum().backward()
    finalize_model_grads(model, groups)
    grads = {name: param.main_grad.clone() for name, param in layer.named_parameters()}  # type: ignore[attr-defined]
    destroy_model_parallel()
    return groups.dp.size(), grads


def _mean_grads_of_layouts(layouts: list[dict[str, object]]) -> list[tuple[int, dict[str, torch.Tensor]]]:
    return [_mean_grads(sizes) for sizes in layouts]


def test_a_mean_over_replicas_scales_experts_as_everything_else() -> None:
    with one_process_world():
        _, whole = _mean_grads({})
    layouts = [_layout(etp=2), _layout(tp=2, etp=2), {**_layout(ep=2), "context_parallel_size": 2}]
    for rank, found in enumerate(run_ranks(_mean_grads_of_layouts, 4, layouts)):
        for sizes, (num_replicas, grads) in zip(layouts, found, strict=True):
            layout = ParallelLayout(world_size=4, **sizes)  # type: ignore[arg-type]
            for name, grad in grads.items():
                expected = local_part(name, whole[name] / num_replicas, layout, rank)
                assert_close(grad, expected, (sizes, rank, name))


def _marks(groups: ProcessGroups) -> dict[str, tuple[object, ...]]:
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel")
    experts: nn.Module = make_layer(groups).experts
    return {key: tuple(getattr(weight, name) for name in names) for key, weight in experts.named_parameters()}


def _marks_of_rank() -> dict[str, tuple[object, ...]]:
    return _marks(initialize_model_parallel(expert_tensor_parallel_size=2))


def test_marks_of_experts_say_how_they_are_split() -> None:
    with one_process_groups() as groups:
        assert set(_marks(groups).values()) == {(False, -1, 1, False, False)}
    for marks in run_ranks(_marks_of_rank, 2):
        assert marks == {"weight1": (True, 2, 2, False, False), "weight2": (True, 1, 1, False, False)}


def _uneven() -> None:
    groups = initialize_model_parallel(expert_tensor_parallel_size=2)
    rank = groups.etp.rank()
    for sizes in ([3, 1], [0, 2], [2, 2], [0, 0]):
        full = torch.arange(float(sum(sizes) * 2)).view(-1, 2)
        mine = full.split(sizes)[rank].clone().requires_grad_()
        gathered = gather_rows(mine, groups.etp, sizes)
        assert gathered.equal(full)
        (gathered * (rank + 1)).sum().backward()
        assert mine.grad is not None and mine.grad.eq(3).all() and mine.grad.shape == mine.shape
        everyones = full.clone().requires_grad_()
        scattered = reduce_scatter_rows(everyones * (rank + 1), groups.etp, sizes)
        assert scattered.equal(3 * full.split(sizes)[rank])
        (scattered * (rank + 5)).sum().backward()
        expected = torch.cat([torch.full((size, 2), float(at + 5)) for at, size in enumerate(sizes)]) * (rank + 1)
        assert everyones.grad is not None and everyones.grad.equal(expected)


def test_rows_of_uneven_ranks_are_gathered_and_scattered() -> None:
    run_ranks(_uneven, 2)


def test_what_does_not_fit_is_an_error() -> None:
    with one_process_groups() as groups:
        layout = replace(groups.layout, world_size=3, expert_tensor_parallel_size=3)
        with pytest.raises(ValueError, match="moe_ffn_hidden_size 32 does not divide over expert_tensor_parallel_size"):
            GPTModel(tiny_config(), replace(groups, layout=layout), reference_ops())
    with pytest.raises(ValueError, match="moe_shared_expert_overlap needs moe_token_dispatcher_type 'alltoall'"):
        tiny_config(moe_shared_expert_overlap=True, moe_token_dispatcher_type="allgather")
