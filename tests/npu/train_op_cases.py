"""How each entry of the training table is tested: its calls, and the torch_npu ops that a native entry executes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.contract import AdamwSettings, RouterRule, TrainOps
from tests.npu.op_parity import BF16, FP32, Call, Entry, Maker


@dataclass(frozen=True)
class Sizes:
    """What one die sees in a micro-batch."""

    sequences: tuple[int, ...]
    hidden: int
    latent: int
    heads: int
    nope: int
    rope: int
    value: int
    experts: int
    groups: int
    kept_groups: int
    choices: int
    local_experts: int
    width: int
    parameters: int

    @property
    def tokens(self) -> int:
        return sum(self.sequences)


TINY = Sizes((5, 1, 7), 32, 16, 4, 16, 8, 16, 8, 4, 2, 3, 3, 8, 37)
# DeepSeek-V3 on 256 dies: TP 4, PP 8, EP 8 with experts over TP x EP, packed micro-batches of prompts of up to 1,024
# and answers of up to 3,072 tokens; 671e9 parameters over 256 dies.
TP4 = Sizes((4096, 1500, 2596), 7168, 512, 32, 128, 64, 128, 256, 8, 4, 8, 8, 2048, 671_000_000_000 // 256)
# The same with TP 1, PP 8, EP 32: all 128 heads on a die.
TP1 = Sizes((4096, 4096), 7168, 512, 128, 128, 64, 128, 256, 8, 4, 8, 8, 2048, 671_000_000_000 // 256)
REAL = {"tp4": TP4, "tp1": TP1}


def rms_norm(new: Maker, size: Sizes) -> Call:
    def run(ops: TrainOps, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, 1e-6)

    return Call(run, [new.leaf(size.tokens, size.hidden), new.leaf(size.hidden)])


def rms_norm_of_the_latent(new: Maker, size: Sizes) -> Call:
    """A slice of columns, as the KV projection gives it."""

    def run(ops: TrainOps, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x[:, : size.latent], weight, 1e-6)

    return Call(run, [new.leaf(size.tokens, size.latent + size.rope), new.leaf(size.latent)])


def rms_norm_of_heads(new: Maker, size: Sizes) -> Call:
    """One weight for every head, as of Qwen3's queries and keys."""

    def run(ops: TrainOps, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, 1e-6)

    return Call(run, [new.leaf(size.tokens, size.heads, size.value), new.leaf(size.value)])


def swiglu(new: Maker, size: Sizes) -> Call:
    return Call(lambda ops, x: ops.swiglu(x), [new.leaf(size.tokens, 2 * size.width)])


def swiglu_without_tokens(new: Maker, size: Sizes) -> Call:
    """Experts of a rank that no token chose."""
    return Call(lambda ops, x: ops.swiglu(x), [new.leaf(0, 2 * size.width)])


