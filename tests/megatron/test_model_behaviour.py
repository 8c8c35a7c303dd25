"""Recompute, dtypes, packing, token counts and the errors of a model that does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.models.gpt import GPTModel
from megatron.core.ops import reference_ops
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlock
from tests.megatron.model_helpers import make_model, one_process_groups, packed_batch, tiny_config


def _loss_grads_counts(changes: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    config = tiny_config(**changes)
    batch = packed_batch([9, 17, 6], config.vocab_size)
    with one_process_groups() as groups:
        model = make_model(config, groups)
        loss = model(batch.ids_T, batch.positions_T, batch.params, labels_T=batch.labels_T).mean()
        loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), grads, model.decoder.layers[1].mlp.router.local_tokens_per_expert


@pytest.mark.parametrize(("method", "num_layers"), [("uniform", 2), ("block", 2), ("block", 3)])
def test_recompute_changes_nothing(method: str, num_layers: int) -> None:
    loss, grads, counts = _loss_grads_counts({})
    recompute = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": num_layers}
    again, recomputed, recounted = _loss_grads_counts(recompute)
    assert again == loss
    assert recomputed.keys() == grads.keys()
    for name, grad in grads.items():
        assert torch.equal(recomputed[name], grad), name
    assert counts.sum() == 32 * 2 and torch.equal(recounted, counts)


@pytest.mark.parametrize(
    ("method", "want"),
    [("block", [([1, 1, 1], 0), ([1, 1, 1], 1), ([1, 1, 1], 2)]), ("uniform", [([3], 0), ([3, 1], 0), ([3, 2], 0)])],
)
def test_recompute_counts_the_layers_of_each_stage(method: str, want: list[tuple[list[int], int]]) -> None:
    """Stages of 3, 4 and 5 layers, N = 3: what is recomputed together, and how many layers keep their activations."""
    recompute = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": 3}
    config = tiny_config(num_layers=12, moe_layer_freq=[0] * 12, **recompute)
    with one_process_groups() as groups:
        layout = replace(groups.layout, pipeline_model_parallel_size=3, num_layer_list=(3, 4, 5), world_size=3)
        for stage, (recomputed, kept) in enumerate(want):
            at_stage = replace(groups, layout=layout, coords=replace(groups.coords, pp=stage))
            runs = TransformerBlock(config, at_stage, reference_ops(), post_layer_norm=False)._runs()
            assert [len(layers) for layers, is_recomputed in runs if is_recomputed] == recomputed
            assert sum(len(layers) for layers, is_recomputed in runs if not is_recomputed) == kept


def test_bf16_stays_near_fp32() -> None:
    """Every expert is chosen, as a choice that tips over in the lower precision would be a real difference."""
    every_expert = {"moe_router_topk": 8, "moe_router_num_groups": None, "moe_router_group_topk": None}
    loss, grads, _ = _loss_grads_counts(every_expert)
    loss_bf16, grads_bf16, _ = _loss_grads_counts(every_expert | {"params_dtype": torch.bfloat16})
    assert loss_bf16.dtype == torch.float32
    assert abs(loss_bf16 - loss) < 0.02 * loss
    for name, grad in grads_bf16.items():
        assert grad.dtype == torch.bfloat16
        cosine = torch.cosine_similarity(grad.float().flatten(), grads[name].flatten(), dim=0)
        assert cosine > 0.98, (name, cosine)


def test_counts_only_grow_in_training_passes() -> None:
    config = tiny_config()
    batch = packed_batch([4, 4], config.vocab_size)
    with one_process_groups() as groups:
        model = make_model(config, groups)
        with torch.no_grad():
            model(batch.ids_T, batch.positions_T, batch.params)
        model.eval()
        model(batch.ids_T, batch.positions_T, batch.params)
    router = model.decoder.layers[1].mlp.router
    assert router.local_tokens_per_expert.sum() == 0
    assert router.expert_bias.dtype == torch.float32
    state = model.state_dict()
    assert "decoder.layers.1.mlp.router.expert_bias" in state
    assert not any("local_tokens" in name or "inv_freq" in name for name in state)


def test_a_dummy_sequence_changes_no_other() -> None:
    config = tiny_config()
    batch = packed_batch([5, 8], config.vocab_size)
    padded = packed_batch([5, 8, 3], config.vocab_size)
    padded.ids_T[:13] = batch.ids_T
    with one_process_groups() as groups, torch.no_grad():
        model = make_model(config, groups)
        alone = model(batch.ids_T, batch.positions_T, batch.params)
        together = model(padded.ids_T, padded.positions_T, padded.params)
    torch.testing.assert_close(together[:13], alone, rtol=0, atol=1e-5)


def test_parameter_marks() -> None:
    with one_process_groups() as groups:
        model = make_model(tiny_config(sequence_parallel=True), groups)
    marks = {
        name: (p.tensor_model_parallel, p.partition_dim, p.allreduce, p.sequence_parallel)
        for name, p in model.named_parameters()
    }
    layer = "decoder.layers.1"
    assert marks["embedding.word_embeddings.weight"] == (True, 0, True, False)
    assert marks[f"{layer}.self_attention.linear_q_down_proj.weight"] == (False, -1, True, True)
    assert marks[f"{layer}.self_attention.kv_layernorm.weight"] == (False, -1, True, True)
    assert marks[f"{layer}.self_attention.linear_proj.weight"] == (True, 1, True, False)
    assert marks[f"{layer}.mlp.router.weight"] == (False, -1, True, True)
    assert marks[f"{layer}.mlp.experts.weight1"] == (False, -1, False, False)
    assert marks[f"{layer}.mlp.shared_experts.linear_fc2.weight"] == (True, 1, True, False)
    assert marks["decoder.final_layernorm.weight"] == (False, -1, True, True)


def test_every_problem_of_a_config_is_told() -> None:
    with pytest.raises(ValueError, match="moe_aux_loss_coeff is -0.01") as caught:
        tiny_config(moe_aux_loss_coeff=-0.01, moe_layer_freq=[0, 1], moe_router_topk=9, recompute_granularity="half")
    for told in ("moe_layer_freq has 2 entries", "moe_router_topk is 9", "recompute_granularity is 'half'"):
        assert told in str(caught.value)


def test_a_model_that_does_not_fit_its_layout_is_an_error() -> None:
    with one_process_groups() as groups:
        layout = replace(groups.layout, world_size=3, tensor_model_parallel_size=3)
        with pytest.raises(ValueError, match="sequence_parallel is False") as caught:
            GPTModel(tiny_config(), replace(groups, layout=layout), reference_ops())
    assert "4 attention heads" in str(caught.value)


def test_packing_equals_one_sequence_at_a_time() -> None:
    config = tiny_config()
    lengths = [5, 1, 12]
    batch = packed_batch(lengths, config.vocab_size)
    with one_process_groups() as groups, torch.no_grad():
        model = make_model(config, groups)
        packed = model(batch.ids_T, batch.positions_T, batch.params)
        single = [
            model(
                ids, torch.arange(len(ids)), PackedSeqParams(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
            )
            for ids in batch.ids_T.split(lengths)
        ]
    torch.testing.assert_close(packed, torch.cat(single), rtol=0, atol=1e-5)


class _LargestVocabulary(TorchDispatchMode):
    """The most rows of any product with a column for each token of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.num_rows = vocab_size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and result.shape[1] == self.vocab_size:
            self.num_rows = max(self.num_rows, result.shape[0])
        return result


@pytest.mark.parametrize("num_scored", [0, 3])
def test_logits_are_of_scored_tokens_alone_also_where_there_are_none(num_scored: int) -> None:
    """With none the loss is zero, and so is every gradient: the collectives of a backward pass still need one."""
    config = tiny_config(vocab_size=134)
    batch = packed_batch([9, 17, 6], config.vocab_size)
    with one_process_groups() as groups:
        model = make_model(config, groups)
        with _LargestVocabulary(config.vocab_size) as seen:
            logits = model(batch.ids_T, batch.positions_T, batch.params, scored_S=torch.arange(num_scored))
            logits.square().sum().backward()
    assert logits.shape == (num_scored, config.vocab_size) and seen.num_rows == max(1, num_scored)
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert grads["output_layer.weight"] is not None and grads["embedding.word_embeddings.weight"] is not None
    assert num_scored or not any(bool(grad.any()) for grad in grads.values() if grad is not None)
