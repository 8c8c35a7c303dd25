"""Communication beside computing really lies beside it: the order of operations, forward and backward."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.ops import reference_ops
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups, initialize_model_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.megatron.model_helpers import tiny_config
from tests.parallel.launcher import run_ranks
from tests.parallel.toy import HIDDEN, ToyStage, toy_batches, toy_config, toy_forward_step

ROUTED_WIDTH, SHARED_WIDTH = 104, 200  # sizes that no other matrix has, so they tell whose product it is
COLLECTIVES = {"alltoall_base": "x", "reduce_scatter": "r", "allgather": "g"}


class Order(TorchDispatchMode):
    """A letter for each step inside: collectives (see above), products of the shared experts (s), of the routed (e)
    and of others (m)."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.letters += next((letter for word, letter in COLLECTIVES.items() if word in str(func)), "")
        if str(func).startswith(("aten.mm.", "aten.addmm.")):
            sizes = {size for x in args for size in x.shape}
            is_shared, is_routed = (sizes & {width, 2 * width} for width in (SHARED_WIDTH, ROUTED_WIDTH))
            self.letters += "s" if is_shared else "e" if is_routed else "m"
        return func(*args, **(kwargs or {}))


def _moe_orders(is_overlapped: bool) -> list[str]:
    groups = initialize_model_parallel(expert_model_parallel_size=2)
    config = tiny_config(
        moe_ffn_hidden_size=ROUTED_WIDTH,
        moe_shared_expert_intermediate_size=SHARED_WIDTH,
        moe_shared_expert_overlap=is_overlapped,
    )
    layer = MoELayer(config, groups, reference_ops())
    for param in layer.parameters():
        nn.init.normal_(param, std=0.1)
    x_TH = torch.randn(12, config.hidden_size, generator=torch.Generator().manual_seed(groups.rank)).requires_grad_()
    with Order() as forward:
        y_TH = layer(x_TH)
    with Order() as backward:
        y_TH.sum().backward()
    return [re.sub("[mg]", "", order.letters) for order in (forward, backward)]


def test_shared_experts_run_while_tokens_travel() -> None:
    for forward, backward in run_ranks(_moe_orders, 2, True, timeout_s=60):
        assert re.fullmatch("xse+xs", forward), forward
        assert re.fullmatch("xsse+xss", backward), backward
    for forward, backward in run_ranks(_moe_orders, 2, False, timeout_s=60):
        assert re.fullmatch("xe+xss", forward), forward
        assert re.fullmatch("ssssxe+x", backward), backward


def _trainer(groups: ProcessGroups, is_overlapped: bool) -> DistributedOptimizer:
    config = toy_config()
    ddp_config = DistributedDataParallelConfig(
        bucket_size=HIDDEN**2, overlap_grad_reduce=is_overlapped, overlap_param_gather=is_overlapped
    )
    model = DistributedDataParallel(config, ddp_config, ToyStage(config, range(3)), groups)
    assert [set(buffer.param_ranges) for buffer in model.param_and_grad_buffers][:3] == [
        {"layers.0.weight"},
        {"layers.0.bias", "layers.1.weight"},
        {"layers.1.bias", "layers.2.weight"},
    ]
    return get_megatron_optimizer(OptimizerConfig(lr=1e-2), model, groups, reference_ops())


def _order_of_a_step(optimizer: DistributedOptimizer, seed: int) -> tuple[str, str]:
    """The order in the passes over three micro-batches, and in what follows them."""
    groups, model = optimizer.groups, optimizer.model
    batches = toy_batches([4] * 6, seed)[groups.coords.dp :: 2]
    optimizer.zero_grad()
    with Order() as passes:
        get_forward_backward_func(groups)(
            forward_step_func=toy_forward_step,
            data_iterator=iter(batches),
            model=model,
            tensor_shapes=[(4, HIDDEN)] * 3,
        )
    with Order() as rest:
        finalize_model_grads(model, groups)
        assert optimizer.step()[0]
    return passes.letters, rest.letters