def rotary(new: Maker, size: Sizes) -> Call:
    """Only products of queries with keys count: the order of R is free."""

    def run(ops: TrainOps, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = (ops.rotary_interleaved(x, cos, sin) for x in (q, k))
        return (q * k).float().sum(-1)

    queries, keys = (new.leaf(size.tokens, size.heads, size.rope) for _ in range(2))
    return Call(run, [queries, keys, *new.angles(size.tokens, size.rope // 2)])


def rotary_of_one_key_head(new: Maker, size: Sizes) -> Call:
    def run(ops: TrainOps, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ops.rotary_interleaved(k, cos, sin).float().square().sum(-1)

    return Call(run, [new.leaf(size.tokens, 1, size.rope), *new.angles(size.tokens, size.rope // 2)])


def attention(new: Maker, size: Sizes, is_causal: bool = True) -> Call:
    """Keys wider than values, as in MLA; the ends of the sequences stay on the host."""
    ends = torch.tensor([0, *size.sequences]).cumsum(0).int()

    def run(ops: TrainOps, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.core_attention(q, k, v, ends, max(size.sequences), 0.2, is_causal)

    q, k = (new.leaf(size.tokens, size.heads, size.nope + size.rope) for _ in range(2))
    return Call(run, [q, k, new.leaf(size.tokens, size.heads, size.value)])


def full_attention(new: Maker, size: Sizes) -> Call:
    return attention(new, size, is_causal=False)


def attention_of_shared_heads(new: Maker, size: Sizes) -> Call:
    """Two query heads share a head of keys and values."""
    ends = torch.tensor([0, *size.sequences]).cumsum(0).int()

    def run(ops: TrainOps, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.core_attention(q, k, v, ends, max(size.sequences), 0.2)

    keys, values = (new.leaf(size.tokens, size.heads // 2, size.value) for _ in range(2))
    return Call(run, [new.leaf(size.tokens, size.heads, size.value), keys, values])


def _block(new: Maker, size: Sizes, shared_by: int = 1, is_causal: bool = False) -> tuple[list[Tensor], list[Any]]:
    """q, k, v and what follows them in a call: every sequence has half as many queries as keys, or one of one."""
    ends_q = torch.tensor([0, *((length + 1) // 2 for length in size.sequences)]).cumsum(0).int()
    ends_k = torch.tensor([0, *size.sequences]).cumsum(0).int()
    q = new.floats(int(ends_q[-1]), size.heads, size.nope + size.rope)
    k = new.floats(size.tokens, size.heads // shared_by, size.nope + size.rope)
    v = new.floats(size.tokens, size.heads // shared_by, size.value)
    return [q, k, v], [(ends_q, ends_k), 0.2, is_causal]


def block(new: Maker, size: Sizes, **form: Any) -> Call:
    tensors, rest = _block(new, size, **form)
    return Call(lambda ops, *tensors: ops.attention_block(*tensors, *rest), tensors)


def causal_block(new: Maker, size: Sizes) -> Call:
    return block(new, size, is_causal=True)


def block_of_shared_heads(new: Maker, size: Sizes) -> Call:
    return block(new, size, shared_by=2)


def block_grad(new: Maker, size: Sizes, **form: Any) -> Call:
    """With the statistics of a softmax that has more keys than these: each row's denominator is larger."""
    tensors, rest = _block(new, size, **form)
    rows, heads, values = len(tensors[0]), size.heads, size.value
    grad_out, out = new.floats(rows, heads, values), new.floats(rows, heads, values)
    more = new.floats(rows, heads, dtype=FP32)

    def run(ops: TrainOps, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, more: Tensor) -> Any:
        lse = ops.attention_block(q, k, v, *rest)[1] + more.square()
        return ops.attention_block_grad(grad_out, (q, k, v, out, lse), *rest)

    return Call(run, [grad_out, *tensors, out, more])


def causal_block_grad(new: Maker, size: Sizes) -> Call:
    return block_grad(new, size, is_causal=True)


def block_grad_of_shared_heads(new: Maker, size: Sizes) -> Call:
    return block_grad(new, size, shared_by=2)


def matmul(new: Maker, size: Sizes) -> Call:
    """A layer's product, and that of its weight gradient with its transposed rows."""

    def run(ops: TrainOps, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return ops.matmul(x, w.t()), ops.matmul(x.t(), x)

    return Call(run, [new.floats(size.tokens, size.hidden), new.floats(2 * size.width, size.hidden)])


def grouped_matmul(new: Maker, size: Sizes, idle: bool = False) -> Call:
    rows = size.tokens
    counts = torch.full((size.local_experts,), rows // size.local_experts)
    if idle:
        counts[1] = 0
    counts[-1] += rows - counts.sum()

    def run(ops: TrainOps, x: Tensor, w: Tensor) -> Tensor:
        return ops.grouped_matmul(x, w, counts)

    return Call(run, [new.leaf(rows, size.hidden), new.leaf(size.local_experts, size.hidden, 2 * size.width)])


def grouped_matmul_with_an_idle_expert(new: Maker, size: Sizes) -> Call:
    return grouped_matmul(new, size, idle=True)


def grouped_matmul_that_adds_its_gradient(new: Maker, size: Sizes) -> Call:
    """As in training: a kernel that adds w's gradient to ``main_grad`` leaves nothing for autograd to carry."""
    counts = torch.tensor([size.tokens, *[0] * (size.local_experts - 1)])

    def run(ops: TrainOps, x: Tensor, w: Tensor, main_grad: Tensor) -> Tensor:
        def take(w: Any) -> None:
            if w.grad_added_to_main_grad:
                w.grad = main_grad.to(w.dtype)

        w.main_grad, w.grad_added_to_main_grad = main_grad.zero_(), False  # type: ignore[attr-defined]
        w.register_post_accumulate_grad_hook(take)
        return ops.grouped_matmul(x, w, counts)

    shape = (size.local_experts, size.hidden, 2 * size.width)
    return Call(run, [new.leaf(size.tokens, size.hidden), new.leaf(*shape), new.floats(*shape, dtype=FP32)])


def grouped_matmul_without_tokens(new: Maker, size: Sizes) -> Call:
    counts = torch.zeros(size.local_experts, dtype=torch.int64)

    def run(ops: TrainOps, x: Tensor, w: Tensor) -> Tensor:
        return ops.grouped_matmul(x, w, counts)

    return Call(run, [new.leaf(0, size.hidden), new.leaf(size.local_experts, size.hidden, 2 * size.width)])


def permute(new: Maker, size: Sizes) -> Call:
    """Also tells rows of equal experts apart: they keep the order of their tokens."""

    def run(ops: TrainOps, tokens: Tensor, indices: Tensor) -> Tensor:
        return ops.token_permute(tokens, indices)[0]

    return Call(run, [new.leaf(size.tokens, size.hidden), new.choices(size.tokens, size.choices, size.experts)])


def permute_without_tokens(new: Maker, size: Sizes) -> Call:
    def run(ops: TrainOps, tokens: Tensor, indices: Tensor) -> Tensor:
        return ops.token_permute(tokens, indices)[0]

    return Call(run, [new.leaf(0, size.hidden), torch.zeros(0, size.choices, dtype=torch.int64)])


def there_and_back(new: Maker, size: Sizes, tokens: int | None = None, has_probs: bool = True) -> Call:
    tokens = size.tokens if tokens is None else tokens

    def run(ops: TrainOps, rows_of: Tensor, indices: Tensor, probs: Tensor | None) -> Tensor:
        rows, row_map = ops.token_permute(rows_of, indices)
        scale = torch.arange(1, len(rows) + 1, device=rows.device).to(rows.dtype) / max(1, len(rows))
        return ops.token_unpermute(rows * scale.unsqueeze(1), row_map, probs, topk=size.choices)

    probs = new.leaf(tokens, size.choices, dtype=FP32) if has_probs else None
    return Call(run, [new.leaf(tokens, size.hidden), new.choices(tokens, size.choices, size.experts), probs])


def unpermute_without_weights(new: Maker, size: Sizes) -> Call:
    return there_and_back(new, size, has_probs=False)


def unpermute_without_tokens(new: Maker, size: Sizes) -> Call:
    return there_and_back(new, size, tokens=0)


def router(new: Maker, size: Sizes, tokens: int | None = None, has_bias: bool = True, **choice: Any) -> Call:
    """Compares the weights by expert: the order of the choices is free."""
    options: dict[str, Any] = {
        "topk": size.choices,
        "score_function": "sigmoid",
        "num_groups": size.groups,
        "group_topk": size.kept_groups,
        "scaling_factor": 2.5,
        **choice,
    }

    def run(ops: TrainOps, logits: Tensor, bias: Tensor | None) -> Tensor:
        probs, indices = ops.topk_router(logits, RouterRule(**options), bias)
        assert indices.dtype == torch.int64 and probs.dtype == FP32
        return torch.zeros_like(logits).scatter(1, indices, probs)

    tokens = size.tokens if tokens is None else tokens
    return Call(run, [new.leaf(tokens, size.experts), new.floats(size.experts) if has_bias else None])


def router_without_bias(new: Maker, size: Sizes) -> Call:
    return router(new, size, has_bias=False)


def router_without_groups(new: Maker, size: Sizes) -> Call:
    return router(new, size, num_groups=None, group_topk=None, norm_topk_prob=False, scaling_factor=None)


def router_of_one_choice(new: Maker, size: Sizes) -> Call:
    return router(new, size, topk=1)


def router_of_softmax(new: Maker, size: Sizes) -> Call:
    return router(new, size, score_function="softmax", num_groups=None, group_topk=None)


def router_of_given_choices(new: Maker, size: Sizes) -> Call:
    """As in router replay: the weights are those of the gate at experts that it may not have picked."""

    def run(ops: TrainOps, logits: Tensor, chosen: Tensor) -> Tensor:
        rule = RouterRule(size.choices, score_function="sigmoid", scaling_factor=2.5)
        probs, indices = ops.topk_router(logits, rule, chosen_TK=chosen)
        assert indices is chosen
        return probs

    chosen = new.choices(size.tokens, size.choices, size.experts)
    return Call(run, [new.leaf(size.tokens, size.experts), chosen])


def router_without_tokens(new: Maker, size: Sizes) -> Call:
    return router(new, size, tokens=0)


def sums_over_logits(new: Maker, size: Sizes) -> Call:
    return Call(lambda ops, logits: ops.log_sum_exp(logits, with_mean=True), [new.floats(size.tokens, size.hidden)])


def gradient_of_logits(new: Maker, size: Sizes) -> Call:
    def run(ops: TrainOps, logits: Tensor, *of_tokens: Tensor) -> Tensor:
        return ops.cross_entropy_grad(logits, *of_tokens)

    lse, grad = (new.floats(size.tokens, dtype=FP32) for _ in range(2))
    target = new.choices(size.tokens, 1, size.hidden).squeeze(1)
    return Call(run, [new.floats(size.tokens, size.hidden), lse, target, grad])


def adamw(new: Maker, size: Sizes) -> Call:
    """Three steps in place, the gradients clipped; all but the float32 parameter is of the case's dtype."""

    def run(ops: TrainOps, param: Tensor, weight: Tensor, grad: Tensor, *moments: Tensor) -> tuple[Tensor, ...]:
        for step in (1, 2, 3):
            how = AdamwSettings(step, 1e-2, (0.9, 0.95), 1e-8, weight_decay=0.1, grad_scale=0.5)
            ops.adamw_step(param, grad.clone(), *moments, how, weight)
        return param, weight, *moments

    weight, grad, exp_avg = (new.floats(size.parameters) for _ in range(3))
    return Call(
        run, [new.floats(size.parameters, dtype=FP32), weight, grad, exp_avg, new.floats(size.parameters).square()]
    )


def _entry(*cases: Any, npu_ops: tuple[str, ...], **options: Any) -> Entry:
    return Entry({case.__name__: case for case in cases}, frozenset(npu_ops), **options)


CASES: dict[str, Entry] = {
    "rms_norm": _entry(
        rms_norm, rms_norm_of_the_latent, rms_norm_of_heads, npu_ops=("npu_rms_norm", "npu_rms_norm_backward")
    ),
    "swiglu": _entry(swiglu, swiglu_without_tokens, npu_ops=("npu_swiglu", "npu_swiglu_backward")),
    "rotary_interleaved": _entry(
        rotary,
        rotary_of_one_key_head,
        npu_ops=("npu_rotary_mul", "npu_rotary_mul_backward"),
        tolerance={FP32: 1e-6, BF16: 1e-2},
    ),
    "core_attention": _entry(
        attention,
        full_attention,
        attention_of_shared_heads,
        npu_ops=("npu_fusion_attention", "npu_fusion_attention_grad"),
        tolerance={FP32: 1e-5, BF16: 1e-2},
    ),
    "attention_block": _entry(
        block,
        causal_block,
        block_of_shared_heads,
        npu_ops=("npu_fusion_attention",),
        tolerance={FP32: 1e-5, BF16: 1e-2},
    ),
    "attention_block_grad": _entry(
        block_grad,
        causal_block_grad,
        block_grad_of_shared_heads,
        npu_ops=("npu_fusion_attention_grad",),
        tolerance={FP32: 1e-5, BF16: 1e-2},
    ),
    "matmul": _entry(matmul, npu_ops=()),
    "grouped_matmul": _entry(
        grouped_matmul,
        grouped_matmul_with_an_idle_expert,
        grouped_matmul_that_adds_its_gradient,
        grouped_matmul_without_tokens,
        npu_ops=("npu_grouped_matmul", "npu_grouped_matmul_add_"),
    ),
    "token_permute": _entry(
        permute, permute_without_tokens, npu_ops=("npu_moe_token_permute", "npu_moe_token_permute_grad_v2")
    ),
    "token_unpermute": _entry(
        there_and_back,
        unpermute_without_weights,
        unpermute_without_tokens,
        npu_ops=("_npu_moe_token_unpermute", "npu_moe_token_unpermute_grad_v2"),
    ),
    "topk_router": _entry(
        router,
        router_without_bias,
        router_without_groups,
        router_of_one_choice,
        router_of_softmax,
        router_of_given_choices,
        router_without_tokens,
        npu_ops=("npu_moe_gating_top_k",),
        dtypes=(FP32,),
        tolerance={FP32: 2e-6},  # the reference itself is 1.2e-6 from a CPU's gradient on an H200
    ),
    "log_sum_exp": _entry(sums_over_logits, npu_ops=()),
    "cross_entropy_grad": _entry(gradient_of_logits, npu_ops=()),
    "adamw_step": _entry(adamw, npu_ops=("aten::_fused_adamw_",)),
}
