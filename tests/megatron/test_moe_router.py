"""The router's variants: groups, the gate's dtype, a frozen gate, and the rule that moves the expert biases."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from tests.megatron.model_helpers import one_process_groups, one_process_world, tiny_config
from tests.megatron.moe_helpers import assert_close, make_layer, tokens
from tests.parallel.launcher import run_ranks

EXPERT_WEIGHTS = {"experts.gate_up_proj": 1, "experts.down_proj": 2}
DEEPSEEK_V2 = {
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk": 3,
    "moe_router_topk_scaling_factor": 16.0,
}


def test_group_limited_greedy_keeps_the_groups_of_the_best_experts() -> None:
    """DeepSeek-V2 (arXiv 2405.04434, sec. 2.2): groups by their best expert, weights not normalised."""
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(50, 8, generator=generator)
    with one_process_groups() as groups:
        router = make_layer(groups, **DEEPSEEK_V2).router
        probs_TK, indices_TK = router._route(logits_TE)
    differs = 0
    for logits, probs, indices in zip(logits_TE, probs_TK, indices_TK, strict=True):
        scores = logits.softmax(-1)
        best = [max(scores[2 * group : 2 * group + 2]) for group in range(4)]
        kept = sorted(range(4), key=lambda group: -best[group])[:2]
        allowed = [expert for group in kept for expert in (2 * group, 2 * group + 1)]
        expected = sorted(sorted(allowed, key=lambda expert: -scores[expert])[:3])
        assert sorted(indices.tolist()) == expected
        torch.testing.assert_close(probs, 16.0 * scores[indices])
        differs += expected != sorted(scores.topk(3).indices.tolist())
    assert differs > 5  # the limit matters here


def test_a_layer_of_deepseek_v2_equals_transformers() -> None:
    """Output, and gradients of input and gate; routing that differs anywhere would show."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        hidden_size=64,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
        norm_topk_prob=False,
        vocab_size=8,
    )
    theirs = DeepseekV2ForCausalLM(config).model.layers[0].mlp
    x_TH, weight_TH = tokens()
    with one_process_groups() as groups:
        ours = make_layer(groups, **DEEPSEEK_V2)
        state = ours.state_dict()
        experts = {key: state[f"experts.weight{number}"].transpose(1, 2) for key, number in EXPERT_WEIGHTS.items()}
        gate, up = state["shared_experts.linear_fc1.weight"].chunk(2)
        theirs.load_state_dict(
            experts
            | {
                "gate.weight": state["router.weight"],
                "shared_experts.gate_proj.weight": gate,
                "shared_experts.up_proj.weight": up,
                "shared_experts.down_proj.weight": state["shared_experts.linear_fc2.weight"],
            }
        )
        found = []
        for layer, shape in ((ours, x_TH.shape), (theirs, (1, *x_TH.shape))):
            x = x_TH.clone().requires_grad_()
            y_TH = layer(x.view(shape)).view(x_TH.shape)
            (y_TH * weight_TH).sum().backward()
            gate_weight = (ours.router if layer is ours else theirs.gate).weight
            found.append((y_TH, x.grad, gate_weight.grad))
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        assert_close(one, other, "DeepSeek-V2")


@pytest.mark.parametrize(("name", "gap"), [("fp64", 1e-6), ("bf16", 0.03), (None, 1e-6)])
def test_the_gate_runs_in_its_dtype(name: str | None, gap: float) -> None:
    x_TH, _ = tokens()
    with one_process_groups() as groups:
        expected = make_layer(groups).router(x_TH)[0].sort().values
        probs_TK, indices_TK, _ = make_layer(groups, moe_router_dtype=name).router(x_TH)
    assert probs_TK.dtype == torch.float32 and indices_TK.dtype == torch.int64
    difference = (probs_TK.sort().values - expected).abs().max()
    assert difference < gap
    assert (difference > 1e-6) == (name == "bf16")
    with pytest.raises(ValueError, match="moe_router_dtype is 'fp8'; use one of"):
        tiny_config(moe_router_dtype="fp8")


def test_a_frozen_router_does_not_move_and_lets_gradients_through() -> None:
    with one_process_groups() as groups:
        config = tiny_config(freeze_moe_router=True)
        layer = make_layer(groups, freeze_moe_router=True)
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), layer, groups)
        x_TH = tokens()[0].requires_grad_()
        router = layer.router
        before = router.weight.clone()
        with torch.no_grad():
            layer.experts.weight2.zero_()  # what is left of the routed part passes through the weights only
        probs_TK, _, _ = router(x_TH)
        probs_TK[:, 0].sum().backward()
        finalize_model_grads(model, groups)
        assert router.weight.grad is None and router.weight.equal(before)
        assert router.expert_bias is not None and router.expert_bias.eq(0).all()
        assert router.local_tokens_per_expert.eq(0).all()
        assert x_TH.grad is not None and x_TH.grad.abs().sum() > 0
        assert "router.weight" in layer.state_dict()


def _bias_after_a_step(sizes: dict[str, int]) -> torch.Tensor:
    """Every rank routes its part of 48 tokens, the last 8 of which are padding."""
    groups = initialize_model_parallel(**sizes)
    config = tiny_config(sequence_parallel=groups.tp.size() > 1, moe_router_bias_update_rate=0.1)
    layer = make_layer(groups, moe_router_bias_update_rate=0.1)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), layer, groups)
    x_TH = tokens(48)[0]
    is_padding_T = torch.arange(48) >= 40
    replica = groups.dp_cp.rank()
    whole = x_TH.chunk(groups.dp_cp.size())[replica]
    padding = is_padding_T.chunk(groups.dp_cp.size())[replica]
    bounds = torch.tensor([0, len(whole) * groups.cp.size()]).int()
    layer(whole.chunk(groups.tp.size())[groups.tp.rank()], PackedSeqParams(bounds, 48, padding)).sum().backward()
    finalize_model_grads(model, groups)
    assert layer.router.expert_bias is not None
    destroy_model_parallel()
    return layer.router.expert_bias


def _biases(layouts: list[dict[str, int]]) -> list[torch.Tensor]:
    return [_bias_after_a_step(sizes) for sizes in layouts]


def test_biases_move_by_the_tokens_of_all_ranks() -> None:
    """bias_e += rate * sign(mean - count_e) (arXiv 2408.15664), the counts summed over TP, CP and DP."""
    with one_process_world():
        expected = _bias_after_a_step({})
    with one_process_groups() as groups:
        indices_TK = make_layer(groups).router(tokens(48)[0][:40])[1]
    counts = torch.bincount(indices_TK.flatten(), minlength=8)
    torch.testing.assert_close(expected, 0.1 * torch.sign(10.0 - counts))
    assert len(set(expected.tolist())) > 1
    layouts = [
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4},
    ]
    for biases in run_ranks(_biases, 4, layouts):
        assert all(bias.equal(expected) for bias in biases)


def test_forced_balance_gives_every_expert_the_same_load() -> None:
    with one_process_groups() as groups:
        router = make_layer(groups, moe_router_force_load_balancing=True, **DEEPSEEK_V2 | {"moe_router_topk": 2}).router
        counts_E = router(tokens(16)[0])[2]
    assert counts_E.eq(4).all()
