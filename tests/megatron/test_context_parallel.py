"""Context parallelism: index arithmetic, attention between ranks, and models, each against one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.context_parallel import ContextParallelAttention, gathered_rows, zigzag_indices
from megatron.core.context_parallel.attention import COMM_TYPES
from megatron.core.models.gpt import GPTModel
from megatron.core.ops import reference_ops
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.megatron.model_helpers import make_model, one_process_world, packed_batch, tiny_config
from tests.megatron.test_model_layouts import _reduced_grads
from tests.parallel.launcher import run_ranks
from tests.parallel.layout_table import local_part

ATTENTION_LENGTHS = [16, 8, 40, 24]
MODEL_LENGTHS = [[16, 8, 24], [8, 40]]


def _bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_each_rank_holds_two_mirrored_chunks_of_every_sequence() -> None:
    cu_seqlens = _bounds([8, 0, 4])
    assert zigzag_indices(cu_seqlens, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_indices(cu_seqlens, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert zigzag_indices(_bounds([3, 2]), 1, 0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_values_of_all_ranks_go_back_to_the_packed_order(cp_size: int) -> None:
    cu_seqlens = _bounds([length + -length % (2 * cp_size) for length in (1, 30, 7, 48)])
    values = torch.randn(int(cu_seqlens[-1]))
    parts = [values[zigzag_indices(cu_seqlens, cp_size, rank)] for rank in range(cp_size)]
    assert len({len(part) for part in parts}) == 1
    assert torch.equal(torch.cat(parts)[gathered_rows(cu_seqlens, cp_size)], values)


def test_lengths_that_cannot_be_cut_are_named() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 6 tokens; context_parallel_size 2 needs multiples of 4"):
        zigzag_indices(_bounds([8, 6]), 2, 0)


def _attention_inputs(heads: int, kv_heads: int, shared: int) -> list[torch.Tensor]:
    """q, k, v, the part of the keys that heads share (size 0: none) and the output's gradient, of all tokens."""
    generator = torch.Generator().manual_seed(0)
    total = sum(ATTENTION_LENGTHS)
    shapes = [(heads, 6 + shared), (kv_heads, 6), (kv_heads, 5), (1, shared), (heads, 5)]
    return [torch.randn(total, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _attend(groups: parallel_state.ProcessGroups, comm_type: str, heads: tuple[int, int, int]) -> list[torch.Tensor]:
    """This rank's output and gradients of q, k, v and the shared part."""
    params = PackedSeqParams(_bounds(ATTENTION_LENGTHS), max(ATTENTION_LENGTHS))
    mine = zigzag_indices(params.cu_seqlens, groups.cp.size(), groups.cp.rank())
    *inputs, grad = (x[mine] for x in _attention_inputs(*heads))
    leaves = [x.requires_grad_() for x in inputs if x.numel()]
    shared_k = leaves[3] if len(leaves) == 4 else None
    attend = ContextParallelAttention(groups, reference_ops(), 0.4, comm_type)
    out = attend(*leaves[:3], params, shared_k)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def _attend_all(cases: list[tuple[str, tuple[int, int, int]]], cp_size: int) -> list[list[torch.Tensor]]:
    groups = parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    results = [_attend(groups, *case) for case in cases]
    parallel_state.destroy_model_parallel()
    return results


# Latent attention, grouped heads, and fewer heads of keys than ranks.
HEADS = [(4, 4, 3), (8, 4, 0), (4, 2, 0)]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_attention_between_ranks_equals_one_process(cp_size: int) -> None:
    cases = [(comm_type, heads) for comm_type in COMM_TYPES for heads in HEADS]
    with one_process_world():
        expected = _attend_all(cases, 1)
    rows = gathered_rows(_bounds(ATTENTION_LENGTHS), cp_size)
    by_rank = run_ranks(_attend_all, cp_size, cases, cp_size)
    for index, case in enumerate(cases):
        for place, wanted in enumerate(expected[index]):
            found = torch.cat([results[index][place] for results in by_rank])[rows]
            assert (found - wanted).abs().max() < 1e-11 * wanted.abs().max(), (case, place)


def grouped_query_config(**changes: Any) -> TransformerConfig:
    """Two dense layers, 8 heads over 4 of keys and values, with norms."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 96, "vocab_size": 128}
    return TransformerConfig(**sizes, num_query_groups=4, qk_layernorm=True, init_method_std=0.1, **changes)


def _run_model(
    sizes: dict[str, Any], changes: dict[str, Any], make_config: Callable[..., TransformerConfig]
) -> tuple[Any, float, dict[str, torch.Tensor]]:
    """(where this rank stands, summed loss of all ranks, reduced gradients) of a model on this rank's tokens."""
    groups = parallel_state.initialize_model_parallel(**sizes)
    model = make_model(make_config(sequence_parallel=groups.tp.size() > 1, **changes), groups)
    loss = torch.zeros(())
    for index, lengths in enumerate(MODEL_LENGTHS):
        if index % groups.dp.size() == groups.coords.dp:
            batch = packed_batch(lengths, 128, seed=index)
            mine = zigzag_indices(batch.params.cu_seqlens, groups.cp.size(), groups.cp.rank())
            losses_T = model(batch.ids_T[mine], batch.positions_T[mine], batch.params, labels_T=batch.labels_T[mine])
            losses_T.sum().backward()
            loss += losses_T.detach().sum()
    dist.all_reduce(loss, group=groups.dp_cp)
    grads = _reduced_grads(model, groups)
    parallel_state.destroy_model_parallel()
    return groups.coords, loss.item(), grads


Case = tuple[dict[str, Any], dict[str, Any]]


def _run_models(cases: list[Case], make_config: Callable[..., TransformerConfig]) -> list[Any]:
    return [_run_model(*case, make_config) for case in cases]


def _assert_models_equal_one_process(
    world_size: int, cases: list[Case], make_config: Callable[..., TransformerConfig] = tiny_config
) -> None:
    with one_process_world():
        _, loss, grads = _run_model({}, {}, make_config)
    by_rank = run_ranks(_run_models, world_size, cases, make_config)
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        layout = ParallelLayout(world_size=world_size, **case[0])
        for at, rank_loss, rank_grads in ranks:
            assert abs(rank_loss - loss) < 1e-5 * abs(loss), (case, rank_loss, loss)
            assert rank_grads.keys() == grads.keys()
            for name, grad in rank_grads.items():
                expected = local_part(name, grads[name], layout, at)
                difference = (grad - expected).abs().max() / grads[name].abs().max()
                assert difference < 1e-5, (case, at, name, difference.item())


CP2 = {"context_parallel_size": 2}
TP2_CP2 = CP2 | {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj", "core_attn")}


def test_two_ranks_give_the_gradients_of_one_process() -> None:
    cp2_ep2 = CP2 | {"expert_model_parallel_size": 2}
    cases = [
        (CP2, {"cp_comm_type": "p2p"} | SELECTIVE),
        (cp2_ep2, {"cp_comm_type": "all_gather"} | FULL),
        (cp2_ep2, {"cp_comm_type": "a2a"} | SELECTIVE),
    ]
    _assert_models_equal_one_process(2, cases)


def test_latents_may_travel_instead_of_keys_and_values() -> None:
    latents = {"cp_send_latents": True}
    cases = [
        (CP2, latents | {"cp_comm_type": "p2p"} | SELECTIVE),
        (CP2, latents | {"cp_comm_type": "all_gather"} | FULL),
        (CP2, latents | {"cp_comm_type": "a2a"} | SELECTIVE),
    ]
    _assert_models_equal_one_process(2, cases)


def test_four_ranks_give_the_gradients_of_one_process() -> None:
    cases = [
        (TP2_CP2, {"cp_comm_type": "p2p", "cp_send_latents": True} | FULL),
        ({"context_parallel_size": 4, "expert_model_parallel_size": 2}, {}),
    ]
    _assert_models_equal_one_process(4, cases)


@pytest.mark.slow  # the other forms with other axes; two ranks have each form
def test_more_of_four_ranks_give_the_gradients_of_one_process() -> None:
    cases = [
        (TP2_CP2, {"cp_comm_type": "a2a"} | FULL),
        (CP2 | {"expert_model_parallel_size": 4}, {"cp_comm_type": "all_gather"}),
    ]
    _assert_models_equal_one_process(4, cases)


def test_grouped_query_attention_over_ranks() -> None:
    cases = [(CP2, {"cp_comm_type": comm_type}) for comm_type in COMM_TYPES]
    _assert_models_equal_one_process(2, cases, grouped_query_config)


def test_heads_that_do_not_divide_are_told(one_rank: parallel_state.ProcessGroups) -> None:
    layout = ParallelLayout(world_size=16, tensor_model_parallel_size=2, context_parallel_size=8)
    groups = replace(one_rank, layout=layout, coords=layout.coords(0))
    with pytest.raises(ValueError, match="num_attention_heads 4 does not divide .* 2 times context_parallel_size 8"):
        GPTModel(tiny_config(sequence_parallel=True, cp_comm_type="a2a"), groups, reference_ops())


def test_config_names_what_cannot_travel() -> None:
    with pytest.raises(ValueError, match="cp_comm_type is 'ring'; use .*; cp_send_latents is True; only latent"):
        grouped_query_config(cp_comm_type="ring", cp_send_latents=True)
