"""Selective recompute: the same bits, less memory, in one process and with tokens travelling between several."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.memory_ledger import total_bytes
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.checkpoint import CheckpointWithoutOutput
from megatron.core.transformer.transformer_config import RECOMPUTE_MODULES, MLATransformerConfig, TransformerConfig
from tests.megatron.ledger_oracles import activation_ledger
from tests.megatron.model_helpers import make_model, one_process_groups, packed_batch, tiny_config
from tests.parallel.launcher import run_ranks

LENGTHS = [9, 17, 6]
NUM_TOKENS = sum(LENGTHS)
# Each with what else is on: attention that is not recomputed has copies of its queries, keys and values.
STEPS = [("core_attn",), ("core_attn", "mla_up_proj"), ("moe_act",), ("layernorm",), ("mlp",), ("moe",)]
OUTPUTS = ("mla_up_proj", "core_attn", "moe_act", "layernorm")  # all but whole blocks


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _pass(
    config: TransformerConfig, groups: ProcessGroups
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor], int]:
    """Loss, gradients, routed tokens of each layer, and the bytes that forward keeps for backward."""
    batch = packed_batch(LENGTHS, config.vocab_size)
    model = make_model(config, groups)
    inputs = (batch.ids_T, batch.positions_T, batch.params, batch.labels_T)
    loss, activations = activation_ledger(model, lambda: model(*inputs).mean())
    num_bytes = total_bytes(activations)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    routers = [module for name, module in model.named_modules() if name.endswith("router")]
    return loss.detach(), grads, [router.local_tokens_per_expert.clone() for router in routers], num_bytes


def _assert_same(got: tuple[Any, ...], want: tuple[Any, ...], what: object) -> None:
    assert torch.equal(got[0], want[0]), what
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        assert torch.equal(got[1][name], grad), (what, name)
    assert all(torch.equal(counts, again) for counts, again in zip(got[2], want[2], strict=True)), what


def _at_least(config: MLATransformerConfig) -> dict[str, int]:
    """Bytes of the outputs that each module does not keep, in float32; what is saved inside comes on top."""
    heads, rotary_size = config.num_attention_heads, config.qk_pos_emb_head_dim
    key_size = config.qk_head_dim + rotary_size
    rows = NUM_TOKENS * config.moe_router_topk
    num_moe, hidden = config.num_layers - 1, config.hidden_size
    assert config.moe_ffn_hidden_size is not None
    per_layer = {
        "mla_up_proj": NUM_TOKENS * heads * (2 * key_size + config.qk_head_dim + config.v_head_dim) * config.num_layers,
        "core_attn": 0,  # it depends on the kernel
        "moe_act": rows * config.moe_ffn_hidden_size * num_moe,
        "layernorm": 2 * NUM_TOKENS * hidden * config.num_layers,
        "mlp": NUM_TOKENS * 3 * config.ffn_hidden_size,
        "moe": rows * (2 * hidden + 3 * config.moe_ffn_hidden_size) * num_moe,
    }
    return {module: 4 * count for module, count in per_layer.items()}


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"moe_shared_expert_overlap": True}])
def test_each_module_changes_no_bit_and_frees_its_outputs(changes: dict[str, Any]) -> None:
    with one_process_groups() as groups:
        plain = _pass(tiny_config(**changes), groups)
        assert all(counts.sum() == NUM_TOKENS * 2 for counts in plain[2])
        least = _at_least(tiny_config(**changes))
        freed: dict[tuple[str, ...], int] = {(): 0}
        for modules in STEPS:
            again = _pass(tiny_config(**changes, **_selective(*modules)), groups)
            _assert_same(again, plain, modules)
            freed[modules] = plain[3] - again[3]
            assert freed[modules] - freed[modules[:-1]] >= least[modules[-1]], (modules, freed, least)
        for modules in (OUTPUTS, RECOMPUTE_MODULES):
            again = _pass(tiny_config(**changes, **_selective(*modules)), groups)
            _assert_same(again, plain, modules)
            assert plain[3] - again[3] > sum(least[module] for module in modules), modules


def _with_and_without(sizes: dict[str, Any]) -> None:
    groups = parallel_state.initialize_model_parallel(**sizes)
    changes: dict[str, Any] = {"sequence_parallel": groups.tp.size() > 1, "moe_shared_expert_overlap": True}
    plain = _pass(tiny_config(**changes), groups)
    for modules in (OUTPUTS, RECOMPUTE_MODULES):
        again = _pass(tiny_config(**changes, **_selective(*modules)), groups)
        _assert_same(again, plain, modules)
        assert again[3] < 0.7 * plain[3]
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_tokens_travel_again_and_nothing_changes(tp_size: int) -> None:
    run_ranks(_with_and_without, 2, {"tensor_model_parallel_size": tp_size, "expert_model_parallel_size": 2})


def _discarding(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, CheckpointWithoutOutput]:
    middle = CheckpointWithoutOutput()
    head, tail = middle.checkpoint(lambda x: (x * weight).exp().split([3, 5], -1), x * 2)
    out = (head.sum() * tail).square()
    middle.discard_output_and_register_recompute(out)
    return out, tail, middle


def test_outputs_come_back_before_their_gradient() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.full((8,), 0.5, requires_grad=True)
    out, tail, _ = _discarding(x, weight)
    assert tail.untyped_storage().nbytes() == 0
    out.sum().backward(retain_graph=True)
    torch.testing.assert_close(tail, (x * 2 * weight).exp()[:, 3:])
    once = [x.grad.clone(), weight.grad.clone()]  # type: ignore[union-attr]
    out.sum().backward()
    for grad, first in zip((x.grad, weight.grad), once, strict=True):
        assert torch.equal(grad, 2 * first)  # type: ignore[arg-type]

    head, tail = (x * 2 * weight).exp().split([3, 5], -1)
    want = torch.autograd.grad((head.sum() * tail).square().sum(), (x, weight))
    assert all(torch.equal(grad, first) for grad, first in zip(want, once, strict=True))


def test_a_graph_that_is_dropped_leaves_nothing() -> None:
    out, tail, middle = _discarding(torch.ones(4, 8, requires_grad=True), torch.ones(8))
    held = [weakref.ref(x) for x in (tail, middle)]
    del out, tail, middle
    assert [ref() for ref in held] == [None, None]


def test_without_gradients_nothing_is_freed() -> None:
    with torch.no_grad():
        _, tail, middle = _discarding(torch.ones(4, 8), torch.ones(8))
    assert not middle.is_active and tail.untyped_storage().nbytes() > 0


def test_a_module_that_is_not_known_is_told() -> None:
    with pytest.raises(ValueError, match="recompute_modules has 'attention'; the modules are mla_up_proj, core_attn"):
        tiny_config(**_selective("core_attn", "attention"))
    with pytest.raises(ValueError, match="'mla_up_proj', but attention is not latent; .* 'moe', but the model has no"):
        TransformerConfig(num_layers=4, **_selective("mla_up_proj", "moe"))
    assert not tiny_config(**_selective("moe_act", "moe")).recomputes("moe_act"), "part of moe"
    assert not tiny_config().recomputes("core_attn")
