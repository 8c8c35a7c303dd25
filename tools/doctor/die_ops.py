"""Ops of torch that are believed to run on a die's vector cores, at a 671B run's sizes: values as on the CPU, and time.

An op without a kernel there runs on the control processor (AICPU), many times slower than its bytes need; what is
believed is in `tools/plan/op_costs.toml`, whose [die] table names the row of each op that no die has confirmed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron.core.ops.fused_adamw import adamw_step
from megatron.core.ops.reference import reference_ops
from mindspeed.ops import train_ops
from tools.doctor.die_check import Check, Die, difference, in_ms, is_simulated
from tools.doctor.finding import Finding
from vllm.model_executor.model_loader.digest import slice_digest
from vllm.ops.contract import SamplingBatch
from vllm.v1.sample.rng import exponential_noise, position_keys, vocab_keys
from vllm.v1.worker.cache_memory import copy_blocks
from vllm_ascend.ops import rollout_ops

TIMES_SLOWER = 10  # than a plain op on as many bytes: then it hardly runs on the vector cores
LOGITS = (64, 129280)  # of a decode step
NUM_TOKENS, TOP_K, NUM_EXPERTS, HIDDEN = 3072, 8, 256, 7168  # of a micro-batch: a prompt and its response
CHOICES = NUM_TOKENS * TOP_K


@dataclass(frozen=True)
class Case:
    """``run`` of ``inputs``, made on the host by a seeded generator: the same function on the CPU says what is right.

    used_in: who calls it · passes: how often it goes over its inputs and results, a generous count · tolerance: see
    ``difference``; 0 for equal bits.
    """

    name: str
    used_in: str
    inputs: Callable[[torch.Generator], tuple[Tensor, ...]]
    run: Callable[..., tuple[Tensor, ...] | Tensor]
    passes: int = 1
    tolerance: float = 0.0


def checks() -> list[Check]:
    return [Check(case.name, partial(check, case)) for case in CASES]


def check(case: Case, die: Die) -> Finding:
    """The finding of one op: a problem when a value is wrong, or when the op is too slow for the vector cores."""
    given = case.inputs(torch.Generator().manual_seed(0))
    on_die = tuple(tensor.to(die.device) for tensor in given)
    found, expected = _as_tuple(case.run(*on_die)), _as_tuple(case.run(*given))
    pairs = zip(found, expected, strict=True)
    wrong = next(filter(None, (difference(*pair, case.tolerance) for pair in pairs)), None)
    if wrong:
        remedy = f"nothing that {case.used_in} computes here can be trusted: report it with the versions of CANN"
        return Finding(case.name, wrong, remedy, is_fatal=True)
    if is_simulated():
        return Finding(case.name, "as on the CPU")
    took = die.seconds(lambda: case.run(*on_die))
    limit = TIMES_SLOWER * plain_seconds(die, case.passes * sum(tensor.nbytes for tensor in (*given, *expected)))
    figure = f"as on the CPU; {in_ms(took)}, at most {in_ms(limit)} on the vector cores"
    if took <= limit:
        return Finding(case.name, figure)
    remedy = (
        f"it seems to run on the control processor: confirm with msprof (AI_CPU), note it in tools/plan/op_costs.toml "
        f"and write {case.used_in} with other ops"
    )
    return Finding(case.name, figure, remedy, is_fatal=True)


def plain_seconds(die: Die, num_bytes: int) -> float:
    """The time of an element-wise op that reads and writes as many bytes together."""
    x = torch.zeros(max(1, num_bytes // 8), device=die.device)
    return die.seconds(lambda: x.add(1.0))


def _as_tuple(result: tuple[Tensor, ...] | Tensor) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def _integers(
    generator: torch.Generator, high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64
) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


def _words(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two int32 tensors of a decode step's logits, all bits in use."""
    a, b = (_integers(generator, 2**31, *LOGITS, low=-(2**31), dtype=torch.int32) for _ in range(2))
    return a, b


