"""One training step of a tiny DeepSeek-V3 gives the same loss, gradient norm and weights in every parallel layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops import reference_ops
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_model_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.parallel.launcher import run_ranks
from tests.parallel.layout_table import MicroBatch, local_part
from verl.workers.config.engine import McoreEngineConfig

CONFIG = MLATransformerConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=48,
    vocab_size=40,
    init_method_std=0.1,
    calculate_per_token_loss=True,
    num_moe_experts=8,
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=16,
    moe_layer_freq=(0, 1, 1),
    moe_router_topk=2,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=1e-2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=8,
)
NUM_STEPS = 2


@dataclass(frozen=True)
class Layout:
    """One way to run the step; ``is_mean`` takes the mean of the micro-batches' losses instead of their sum.

    ``overlap``: whether communication runs beside computing, in many small buckets; None: one bucket, no overlap.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    num_layer_list: tuple[int, ...] | None = None
    is_sharded: bool = True
    is_mean: bool = False
    recompute_num_layers: int | None = None
    overlap: bool | None = None


def _micro_batches(step: int) -> list[MicroBatch]:
    """Four micro-batches of unequal size; the last sequence of each is padding to a multiple of 2."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for lengths in ([5, 6, 1], [9, 1], [3, 4, 6, 1], [7, 8, 1]):
        num_tokens = sum(lengths)
        ids_T = torch.randint(CONFIG.vocab_size, (num_tokens,), generator=generator)
        weight_T = torch.rand(num_tokens, generator=generator)
        weight_T[-1] = 0
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        positions_T = torch.cat([torch.arange(n) for n in lengths])
        packed = PackedSeqParams(bounds, max(lengths))
        batches.append(MicroBatch(ids_T, positions_T, ids_T.roll(-1), weight_T / 10, packed))
    return batches


@dataclass(frozen=True)
class Outcome:
    """What a rank saw: losses per step (last stage), norms per step, and its tensors after the last step."""

    losses: list[float]
    grad_norms: list[float]
    tensors: dict[str, torch.Tensor]


def _train(groups: ProcessGroups, layout: Layout) -> Outcome:
    config = replace(
        CONFIG,
        sequence_parallel=layout.tp > 1,
        calculate_per_token_loss=not layout.is_mean,
        moe_shared_expert_overlap=bool(layout.overlap),
    )
    if layout.recompute_num_layers is not None:
        config = replace(
            config,
            recompute_granularity="full",
            recompute_method="block",
            recompute_num_layers=layout.recompute_num_layers,
        )
    model = GPTModel(config, groups, reference_ops())
    model.init_weights(7)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.is_sharded,
        overlap_grad_reduce=bool(layout.overlap),
        overlap_param_gather=bool(layout.overlap) and layout.is_sharded,
        bucket_size=40_000_000 if layout.overlap is None else 1000,
    )
    ddp = DistributedDataParallel(config, ddp_config, model, groups)
    num_whole = 3 if layout.pp > 1 else 2  # dense weights, experts, and alone the embedding of several stages
    assert (len(ddp.param_and_grad_buffers) <= num_whole) == (layout.overlap is None)
    optimizer_config = OptimizerConfig(
        lr=1e-2, weight_decay=0.1, adam_eps=1e-4, clip_grad=0.5, use_distributed_optimizer=layout.is_sharded
    )
    optimizer = get_megatron_optimizer(optimizer_config, ddp, groups, reference_ops())

    def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        batch = next(batches)

        def loss_func(logits_TV: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            loss = (
                vocab_parallel_cross_entropy(logits_TV, batch.labels_T, groups.tp, reference_ops()) * batch.weight_T
            ).sum()
            return loss, {"loss": loss.item()}

        return model(batch.input_ids_T, batch.position_ids_T, batch.packed), loss_func

    losses, grad_norms = [], []
    for step in range(NUM_STEPS):
        own = _micro_batches(step)[groups.coords.dp :: groups.layout.data_parallel_size]
        optimizer.zero_grad()
        metrics = get_forward_backward_func(groups)(
            forward_step_func=forward_step,
            data_iterator=iter(own),
            model=ddp,
            tensor_shapes=[(len(batch.input_ids_T) // layout.tp, config.hidden_size) for batch in own],
        )
        finalize_model_grads(ddp, groups)
        is_updated, grad_norm, _ = optimizer.step()
        assert is_updated
        losses.append(sum(metric["loss"] for metric in metrics))
        grad_norms.append(grad_norm)
    return Outcome(losses, grad_norms, {name: tensor.clone() for name, tensor in ddp.state_dict().items()})


@pytest.fixture(scope="module")
def one_process() -> Iterator[dict[bool, Outcome]]:
    """The step on one rank, for sums and for means of the micro-batches' losses."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = initialize_model_parallel()
    yield {is_mean: _train(groups, Layout(is_mean=is_mean)) for is_mean in (False, True)}
    destroy_model_parallel()
    dist.destroy_process_group()


