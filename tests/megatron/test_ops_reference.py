"""Every reference op against a naive formula, and its gradient against finite differences."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch.autograd import gradcheck

from megatron.core.ops import reference_ops, resolve
from megatron.core.ops.contract import AdamwSettings, RouterRule, TrainOps

OPS = reference_ops()


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rms_norm_and_swiglu() -> None:
    x, weight = _randn(5, 8).requires_grad_(), _randn(8, seed=1).requires_grad_()
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-6), expected)
    gate, up = x[:, :4], x[:, 4:]
    torch.testing.assert_close(OPS.swiglu(x), gate / (1 + torch.exp(-gate)) * up)
    assert gradcheck(lambda *args: OPS.swiglu(OPS.rms_norm(*args, 1e-6)), (x, weight))


def test_rotary_rotates_neighbouring_pairs() -> None:
    x = _randn(5, 3, 8).requires_grad_()
    angle = _randn(5, 4, seed=1)
    y = OPS.rotary_interleaved(x, angle.cos(), angle.sin())
    for pair in range(4):
        a, b = x[..., 2 * pair], x[..., 2 * pair + 1]
        cos, sin = angle[:, None, pair].cos(), angle[:, None, pair].sin()
        torch.testing.assert_close(y[..., 2 * pair], a * cos - b * sin)
        torch.testing.assert_close(y[..., 2 * pair + 1], a * sin + b * cos)
    assert gradcheck(lambda x: OPS.rotary_interleaved(x, angle.cos(), angle.sin()), (x,))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("value_size", [3, 6, 8])
def test_core_attention_stays_inside_sequences(causal: bool, value_size: int) -> None:
    lengths = [4, 1, 7, 0, 2]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q, k = _randn(14, 2, 6).requires_grad_(), _randn(14, 2, 6, seed=1).requires_grad_()
    v = _randn(14, 2, value_size, seed=2).requires_grad_()

    def naive() -> torch.Tensor:
        out = []
        for q_s, k_s, v_s in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            scores = torch.einsum("ind,jnd->nij", q_s, k_s) * 0.3
            if causal:
                scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
            out.append(torch.einsum("nij,jnd->ind", scores.softmax(-1), v_s))
        return torch.cat(out)

    y = OPS.core_attention(q, k, v, cu_seqlens, max(lengths), 0.3, causal)
    torch.testing.assert_close(y, naive())
    weight = torch.randn_like(y)
    got = torch.autograd.grad((y * weight).sum(), (q, k, v))
    expected = torch.autograd.grad((naive() * weight).sum(), (q, k, v))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_attention_block_and_its_gradient(causal: bool, key_heads: int) -> None:
    """Queries are the last ones of their sequence; ``lse`` and the gradient are those of a plain softmax."""
    queries, keys = [2, 1, 3], [4, 1, 5]
    bounds = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (queries, keys)]
    q = _randn(6, 4, 6).requires_grad_()
    k, v = _randn(10, key_heads, 6, seed=1).requires_grad_(), _randn(10, key_heads, 3, seed=2).requires_grad_()
    outs, denominators = [], []
    for q_s, k_s, v_s in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        k_s, v_s = (x.repeat_interleave(4 // key_heads, dim=1) for x in (k_s, v_s))
        scores = torch.einsum("ind,jnd->nij", q_s, k_s) * 0.3
        if causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k_s) - len(q_s))
            scores = scores.masked_fill(hidden, float("-inf"))
        denominators.append(scores.logsumexp(-1).T)
        outs.append(torch.einsum("nij,jnd->ind", scores.softmax(-1), v_s))
    wanted = torch.cat(outs)
    out, lse = OPS.attention_block(q, k, v, bounds, 0.3, causal)
    torch.testing.assert_close((out, lse), (wanted, torch.cat(denominators)))
    grad = _randn(6, 4, 3, seed=3)
    found = OPS.attention_block_grad(grad, (q, k, v, out, lse), bounds, 0.3, causal)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, (q, k, v), grad))


def test_grouped_matmul_with_idle_experts() -> None:
    counts = torch.tensor([3, 0, 5, 0])
    x, w = _randn(8, 4).requires_grad_(), _randn(4, 4, 6, seed=1).requires_grad_()
    y = OPS.grouped_matmul(x, w, counts)
    expected = torch.cat([rows @ w_e for rows, w_e in zip(x.split(counts.tolist()), w, strict=True)])
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert w.grad is not None and (w.grad[1] == 0).all() and (w.grad[3] == 0).all() and (w.grad[0] != 0).any()
    assert gradcheck(lambda x, w: OPS.grouped_matmul(x, w, counts), (x, w))


def test_grouped_matmul_without_any_row() -> None:
    x, w = torch.empty(0, 4, requires_grad=True), torch.randn(2, 4, 6, requires_grad=True)
    y = OPS.grouped_matmul(x, w, torch.zeros(2, dtype=torch.int64))
    y.sum().backward()
    assert y.shape == (0, 6) and w.grad is not None and (w.grad == 0).all()


def test_permute_sorts_by_expert_and_unpermute_adds_up() -> None:
    tokens, probs = _randn(6, 3).requires_grad_(), _randn(6, 2, seed=1).requires_grad_()
    indices = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(t))[:2] for t in range(6)])
    rows, row_map = OPS.token_permute(tokens, indices)
    expected = torch.cat([tokens[(indices == expert).any(1)] for expert in range(4)])
    torch.testing.assert_close(rows, expected)
    torch.testing.assert_close(
        OPS.token_unpermute(rows, row_map, probs), tokens * probs.sum(1, keepdim=True), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(OPS.token_unpermute(rows, row_map, topk=2), 2 * tokens)

    def there_and_back(tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        rows, row_map = OPS.token_permute(tokens, indices)
        return OPS.token_unpermute(rows.pow(2), row_map, probs)

    assert gradcheck(there_and_back, (tokens, probs))
    single = indices[:, :1]
    rows, row_map = OPS.token_permute(tokens, single)
    torch.testing.assert_close(OPS.token_unpermute(rows, row_map), tokens)


def _naive_deepseek_route(logits: list[float], bias: list[float]) -> dict[int, float]:
    """8 experts in 4 groups, top 3 experts of the 2 best groups: eq. 12-16 of the DeepSeek-V3 report."""
    scores = [1 / (1 + 2.718281828459045**-x) for x in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    groups = sorted(range(4), key=lambda g: -(biased[2 * g] + biased[2 * g + 1]))[:2]
    allowed = [expert for expert in range(8) if expert // 2 in groups]
    chosen = sorted(allowed, key=lambda expert: -biased[expert])[:3]
    total = sum(scores[expert] for expert in chosen)
    return {expert: 2.5 * scores[expert] / total for expert in chosen}


def test_deepseek_routing() -> None:
    logits, bias = _randn(32, 8), _randn(8, seed=1) * 2  # a bias this large makes biased scores negative
    rule = RouterRule(topk=3, num_groups=4, group_topk=2, score_function="sigmoid", scaling_factor=2.5)
    probs, indices = OPS.topk_router(logits, rule, bias)
    for token in range(32):
        expected = _naive_deepseek_route(logits[token].tolist(), bias.tolist())
        got = dict(zip(indices[token].tolist(), probs[token].tolist(), strict=True))
        assert got == pytest.approx(expected)


def test_softmax_routing() -> None:
    logits = _randn(16, 6)
    probs, indices = OPS.topk_router(logits, RouterRule(topk=2))
    best, where = logits.topk(2)
    torch.testing.assert_close(probs.sort(-1).values, best.softmax(-1).sort(-1).values)
    assert (indices.sort(-1).values == where.sort(-1).values).all()
    rule = RouterRule(topk=2, pre_softmax=True, num_groups=3, group_topk=1, scaling_factor=2.0)
    probs, indices = OPS.topk_router(logits, rule)
    torch.testing.assert_close(probs, 2 * logits.softmax(-1).gather(1, indices))
    assert (indices // 2 == logits.argmax(-1, keepdim=True) // 2).all()


def test_router_gradient() -> None:
    logits = _randn(4, 8).requires_grad_()
    for function in ("sigmoid", "softmax"):
        rule = RouterRule(topk=3, score_function=function)
        assert gradcheck(lambda x, rule=rule: OPS.topk_router(x, rule)[0], (logits,))


def test_adamw_equals_torch() -> None:
    param = torch.randn(50)
    ours, exp_avg, exp_avg_sq = param.clone(), torch.zeros(50), torch.zeros(50)
    theirs = param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 5):
        grad = torch.randn(50)
        theirs.grad = grad.clone()
        optimizer.step()
        how = AdamwSettings(step, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        OPS.adamw_step(ours, grad, exp_avg, exp_avg_sq, how)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


def test_resolve_finds_a_table_and_explains_what_it_cannot_find() -> None:
    ops = resolve("megatron.core.ops.reference:reference_ops")
    assert (
        isinstance(ops, TrainOps)
        and set(ops.names.values()) == {"reference"}
        and set(ops.names) == {field.name for field in fields(TrainOps) if field.default is not None} - {"names"}
    )
    for provider, told in {
        "reference_ops": "module:function",
        "no_such_package:train_ops": "no_such_package",
        "megatron.core.ops.reference:nothing": "nothing",
        "builtins:dict": "expected TrainOps",
    }.items():
        with pytest.raises(ValueError, match=told):
            resolve(provider)


def test_a_form_that_a_table_does_not_have_is_refused() -> None:
    provider = "megatron.core.ops.reference:reference_ops"
    assert isinstance(resolve(provider, {"mla_fa_without_pad": False}), TrainOps)
    with pytest.raises(
        ValueError, match=r"mla_fa_without_pad=True, but the train ops of .*reference_ops.* no such form"
    ):
        resolve(provider, {"mla_fa_without_pad": True})
    ascend = "mindspeed.ops:train_ops"
    assert "npu_grouped_matmul_add_" in resolve(ascend).names["grouped_matmul"]
    assert resolve(ascend, {"gemm_gradient_accumulation_fusion": False}).names["grouped_matmul"] == "native"
