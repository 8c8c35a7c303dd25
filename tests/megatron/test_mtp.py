"""Multi-token prediction against the paper's definition, computed sequence by sequence in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.moe.aux_loss import set_aux_loss_scale
from megatron.core.transformer.multi_token_prediction import collect_mtp_losses
from tests.megatron.model_helpers import PackedBatch, make_model, one_process_groups, packed_batch, tiny_config

LENGTHS = [9, 1, 14, 2, 6]  # some too short for a second, or any, prediction
FACTOR = 0.3
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _config(**changes: Any) -> Any:
    return tiny_config(**{"mtp_num_layers": 2, "mtp_loss_scaling_factor": FACTOR} | changes)


def _norm(x: torch.Tensor, norm: nn.Module, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.weight


def _run(model: GPTModel, part: nn.Module, x_TH: torch.Tensor) -> torch.Tensor:
    """``part`` over one sequence from its beginning."""
    params = PackedSeqParams(torch.tensor([0, len(x_TH)], dtype=torch.int32), len(x_TH))
    return part(x_TH, model.rotary_pos_emb(torch.arange(len(x_TH))), params)


def _paper(
    model: GPTModel, batch: PackedBatch, labels_T: torch.Tensor | None, weight_T: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Main losses [T], and of each depth the weighted sum of its losses and the sum of the weights.

    arXiv 2412.19437, equations 21 to 25: h'_i = M [norm(h_i^(k-1)); norm(Emb(t_(i+k)))] for i = 1 .. T-k, through a
    layer, and from there the token t_(i+k+1). (The published matrices take the embedding first.)
    """
    lengths = batch.params.cu_seqlens.diff().tolist()
    embedding, head = model.embedding.word_embeddings.weight, model.output_layer.weight
    eps = model.config.layernorm_epsilon
    main, depths = [], [(torch.zeros(()), torch.zeros(())) for _ in model.mtp.layers]
    labels = batch.labels_T if labels_T is None else labels_T
    for ids, own, weights in zip(*(x.split(lengths) for x in (batch.ids_T, labels, weight_T)), strict=True):
        h_TH = _run(model, model.decoder, F.embedding(ids, embedding))
        main.append(F.cross_entropy(h_TH @ head.t(), own, reduction="none"))
        for k, layer in enumerate(model.mtp.layers, start=1):
            if len(ids) <= k:
                break
            embedded = _norm(F.embedding(ids[k:], embedding), layer.enorm, eps)
            both = torch.cat([embedded, _norm(h_TH[:-1], layer.hnorm, eps)], dim=-1)
            h_TH = _norm(
                _run(model, layer.transformer_layer, both @ layer.eh_proj.weight.t()), layer.final_layernorm, eps
            )
            target, weight, logits = own[k:], weights[k:], h_TH @ head.t()
            if labels_T is None:  # what the ids themselves say
                target, weight, logits = ids[k + 1 :], weight[:-1], logits[:-1]
            loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum()
            depths[k - 1] = (depths[k - 1][0] + loss, depths[k - 1][1] + weight.sum())
    return torch.cat(main), depths


def _grads(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return found


def _assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, grad in want.items():
        assert (got[name] - grad).abs().max() < 1e-5 * grad.abs().max(), name


@pytest.mark.parametrize("has_labels", [True, False])
@pytest.mark.parametrize("per_token", [True, False])
def test_loss_and_gradients_are_the_papers(has_labels: bool, per_token: bool) -> None:
    config = _config(calculate_per_token_loss=per_token)
    batch = packed_batch(LENGTHS, config.vocab_size)
    weight_T = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(1))
    labels_T = batch.labels_T if has_labels else None
    with one_process_groups() as groups:
        model = make_model(config, groups)
        main_T, depths = _paper(model, batch, labels_T, weight_T)
        total = (main_T * weight_T).sum()
        for loss, weight in depths:
            total = total + FACTOR / 2 * (loss * 0.25 if per_token else loss / weight)
        total.backward()
        want = _grads(model)

        set_aux_loss_scale(model, 0.25 if per_token else 1.0)
        inputs = (batch.ids_T, batch.positions_T, batch.params)
        loss_T = model(*inputs, labels_T=labels_T, loss_mask_W=weight_T)
        if labels_T is None:
            loss_T = F.cross_entropy(loss_T, batch.labels_T, reduction="none")
        torch.testing.assert_close(loss_T, main_T)
        (loss_T * weight_T).sum().backward()
        _assert_close(_grads(model), want)
        means = [loss.item() / weight.item() for loss, weight in depths]
        assert collect_mtp_losses(model, config, groups) == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {"share_embeddings_and_output_weights": True}, FULL])