def _check_layouts(layouts: list[Layout], one_process: dict[bool, Outcome]) -> None:
    for layout in layouts:
        want = one_process[layout.is_mean]
        groups = initialize_model_parallel(
            layout.tp, layout.pp, expert_model_parallel_size=layout.ep, num_layer_list=layout.num_layer_list
        )
        got = _train(groups, layout)
        assert got.grad_norms == pytest.approx(want.grad_norms, rel=1e-5), f"{layout} {groups.coords}"
        losses = torch.tensor(got.losses)
        dist.all_reduce(losses, group=groups.dp)
        if groups.is_last_stage:
            assert losses.tolist() == pytest.approx(want.losses, rel=1e-5), f"{layout} {groups.coords}"
        for name, tensor in got.tensors.items():
            part = _part_of(want.tensors, name, groups)
            assert torch.allclose(tensor, part, rtol=1e-5, atol=1e-5), f"{layout} {groups.coords} {name}"
        destroy_model_parallel()


def _part_of(whole: dict[str, torch.Tensor], name: str, groups: ProcessGroups) -> torch.Tensor:
    """What this rank holds, under its local ``name``, of the whole model's tensors."""
    first = groups.layout.stage_layers(groups.coords.pp, CONFIG.num_layers)[0]
    full = whole[re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) + first}", name)]
    return local_part(name, full, groups.layout, groups.coords)


def test_tp_ranks_that_join_the_experts_are_a_layout() -> None:
    """``moe_tp_extend_ep`` with TP 2 and EP 2 is the layout with 4 groups of whole experts, which runs below."""
    engine = McoreEngineConfig(tensor_model_parallel_size=2, expert_model_parallel_size=2, moe_tp_extend_ep=True)
    layout = engine.layout(world_size=4)
    same = FOUR_RANKS[-1]
    assert (layout.tensor_model_parallel_size, layout.expert_model_parallel_size) == (same.tp, same.ep) == (2, 4)
    assert layout.expert_tensor_parallel_size == 1 and layout.problems(num_experts=CONFIG.num_moe_experts) == []


FOUR_RANKS = [
    Layout(tp=2, pp=2, ep=2, num_layer_list=(2, 1)),
    Layout(pp=2, ep=2, num_layer_list=(1, 2)),
    Layout(tp=2, ep=4),  # moe_tp_extend_ep of TP 2 and EP 2
]
TWO_RANKS = [
    Layout(ep=2),
    Layout(ep=2, is_sharded=False),
    Layout(is_mean=True),
    Layout(ep=2, overlap=True),
    Layout(tp=2, is_mean=True),  # an expert has two replicas, which saw parts of the same tokens
]


def test_four_ranks_equal_one_process(one_process: dict[bool, Outcome]) -> None:
    run_ranks(_check_layouts, 4, FOUR_RANKS, one_process, timeout_s=100)


def test_two_ranks_equal_one_process(one_process: dict[bool, Outcome]) -> None:
    run_ranks(_check_layouts, 2, TWO_RANKS, one_process, timeout_s=100)


def _check_overlap(layouts: list[Layout]) -> None:
    for layout in layouts:
        groups = initialize_model_parallel(
            layout.tp, layout.pp, expert_model_parallel_size=layout.ep, num_layer_list=layout.num_layer_list
        )
        plain, beside = (_train(groups, replace(layout, overlap=overlap)) for overlap in (False, True))
        assert beside.losses == plain.losses
        assert beside.grad_norms == plain.grad_norms, f"{layout} {groups.coords}"
        for name, tensor in beside.tensors.items():
            assert torch.equal(tensor, plain.tensors[name]), f"{layout} {groups.coords} {name}"
        destroy_model_parallel()


OVERLAPPED = [
    Layout(pp=2, ep=2, num_layer_list=(1, 2), recompute_num_layers=1),
    Layout(tp=2, ep=4, is_mean=True, is_sharded=False),
]
# The same axes, in other company.
OVERLAPPED_TOO = [
    Layout(tp=2, pp=2, ep=2, num_layer_list=(2, 1)),
    Layout(tp=2, ep=4, is_mean=True),
    Layout(ep=2),
    Layout(is_sharded=False),
]


@pytest.mark.parametrize("layouts", [OVERLAPPED, pytest.param(OVERLAPPED_TOO, marks=pytest.mark.slow)])
def test_overlapped_communication_changes_no_bit(layouts: list[Layout]) -> None:
    run_ranks(_check_overlap, 4, layouts, timeout_s=100)