def _two_replicas() -> None:
    groups = initialize_model_parallel()
    plain, beside = (_trainer(groups, is_overlapped) for is_overlapped in (False, True))
    for seed in range(3):
        passes, rest = _order_of_a_step(plain, seed)
        assert re.fullmatch("m*", passes) and rest == "rrrrgggg"
        passes, rest = _order_of_a_step(beside, seed)
        assert rest == "gggg", "all reductions had begun"
        assert re.fullmatch("m+r+m+r+", passes), passes  # products after the first reductions
        assert passes.index("r") > len(passes) * 2 // 3, "not before the last micro-batch's backward"
        assert any(buffer._param_work is not None for buffer in beside.model.param_and_grad_buffers)
    state = beside.model.module.state_dict()  # waits
    assert all(buffer._param_work is None for buffer in beside.model.param_and_grad_buffers)
    for name, value in plain.model.module.state_dict().items():
        assert torch.equal(state[name], value), name

    (x_TH, target_TH), *_ = toy_batches([4])
    beside.zero_grad()
    (beside.model(x_TH) - target_TH).square().sum().backward()
    with pytest.raises(
        AssertionError, match=r"of norms.2.weight after its reduction has started: .* inside backward_of"
    ):
        (beside.model(x_TH) - target_TH).square().sum().backward()


def test_buckets_are_reduced_during_the_last_backward_only() -> None:
    run_ranks(_two_replicas, 2, timeout_s=60)


def _a_part_that_is_not_used() -> list[str]:
    """Rank 1 uses no bias of the second layer: its bucket is started at the end, the others' order is as on rank 0."""
    groups = initialize_model_parallel()
    model = _trainer(groups, is_overlapped=True).model
    model.zero_grad_buffer()
    x_TH = toy_batches([4])[0][0]
    layers = model.module.layers  # type: ignore[union-attr]
    h_TH = layers["0"](x_TH)
    weight, bias = layers["1"].weight, layers["1"].bias  # type: ignore[index]
    h_TH = nn.functional.linear(h_TH, weight, bias if groups.rank == 0 else None)
    layers["2"](h_TH).sum().backward()  # type: ignore[index]
    before = sum(buffer._grad_work is not None for buffer in model.param_and_grad_buffers)
    finalize_model_grads(model, groups)
    return [str(before), *(f"{buffer.grad_shard.sum():.4f}" for buffer in model.param_and_grad_buffers)]


def test_a_parameter_without_a_gradient_holds_nothing_up() -> None:
    run_ranks(_a_part_that_is_not_used, 2, timeout_s=60)


def _unread_weights(changes: dict[str, Any]) -> list[str]:
    """Buckets that are still on their way behind a forward pass, each of one parameter."""
    groups = initialize_model_parallel(context_parallel_size=2)
    config = tiny_config(**changes)
    ddp_config = DistributedDataParallelConfig(bucket_size=1, overlap_param_gather=True)
    module = GPTModel(config, groups, reference_ops())
    module.init_weights(1)
    for name, param in module.named_parameters():
        param.requires_grad_(not name.endswith("router.weight"))  # frozen ones are in no bucket
    model = DistributedDataParallel(config, ddp_config, module, groups)
    model.start_param_sync()
    ids_T = torch.arange(4)
    model(ids_T, ids_T, PackedSeqParams(torch.tensor([0, 8], dtype=torch.int32), 8))
    return [name for buffer in model.param_and_grad_buffers if buffer._param_work for name in buffer.param_ranges]


@pytest.mark.parametrize("changes", [{}, {"cp_send_latents": True}])
def test_no_weight_is_read_before_it_is_there(changes: dict[str, Any]) -> None:
    assert run_ranks(_unread_weights, 2, changes, timeout_s=60) == [[], []]


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(ValueError, match="overlap_param_gather needs use_distributed_optimizer"):
        DistributedDataParallelConfig(overlap_param_gather=True, use_distributed_optimizer=False)
    with pytest.raises(ValueError, match="bucket_size is 0"):
        DistributedDataParallelConfig(bucket_size=0)
    with pytest.raises(ValueError, match="moe_shared_expert_overlap needs shared experts"):
        tiny_config(moe_shared_expert_overlap=True, moe_shared_expert_intermediate_size=None)