def test_detached_from_the_encoder_its_losses_train_the_depths_alone(changes: dict[str, Any]) -> None:
    """Neither layers nor embedding nor output layer get other gradients than without it, to the bit."""
    batch = packed_batch(LENGTHS, _config().vocab_size)
    with one_process_groups() as groups:
        attached = _training_grads(groups, batch, **changes)
        detached = _training_grads(groups, batch, mtp_detach_encoder=True, **changes)
        alone = _training_grads(groups, batch, mtp_num_layers=None, **changes)
    depths = {name for name in attached if name.startswith("mtp")}
    assert attached.keys() == detached.keys() == alone.keys() | depths and not alone.keys() & depths
    assert all(torch.equal(detached[name], grad) for name, grad in alone.items())
    assert any((attached[name] - grad).abs().max() > 1e-4 * grad.abs().max() for name, grad in alone.items())
    assert all(detached[name].abs().max() > 0 for name in depths if ".0." in name)


def _training_grads(groups: ProcessGroups, batch: PackedBatch, **changes: Any) -> dict[str, torch.Tensor]:
    model = make_model(_config(**{"calculate_per_token_loss": True} | changes), groups)
    (model(batch.ids_T, batch.positions_T, batch.params, labels_T=batch.labels_T) * _real(batch)).sum().backward()
    return _grads(model)


def _real(batch: PackedBatch) -> torch.Tensor:
    padding = batch.params.is_padding_T
    return torch.ones(len(batch.ids_T)) if padding is None else (~padding).float()


@pytest.mark.parametrize(
    "changes",
    [
        FULL,
        {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj", "core_attn", "layernorm", "moe")},
    ],
)
def test_recompute_changes_nothing(changes: dict[str, Any]) -> None:
    batch = packed_batch(LENGTHS, 128)
    with one_process_groups() as groups:
        want = _training_grads(groups, batch)
        got = _training_grads(groups, batch, **changes)
    assert got.keys() == want.keys() and all(torch.equal(got[name], grad) for name, grad in want.items())


def test_packing_and_padding_change_nothing() -> None:
    """Two sequences in one micro-batch or in two, or filled up: the same sums of gradients."""
    lengths = [9, 14]
    both = packed_batch(lengths, 128)
    with one_process_groups() as groups:
        want = _training_grads(groups, both)
        parts: dict[str, torch.Tensor] = {}
        for ids, labels in zip(both.ids_T.split(lengths), both.labels_T.split(lengths), strict=True):
            size = len(ids)
            fill = torch.zeros(5, dtype=torch.int64)  # in the same sequence, as context parallelism fills up
            params = PackedSeqParams(torch.tensor([0, size + 5]), size + 5, torch.arange(size + 5) >= size)
            padded = PackedBatch(torch.cat([ids, fill]), torch.arange(size + 5), torch.cat([labels, fill]), params)
            for name, grad in _training_grads(groups, padded).items():
                parts[name] = parts.get(name, torch.zeros(())) + grad
    _assert_close(parts, want)


def test_a_loss_without_weight_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = packed_batch([9, 14], 128)
    labels_T = batch.labels_T.clamp(min=1)
    labels_T[::4] = 0
    found = []
    with one_process_groups() as groups:
        for junk in (0.0, float("nan")):
            config = _config()
            model = make_model(config, groups)
            losses = model._token_losses
            monkeypatch.setattr(
                model,
                "_token_losses",
                lambda h, t, f=losses, x=junk, **how: f(h, t, **how) + torch.where(t == 0, x, 0.0),
            )
            given = {"labels_T": labels_T, "loss_mask_W": (labels_T > 0).float()}
            loss_T = model(batch.ids_T, batch.positions_T, batch.params, **given)
            loss_T[labels_T > 0].sum().backward()
            found.append((_grads(model), collect_mtp_losses(model, config, groups)))
    (want, want_means), (got, got_means) = found
    assert got_means == want_means and all(torch.equal(got[name], grad) for name, grad in want.items())


def test_it_is_only_there_in_training() -> None:
    batch = packed_batch(LENGTHS, 128)
    inputs = (batch.ids_T, batch.positions_T, batch.params)
    with one_process_groups() as groups, torch.no_grad():
        plain, model = make_model(tiny_config(), groups), make_model(_config(), groups)
        assert not any("mtp" in name for name in plain.state_dict())
        assert {name for name in model.state_dict() if "mtp" not in name} == set(plain.state_dict())
        assert model.mtp is not None and model.mtp.layers[1].transformer_layer.global_layer == 4
        want = plain(*inputs)
        assert torch.equal(model(*inputs), want)
        with torch.enable_grad():
            assert torch.equal(model(*inputs), want), "a loss is attached, no value changes"
            model.eval()
            model(*inputs, labels_T=batch.labels_T).sum().backward()
        assert all(param.grad is None for name, param in model.named_parameters() if "mtp" in name)
        router = model.mtp.layers[0].transformer_layer.mlp.router
        assert router.local_tokens_per_expert.sum() == 2 * sum(length - 1 for length in LENGTHS), "no last tokens"
    with pytest.raises(ValueError, match="mtp_num_layers is 0; it must be None or at least 1"):
        tiny_config(mtp_num_layers=0)
