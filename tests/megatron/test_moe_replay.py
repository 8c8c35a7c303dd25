"""Routing recorded in one pass is what another pass replays: under recompute, with other weights, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.context_parallel import gathered_rows, zigzag_indices
from megatron.core.models.gpt.gpt_model import make_gpt_model
from megatron.core.ops import reference_ops
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import MicroBatchRouting, RouterReplay
from tests.megatron.model_helpers import make_model, one_process_groups, one_process_world, packed_batch, tiny_config
from tests.megatron.moe_helpers import assert_close, make_layer, tokens
from tests.parallel.launcher import run_ranks

LENGTHS = [[8, 12], [4, 16]]  # two micro-batches; whole pairs of chunks for two context-parallel ranks
NUM_TOKENS = 20
Choices = dict[int, torch.Tensor]


def _given_choices(microbatch: int) -> Choices:
    """Any two experts of each token, in both MoE layers."""
    generator = torch.Generator().manual_seed(microbatch)
    return {
        layer: torch.rand(NUM_TOKENS, 8, generator=generator).argsort(-1)[:, :2].to(torch.uint8) for layer in (1, 2)
    }


def test_weights_of_replayed_experts_are_those_of_the_current_gate() -> None:
    with one_process_groups() as groups:
        router = make_layer(groups).router
        x_TH, _ = tokens(NUM_TOKENS)
        replay = RouterReplay(8, groups)
        given_TK = _given_choices(0)[1]
        params = PackedSeqParams(torch.tensor([0, NUM_TOKENS]).int(), NUM_TOKENS, routing=replay.replay({0: given_TK}))
        probs_TK, indices_TK, counts_E = router(x_TH, params)
        scores_TK = (x_TH @ router.weight.T).sigmoid().gather(1, given_TK.long())
        torch.testing.assert_close(probs_TK, 2.5 * scores_TK / scores_TK.sum(1, keepdim=True))
        assert indices_TK.equal(given_TK.long())
        assert counts_E.equal(torch.bincount(given_TK.flatten().long(), minlength=8))
        probs_TK[:, 0].sum().backward()
        assert router.weight.grad is not None and router.weight.grad.abs().sum() > 0

        known_T = torch.arange(NUM_TOKENS) < 15
        own_TK = router(x_TH)[1]
        half = router(x_TH, replace(params, routing=replay.replay({0: given_TK}, known_T)))[1]
        assert half[:15].equal(given_TK[:15].long()) and half[15:].equal(own_TK[15:])


def test_what_cannot_be_replayed_is_an_error() -> None:
    with one_process_groups() as groups:
        router = make_layer(groups).router
        replay = RouterReplay(8, groups)
        params = PackedSeqParams(torch.tensor([0, 5]).int(), 5)
        with pytest.raises(ValueError, match=r"layer 3 has experts 0..8; the model has 0..7"):
            replay.replay({3: torch.tensor([[0, 8]])})
        for choices, told in (
            (_given_choices(0), "has no choices for layer 0; it has those of layers 1, 2"),
            ({0: torch.zeros(4, 2)}, r"choices of shape \(4, 2\) .* for a pass with \(5, 2\)"),
        ):
            with pytest.raises(ValueError, match=told):
                router(torch.zeros(5, 64), replace(params, routing=replay.replay(choices)))


RECOMPUTES = [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    {"recompute_granularity": "selective", "recompute_modules": ("moe", "core_attn")},
]


@pytest.mark.parametrize("recompute", [{}, *RECOMPUTES], ids=["kept", "full", "selective"])
def test_recompute_takes_the_choice_of_the_first_run(recompute: dict[str, Any]) -> None:
    """Its gate would choose otherwise: the biases move between forward and backward."""
    batch = packed_batch(LENGTHS[0], 128)
    grads = []
    with one_process_groups() as groups:
        for change in ({}, recompute):
            model = make_model(tiny_config(**change), groups)
            routing = RouterReplay(8, groups).record()
            params = replace(batch.params, routing=routing)
            loss = model(batch.ids_T, batch.positions_T, params, labels_T=batch.labels_T).sum()
            assert sorted(routing.choices) == [1, 2] and routing.choices[1].dtype == torch.uint8
            before = routing.choices
            for router in _routers(model):
                router.expert_bias.copy_(torch.arange(8) % 2 * 10.0 if change else router.expert_bias)
            loss.backward()
            assert all(routing.choices[layer].equal(before[layer]) for layer in before)
            grads.append({name: param.grad for name, param in model.named_parameters()})
    for name, grad in grads[0].items():
        assert_close(grads[1][name], grad, name, 1e-6)


def _routers(model: nn.Module) -> list[TopKRouter]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def _step(
    model: nn.Module, groups: ProcessGroups, routing_of: Callable[[int], MicroBatchRouting], forward_only: bool
) -> list[Choices]:
    """One pass over both micro-batches -> what each recorded, in the order of the whole sequences."""
    replay = RouterReplay(8, groups)
    routings = []

    def local_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, PackedSeqParams]]:
        for index, lengths in enumerate(LENGTHS):
            batch = packed_batch(lengths, 128, seed=index)
            rows = zigzag_indices(batch.params.cu_seqlens, groups.cp.size(), groups.cp.rank())
            routings.append(routing_of(index))
            params = replace(batch.params, routing=routings[-1])
            yield batch.ids_T[rows], batch.positions_T[rows], batch.labels_T[rows], params

    def forward_step(batches: Any, part: nn.Module) -> tuple[torch.Tensor, Any]:
        ids_T, positions_T, labels_T, params = next(batches)
        output = part(ids_T, positions_T, params, labels_T=labels_T)
        return output, lambda loss_T: (loss_T.sum(), {"loss": loss_T.sum().item()})

    num_rows = NUM_TOKENS // groups.cp.size() // groups.tp.size()
    get_forward_backward_func(groups)(
        forward_step_func=forward_step,
        data_iterator=local_batches(),
        model=model,
        forward_only=forward_only,
        tensor_shapes=[(num_rows, 64)] * len(LENGTHS),
    )
    found = []
    for routing, lengths in zip(routings, LENGTHS, strict=True):
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        whole = {}
        for layer, mine_TK in replay.choices(routing).items():
            parts = [torch.empty_like(mine_TK) for _ in range(groups.cp.size())]
            dist.all_gather(parts, mine_TK.contiguous(), group=groups.cp)
            whole[layer] = torch.cat(parts)[gathered_rows(bounds, groups.cp.size())]
        found.append(whole)
    return found


def _run(layouts: list[dict[str, Any]]) -> list[tuple[list[Choices], list[Choices], dict[int, torch.Tensor]]]:
    """Per layout: what the gates chose, what they chose in a replay, and the gates' gradients in that one."""
    results = []
    for sizes in layouts:
        groups = parallel_state.initialize_model_parallel(**sizes)
        config = tiny_config(sequence_parallel=groups.tp.size() > 1, calculate_per_token_loss=True, **RECOMPUTES[0])
        model = make_gpt_model(config, groups, reference_ops())
        model.init_weights(7)
        replay = RouterReplay(8, groups)
        own = _step(model, groups, lambda _, replay=replay: replay.record(), forward_only=True)

        def given(index: int, replay: RouterReplay = replay, groups: ProcessGroups = groups) -> MicroBatchRouting:
            bounds = torch.tensor([0, *LENGTHS[index]]).cumsum(0).int()
            rows = zigzag_indices(bounds, groups.cp.size(), groups.cp.rank())
            return replay.replay({layer: chosen[rows] for layer, chosen in _given_choices(index).items()})

        replayed = _step(model, groups, given, forward_only=False)
        grads = {}
        for router in _routers(model):
            assert router.weight.grad is not None
            dist.all_reduce(router.weight.grad, group=groups.tp_cp)
            grads[router.global_layer] = router.weight.grad
        results.append((own, replayed, grads))
        parallel_state.destroy_model_parallel()
    return results


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        (
            2,
            [
                {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
                {"context_parallel_size": 2},
                {"pipeline_model_parallel_size": 2, "num_layer_list": (1, 2)},
            ],
        ),
        (4, [{"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_model_parallel_size": 2}]),
    ],
)
def test_layouts_record_and_replay_the_same(world_size: int, layouts: list[dict[str, Any]]) -> None:
    with one_process_world():
        ((own, _, grads),) = _run([{}])
    for of_rank in run_ranks(_run, world_size, layouts):
        for sizes, (rank_own, rank_replayed, rank_grads) in zip(layouts, of_rank, strict=True):
            for index, choices in enumerate(rank_own):
                for layer, chosen in choices.items():
                    assert chosen.sort(-1).values.equal(own[index][layer].sort(-1).values), (sizes, index, layer)
            for index, choices in enumerate(rank_replayed):
                for layer, chosen in choices.items():
                    assert chosen.equal(_given_choices(index)[layer]), (sizes, index, layer)
            for layer, grad in rank_grads.items():
                assert_close(grad, grads[layer], (sizes, layer))
