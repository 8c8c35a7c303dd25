"""Balance and z-losses equal their formulas, and neither layout, packing nor padding changes value or gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.context_parallel import zigzag_indices
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.moe.aux_loss import AuxLossScaler, TokenRows, collect_moe_aux_losses, set_aux_loss_scale
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.megatron.model_helpers import make_model, one_process_groups, one_process_world, packed_batch, tiny_config
from tests.megatron.moe_helpers import assert_close, make_layer, reduced_grads
from tests.parallel.launcher import run_ranks

LENGTHS = [6, 1, 9, 4]
SOFTMAX = {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
BALANCE = {"moe_aux_loss_coeff": 0.7}
BY_SEQUENCE = {**BALANCE, "moe_router_load_balancing_type": "seq_aux_loss"}
Z = {"moe_z_loss_coeff": 0.3}
PER_TOKEN = {"calculate_per_token_loss": True}


class _Model(nn.Module):
    """What ``collect_moe_aux_losses`` looks into."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer, self.config = layer, layer.router.config


def _sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(length, 64, generator=generator) for length in LENGTHS]


def _formula(layer: MoELayer, sequences: list[torch.Tensor], by_sequence: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Balance value and z value [B] of each sequence (of all of them together: B is 1), by plain autograd."""
    config = layer.router.config
    balance, z = [], []
    for x_TH in sequences if by_sequence else [torch.cat(sequences)]:
        logits_TE = x_TH @ layer.router.weight.T
        if config.moe_router_score_function == "softmax":
            scores_TE = logits_TE.softmax(-1)
        else:
            scores_TE = logits_TE.sigmoid() / logits_TE.sigmoid().sum(-1, keepdim=True)
        chosen = layer.router(x_TH)[1]
        share_E = torch.bincount(chosen.flatten(), minlength=8) * 8 / (2 * len(x_TH))
        balance.append((share_E * scores_TE.mean(0)).sum())
        z.append(logits_TE.logsumexp(-1).square().mean())
    return torch.stack(balance), torch.stack(z)


@pytest.mark.parametrize("per_token", [{}, PER_TOKEN], ids=["mean", "per_token"])
@pytest.mark.parametrize("scores", [{}, SOFTMAX], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize("balance", [BALANCE, BY_SEQUENCE], ids=["batch", "sequence"])
def test_losses_equal_their_formulas(balance: dict, scores: dict, per_token: dict) -> None:
    by_sequence = balance is BY_SEQUENCE
    sequences = _sequences()
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    with one_process_groups() as groups:
        layer = make_layer(groups, **balance, **scores, **per_token, **Z)
        set_aux_loss_scale(layer, 0.25)
        values, z = _formula(layer, sequences, by_sequence)
        lengths = torch.tensor(LENGTHS if by_sequence else [sum(LENGTHS)])
        weights = lengths if per_token else torch.full((len(lengths),), 1 / len(lengths))
        z_weights = lengths if per_token else lengths / lengths.sum()
        loss = 0.7 * (values * weights).sum() + 0.3 * (z * z_weights).sum()
        (expected,) = torch.autograd.grad(0.25 * loss, layer.router.weight)
        probs_TK, _, _ = layer.router(torch.cat(sequences), PackedSeqParams(bounds, max(LENGTHS)))
        (0 * probs_TK).sum().backward()
        assert layer.router.weight.grad is not None
        assert_close(layer.router.weight.grad, expected, "gradient")
        layer.router.aux_losses.totals = None
        layer.router(torch.cat(sequences), PackedSeqParams(bounds, max(LENGTHS)))
        found = collect_moe_aux_losses(_Model(layer), groups)
    name = "seq_load_balancing_loss" if by_sequence else "load_balancing_loss"
    tokens = lengths / lengths.sum()
    assert found[name][0] == pytest.approx((values * tokens).sum().item(), rel=1e-5)
    assert found["z_loss"][0] == pytest.approx((z * tokens).sum().item(), rel=1e-5)


@pytest.mark.parametrize("scores", [{}, SOFTMAX], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize("balance", [BALANCE, BY_SEQUENCE], ids=["batch", "sequence"])
def test_padding_is_not_read(balance: dict, scores: dict) -> None:
    """NaN and infinities of padding change no bit of the gradient of the logits and of what is logged."""
    generator = torch.Generator().manual_seed(3)
    clean_TE, probs_TK = torch.randn(9, 8, generator=generator), torch.ones(9, 2)
    indices_TK = torch.randint(8, (9, 2), generator=generator)
    padding_T = torch.tensor([0, 0, 0, 1, 0, 0, 1, 0, 1]).bool()
    junk_TE = clean_TE.clone()
    junk_TE[padding_T] = torch.tensor([float("nan"), float("inf"), float("-inf")])[:, None].expand(3, 8)
    found = []
    with one_process_groups() as groups:
        for logits_TE in (clean_TE, junk_TE):
            router = make_layer(groups, **balance, **scores, **Z).router
            params = PackedSeqParams(torch.tensor([0, 4, 7, 9]), 4, padding_T)
            rows = TokenRows.of(logits_TE, params, groups, router.aux_losses.by_sequence)
            leaf_TE = logits_TE.clone().requires_grad_()
            router.aux_losses.attach(probs_TK.requires_grad_(), leaf_TE, indices_TK, rows, True).sum().backward()
            assert leaf_TE.grad is not None and router.aux_losses.totals is not None
            found.append((leaf_TE.grad, router.aux_losses.totals))
    assert found[0][0].isfinite().all() and torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_losses_that_are_off_cost_nothing() -> None:
    with one_process_groups() as groups:
        layer = make_layer(groups, **BY_SEQUENCE)
        x_TH = torch.cat(_sequences())
        with torch.no_grad():
            layer(x_TH)
        layer.eval()
        layer(x_TH)
        assert layer.router.aux_losses.totals is None
        assert not make_layer(groups).router.aux_losses.is_on
        assert not make_layer(groups, **BALANCE, moe_router_load_balancing_type="none").router.aux_losses.is_on


@pytest.mark.parametrize("modules", [None, ("moe", "moe_act", "layernorm")], ids=["full", "selective"])
def test_recompute_counts_nothing_twice(modules: tuple[str, ...] | None) -> None:
    recompute: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": modules}
    if modules is None:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    batch = packed_batch(LENGTHS, 128)
    results = []
    with one_process_groups() as groups:
        for change in ({}, recompute):
            model = make_model(tiny_config(**BY_SEQUENCE, **Z, **change), groups)
            model(batch.ids_T, batch.positions_T, batch.params, labels_T=batch.labels_T).mean().backward()
            grads = {name: param.grad for name, param in model.named_parameters()}
            results.append((grads, collect_moe_aux_losses(model, groups)))
    (grads, values), (grads_again, values_again) = results
    assert values == values_again and sorted(values["z_loss"]) == [1, 2]
    for name, grad in grads.items():
        assert grad is not None
        assert_close(grads_again[name], grad, name, 1e-6)


def _shard(groups: ProcessGroups) -> tuple[torch.Tensor, PackedSeqParams]:
    """This rank's rows of its replica's sequences (every dp-th), each padded for CP, and a dummy one for TP."""
    cp, tp = groups.cp.size(), groups.tp.size()
    padded, real = [], []
    for x_TH in _sequences()[groups.dp.rank() :: groups.dp.size()]:
        missing = -len(x_TH) % (2 * cp) if cp > 1 else 0
        padded.append(torch.cat([x_TH, torch.full((missing, 64), 3.0)]))
        real.append(torch.arange(len(padded[-1])) < len(x_TH))
    dummy = 0 if cp * tp == 1 else 2 * cp * tp - sum(map(len, padded)) % (2 * cp * tp)
    if dummy:
        padded.append(torch.full((dummy, 64), -2.0))
        real.append(torch.zeros(dummy, dtype=torch.bool))
    bounds = torch.tensor([0, *map(len, padded)]).cumsum(0).int()
    local = zigzag_indices(bounds, cp, groups.cp.rank())
    rows = local.chunk(tp)[groups.tp.rank()]
    is_padding_T = ~torch.cat(real)[local]
    params = PackedSeqParams(bounds, max(map(len, padded)), is_padding_T if dummy else None)
    return torch.cat(padded)[rows].requires_grad_(), params


def _run(layouts: list[dict[str, Any]], changes: list[dict[str, Any]]) -> list[list[tuple[Any, ...]]]:
    """Per layout and config: gradient of the gate, tokens counted on all ranks, values for the log."""
    results = []
    for sizes in layouts:
        groups = parallel_state.initialize_model_parallel(**sizes)
        of_layout = []
        for change in changes:
            layer = make_layer(groups, **change)
            if change.get("calculate_per_token_loss"):
                set_aux_loss_scale(layer, 1 / sum(LENGTHS))
            x_TH, params = _shard(groups)
            (0 * layer(x_TH, params)).sum().backward()
            counts = layer.router.local_tokens_per_expert.clone()
            torch.distributed.all_reduce(counts, group=groups.tp_dp_cp)
            values = collect_moe_aux_losses(_Model(layer), groups)
            assert collect_moe_aux_losses(_Model(layer), groups) == {}
            of_layout.append((reduced_grads(layer, groups)["router.weight"], counts, values))
        parallel_state.destroy_model_parallel()
        results.append(of_layout)
    return results


def _assert_equal_to_one_process(world_size: int, layouts: list[dict[str, Any]], changes: list[dict[str, Any]]) -> None:
    with one_process_world():
        (alone,) = _run([{}], changes)
    for of_rank in run_ranks(_run, world_size, layouts, changes):
        for sizes, of_layout in zip(layouts, of_rank, strict=True):
            for change, (grad, counts, values), one in zip(changes, of_layout, alone, strict=True):
                assert_close(grad, one[0], (sizes, change))
                assert counts.equal(one[1]) and counts.sum() == 2 * sum(LENGTHS), (sizes, change)
                assert values.keys() == one[2].keys()
                for name in values:
                    assert values[name] == pytest.approx(one[2][name], rel=1e-5), (sizes, change, name)


TP, CP = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}
SUMS = [{**BY_SEQUENCE, **Z, **PER_TOKEN}]
ALL = [*SUMS, {**BY_SEQUENCE, **Z}, {**BALANCE, **PER_TOKEN}, Z]


def test_two_ranks_equal_one_process() -> None:
    """Ranks that share a micro-batch: means and sums, over sequences and over the batch."""
    _assert_equal_to_one_process(2, [TP, CP], ALL)


def test_replicas_equal_one_process() -> None:
    """Other micro-batches: what is a sum over sequences and tokens does not notice."""
    _assert_equal_to_one_process(2, [{}], SUMS)


def test_four_ranks_equal_one_process() -> None:
    _assert_equal_to_one_process(4, [{**TP, **CP, "expert_model_parallel_size": 2}, CP], SUMS)


def test_a_loss_enters_backward_with_the_scale_of_that_time() -> None:
    scaler = AuxLossScaler()
    x, beside = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    y = scaler.attach(2 * x, beside.square().sum())
    scaler.scale = 0.5
    y.sum().backward()
    assert x.grad is not None and x.grad.eq(2).all()
    assert beside.grad is not None and beside.grad.eq(1).all()
