"""Whether the CUDA tables compute what their references compute: op by op, and both engines as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops import TrainOps, reference_ops, resolve
from megatron.core.ops.reference_attention import whole_sequence_attention
from tests.megatron.model_helpers import shared_prompts
from tests.npu import rollout_op_cases, train_op_cases
from tests.npu.op_parity import Entry, Maker, assert_same, outcome
from tools.workshop.bench.models import CHECKPOINTS, random_batch
from tools.workshop.gpu_day import rollout_cases
from tools.workshop.gpu_day.engines import ROLLOUT_OPS, TRAIN_OPS, Trainer, gap, generated, new_llm
from tools.workshop.gpu_day.rows import Rows, described
from tools.workshop.gpu_day.transfer import weights_of_another_process
from vllm.ops.contract import resolve as resolve_rollout
from vllm.ops.reference import rollout_ops as reference_rollout_ops

# Cases of caches in an order that only an Ascend kernel reads.
_ASCENDS_OWN = ("prefill_from_fractals", "decode_from_fractals")
MODELS = {
    "MLA and experts": CHECKPOINTS["tiny"],
    "grouped queries": CHECKPOINTS["qwen3"]
    | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 16, "num_hidden_layers": 2, "vocab_size": 256},
}
_LOGPROB_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def training_ops(device: str, rows: Rows) -> None:
    """Every entry of the training table, forward and backward."""
    ops = resolve(TRAIN_OPS)
    sizes = {"tiny": train_op_cases.TINY}
    names = {entry: name for entry, name in ops.names.items() if entry != "shared_prompt_attention"}
    _compare(ops, reference_ops(), train_op_cases.CASES, sizes, names, device, rows)
    _shared_prompts(ops, device, rows)


def _shared_prompts(ops: TrainOps, device: str, rows: Rows) -> None:
    """Attention of samples that share prompts, and its gradients, in bfloat16 beside whole sequences in float32."""
    bounds, longest, shared = shared_prompts([40, 40, 40, 9, 9, 0], [5, 0, 30, 7, 1, 12])
    attend: Any = ops.shared_prompt_attention
    assert attend is not None, "the table has no shared_prompt_attention"
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(len(shared.whole_T), *size, generator=generator) for size in ((4, 24), (4, 24), (4, 16))]
    found = []
    whole: Any = partial(whole_sequence_attention, reference_ops().core_attention)
    for dtype, where, call in ((torch.bfloat16, device, attend), (torch.float32, "cpu", whole)):
        leaves = [x.bfloat16().to(where, dtype).requires_grad_() for x in qkv]
        out = call(*leaves, bounds, longest, 0.2, shared.to(torch.device(where)))
        found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    off = max(gap(*pair) for pair in zip(*found, strict=True))
    name = f"shared_prompt_attention ({ops.names['shared_prompt_attention']})"
    rows.holds(name, off < 2e-2, f"relative difference up to {off:.1e}")


def rollout_ops(device: str, rows: Rows) -> None:
    """Every entry of the rollout table."""
    ops = resolve_rollout(ROLLOUT_OPS)
    reference = reference_rollout_ops()
    sizes = rollout_op_cases.TINY if device == "cuda" else {"small heads": rollout_op_cases.SMALL}
    cases = rollout_op_cases.CASES | rollout_cases.CASES
    _compare(ops, reference, cases, sizes, ops.implementations, device, rows)


def training_model(device: str, rows: Rows) -> None:
    """Losses of tiny models in fp32, before and after an update."""
    for name, raw in MODELS.items():
        batch = random_batch([40, 7, 25, 1, 30] if device == "cuda" else [9, 1, 4], raw["vocab_size"], 0)
        ours = Trainer(raw, resolve(TRAIN_OPS), device, torch.float32)
        theirs = Trainer(raw, reference_ops(), "cpu", torch.float32)
        ours.load(theirs)
        losses, wanted = ([trainer.step(batch) for _ in range(2)] for trainer in (ours, theirs))
        off = max(abs(found - other) / abs(other) for found, other in zip(losses, wanted, strict=True))
        rows.holds(f"{name}: losses of two updates", off < 1e-3, f"relative difference up to {off:.1e}")


def rollout_models(device: str, rows: Rows) -> None:
    """Tokens and log-probs of tiny models: as the reference's on a CPU, after a sleep, on a GPU captured as eager."""
    work = ((22, 3, 16, 9), 12) if device == "cuda" else ((5, 3), 3)
    for name, raw in MODELS.items():
        reference = new_llm(raw, "cpu", "vllm.ops.reference:rollout_ops", "float32", enforce_eager=True)
        wanted = generated(reference, *work)
        reference.shutdown()
        llm = new_llm(raw, device, ROLLOUT_OPS, "float32", enforce_eager=None)
        same_samples(rows, f"{name}: as the reference, fp32", generated(llm, *work), wanted, "float32")
        llm.sleep(1)
        llm.wake_up()
        same_samples(rows, f"{name}: after a sleep", generated(llm, *work), wanted, "float32")
        llm.shutdown()
        if device == "cpu":  # which captures no interpreted kernel
            continue
        found = {}
        for enforce_eager in (None, True):
            llm = new_llm(raw, device, ROLLOUT_OPS, "bfloat16", enforce_eager=enforce_eager)
            found[enforce_eager] = generated(llm, *work)
            llm.shutdown()
        same_samples(rows, f"{name}: captured as eager, bf16", found[None], found[True], "bfloat16")
    if device == "cuda":  # on a CPU tests/tools/test_gpu_day.py runs it: it starts a process
        weights_of_another_process(MODELS["MLA and experts"], device, rows)