def _floats(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _noise_keys(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    seeds = _integers(generator, 2**62, LOGITS[0]).numpy().view(np.uint64)
    keys = position_keys(seeds, np.arange(LOGITS[0]))
    return torch.from_numpy(keys.copy()), torch.from_numpy(vocab_keys(LOGITS[1]))


def _sampling(generator: torch.Generator) -> tuple[Tensor, ...]:
    return _floats(generator, *LOGITS), torch.ones(LOGITS[0]), *_noise_keys(generator)


def _sample(logits_BW: Tensor, temperature_B: Tensor, keys_B2: Tensor, vocab_keys_W: Tensor) -> Tensor:
    batch = SamplingBatch(temperature_B, keys_B2, vocab_keys_W, None, None, None, has_greedy=False, has_random=True)
    return rollout_ops().sample(logits_BW, batch).token_ids_B


def _experts(generator: torch.Generator) -> tuple[Tensor]:
    return (_integers(generator, NUM_EXPERTS, CHOICES),)


def _count_by_scatter(experts_S: Tensor) -> Tensor:
    ones = torch.ones_like(experts_S)
    return ones.new_zeros(NUM_EXPERTS).scatter_add_(0, experts_S, ones)


def _count_by_comparison(experts_S: Tensor) -> Tensor:
    return (experts_S.unsqueeze(1) == torch.arange(NUM_EXPERTS, device=experts_S.device)).sum(0)


def _copied_blocks(pages: Tensor) -> Tensor:
    half = len(pages) // 2
    copy_blocks([(pages,)], [(block, half + block) for block in range(half)])
    return pages


def _repeated(lengths_B: Tensor) -> Tensor:
    ids_B = torch.arange(len(lengths_B), device=lengths_B.device)
    return torch.repeat_interleave(ids_B, lengths_B, output_size=NUM_TOKENS)


def _fixed_lengths(generator: torch.Generator) -> tuple[Tensor]:
    return (torch.full((LOGITS[0],), NUM_TOKENS // LOGITS[0]),)


def _adamw(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, ...]:
    settings = {"step": 3, "lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    adamw_step(param, grad, exp_avg, exp_avg_sq, **settings)  # type: ignore[arg-type]
    return param, exp_avg, exp_avg_sq


def _weight_grad(x: Tensor, w: Tensor, counts: Tensor, upstream: Tensor) -> Tensor:
    """What a backward pass leaves in the float32 sum, by the kernel that adds or through autograd."""
    ops = reference_ops() if x.device.type == "cpu" else train_ops()
    w = w.detach().requires_grad_()
    w.main_grad = torch.zeros_like(w, dtype=torch.float32)  # type: ignore[attr-defined]
    ops.grouped_matmul(x, w, counts).backward(upstream)
    main_grad: Tensor = w.main_grad  # type: ignore[attr-defined]
    if getattr(w, "grad_added_to_main_grad", False):
        return main_grad
    assert w.grad is not None
    return main_grad + w.grad


def _grouped(generator: torch.Generator) -> tuple[Tensor, ...]:
    rows, experts, width, half = 256, 4, 512, torch.bfloat16
    counts = torch.tensor([100, 0, 56, 100])
    return (
        _floats(generator, rows, 2048, dtype=half),
        _floats(generator, experts, 2048, width, dtype=half),
        counts,
        _floats(generator, rows, width, dtype=half),
    )


CASES = [
    Case("sampling noise", "vllm/v1/sample/rng.py", _noise_keys, exponential_noise, 16, 1e-5),
    Case("sampled tokens", "vllm/ops/reference_sample.py", _sampling, _sample, 30),
    Case("int32 products", "vllm/v1/sample/rng.py", _words, lambda a, b: a * 747796405 * b, 2),
    Case("int32 and, xor", "vllm/v1/sample/rng.py", _words, lambda a, b: (a & 0x1FFFF) ^ b, 2),
    Case(
        "int32 as fp32",
        "vllm/v1/sample/rng.py",
        lambda generator: (_integers(generator, 2**24, *LOGITS, dtype=torch.int32),),
        lambda a: a.to(torch.float32).mul_(0.5).to(torch.int32),
        3,
    ),
    Case(
        "masked_fill",
        "vllm/ops/reference_sample.py",
        lambda generator: (_floats(generator, *LOGITS), _integers(generator, 2, *LOGITS).bool()),
        lambda x, mask: x.masked_fill(mask, float("-inf")),
    ),
    Case("int64 scatter_add", "megatron/core/transformer/moe/router.py", _experts, _count_by_scatter, 4),
    Case(
        "bincount",
        "megatron/core/transformer/moe/token_dispatcher.py",
        _experts,
        partial(torch.bincount, minlength=NUM_EXPERTS),
        10,
    ),
    Case("bool sum", "vllm_ascend/ops/fused_experts.py", _experts, _count_by_comparison, 2 * NUM_EXPERTS // 8),
    Case(
        "int64 sum, product",
        "vllm/model_executor/model_loader/digest.py",
        lambda generator: (_integers(generator, 2**62, NUM_TOKENS, NUM_EXPERTS),),
        lambda a: (a * a).sum(),
        2,
    ),
    Case("int64 cumsum", "vllm_ascend/ops/packed_context.py", _experts, lambda a: a.cumsum(0), 4),
    Case(
        "int64 division",
        "vllm_ascend/ops/kv_layout.py",
        _experts,
        lambda a: (torch.div(a, 128, rounding_mode="floor"), a // 7, a % 128),
        3,
    ),
    Case(
        "int64 index",
        "megatron/core/transformer/moe/aux_loss.py",
        lambda generator: (torch.randperm(CHOICES, generator=generator), *_experts(generator)),
        lambda order, values: (values[order], torch.zeros_like(values).index_put_((order,), values)),
        4,
    ),
    Case("repeat_interleave", "vllm_ascend/ops/packed_context.py", _fixed_lengths, _repeated, 4),
    Case(
        "sort of ids as fp32",
        "megatron/core/ops/reference_moe.py",
        _experts,
        lambda ids: ids.float().argsort(stable=True),
        20,
    ),
    Case(
        "index_add of rows",
        "vllm/ops/reference_moe.py",
        lambda generator: (
            _integers(generator, LOGITS[0], LOGITS[0] * TOP_K),
            _floats(generator, LOGITS[0] * TOP_K, HIDDEN, dtype=torch.bfloat16),
        ),
        lambda rows, values: values.new_zeros(LOGITS[0], HIDDEN).index_add_(0, rows, values),
        2,
        3e-2,
    ),
    Case(
        "copies of KV blocks",
        "vllm/v1/worker/worker.py",
        lambda generator: (_floats(generator, 128, 128, 512, dtype=torch.bfloat16),),
        _copied_blocks,
        2,
    ),
    Case(
        "weight digest",
        "vllm/model_executor/model_loader/digest.py",
        lambda generator: (_floats(generator, 2048, HIDDEN, dtype=torch.bfloat16),),
        lambda part: slice_digest("model.layers.3.mlp.gate.weight", part, (0, 0)),
        20,
    ),
    Case(
        "AdamW",
        "megatron/core/ops/fused_adamw.py",
        lambda generator: tuple(_floats(generator, 2**22).abs_() for _ in range(4)),
        _adamw,
        1,
        1e-5,
    ),
    Case("expert weight gradients", "mindspeed/ops/grouped_matmul.py", _grouped, _weight_grad, 20, 1e-2),
]