def _compare(
    ops: Any,
    reference: TrainOps | Any,
    entries: Mapping[str, Entry],
    sizes: Mapping[str, Any],
    names: Mapping[str, str],
    device: str,
    rows: Rows,
) -> None:
    for entry in sorted(names.keys() - entries.keys()):
        rows.holds(f"{entry} ({names[entry]})", False, "an entry of the table without a case")
    for entry, how in entries.items():
        count: Counter[bool] = Counter()
        first = ""
        cases = [(case, make) for case, make in how.cases.items() if case not in _ASCENDS_OWN]
        for case, make in cases if device == "cuda" else cases[:1]:  # on a CPU tests take all of them
            for dtype in how.dtypes if device == "cuda" else how.dtypes[-1:]:
                for size in sizes.values():
                    call = make(Maker(dtype), size)
                    try:
                        assert_same(
                            outcome(ops, call, device), outcome(reference, call, "cpu"), _tolerance(how, dtype, device)
                        )
                    except Exception as error:  # whatever a kernel or its compiler raises is a finding
                        first = first or f"{case}, {dtype}: {described(error)}"
                        count[False] += 1
                    else:
                        count[True] += 1
        rows.holds(f"{entry} ({names[entry]})", count[False] == 0, first or f"cases: {count[True]}")


def _tolerance(how: Entry, dtype: torch.dtype, device: str) -> dict[torch.dtype, float]:
    """By the dtype in which a case computes; Triton's interpreter cuts to bfloat16 where a GPU rounds."""
    allowed = how.tolerance[dtype] * (2 if device == "cpu" and dtype is torch.bfloat16 else 1)
    return dict.fromkeys(how.dtypes, allowed) | {torch.float32: allowed}


def same_samples(
    rows: Rows, name: str, found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], dtype: str
) -> None:
    """Equal tokens, or a difference where the first other token was as likely: rounding may decide between two."""
    (ids, logprobs), (wanted_ids, wanted_logprobs) = found, wanted
    agree = (ids == wanted_ids).cumprod(-1).bool()  # up to each sample's first other token
    off = float((logprobs - wanted_logprobs).abs()[agree].max())
    share = float(agree.float().mean())
    least = 1.0 if dtype == "float32" else 0.5
    is_well = off <= _LOGPROB_TOLERANCE[dtype] and share >= least
    rows.holds(name, is_well, f"{share:.0%} of the tokens up to the first other one, log-probs within {off:.1e}")
