"""How near both engines come to what the GPU can do, by limits that are measured right before."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch

from megatron.core.ops import TrainOps, resolve
from tools.workshop.bench.models import (
    CHECKPOINTS,
    ITEM_BYTES,
    decode_work,
    deepseek_v3_config,
    matmul_flops,
    model_config,
    parsed,
    prefill_work,
    random_batch,
)
from tools.workshop.gpu_day.engines import TRAIN_OPS, Trainer, drawn, new_engine, prompts
from tools.workshop.gpu_day.rows import Rows
from vllm import LLM
from vllm.platforms import resolve_platform

Returned = TypeVar("Returned")


class Sizes(NamedTuple):
    """What is run: models by name, sequences and tokens."""

    models: dict[str, dict[str, Any]]
    batch: int
    context: int
    steps: int  # decode steps
    small_batch: int  # of the comparison of graphs with eager steps
    prompts: tuple[int, ...]
    trained: dict[str, Any]
    lengths: tuple[int, ...]  # of a training step's sequences


_ENDS = {"num_nextn_predict_layers": 0, "eos_token_id": 1}
# DeepSeek-V3's layers at their true widths, with as many experts as fit beside an H100's other tenants, and Qwen3-8B's.
_GPU = Sizes(
    {
        "MLA": deepseek_v3_config(num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=64, **_ENDS),
        "GQA": model_config("qwen3_8b") | {"num_hidden_layers": 12} | _ENDS,
    },
    64,
    1024,
    32,
    16,
    (2048,) * 8,
    deepseek_v3_config(num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=16, vocab_size=32768, **_ENDS),
    (4096, 4096),
)
_TINY = Sizes({"MLA": CHECKPOINTS["tiny"]}, 2, 4, 1, 2, (5, 3), CHECKPOINTS["tiny"], (5, 3))


class Limits(NamedTuple):
    """What the device does in a second at best: bytes of memory, and operations of bf16 products."""

    bytes_per_s: float
    flops_per_s: float


def decode(device: str, rows: Rows) -> None:
    """Decode steps against the time of their bytes, and captured against eager ones."""
    sizes, limits = sizes_of(device), measured_limits(device, rows)
    for name, raw in sizes.models.items():
        step_s = {}
        for is_eager in (None, True):
            for batch in sorted({sizes.batch, sizes.small_batch} if is_eager is None else {sizes.small_batch}):
                step_s[is_eager, batch] = _step_seconds(device, raw, sizes, batch, is_eager)
        # A captured step is bound by the device at few sequences too, whatever the host does between eager kernels.
        ratio = step_s[True, sizes.small_batch] / step_s[None, sizes.small_batch]
        notes = {sizes.batch: "", sizes.small_batch: f", {ratio:.2f} times as fast as eager"}
        for batch, bar in ((sizes.batch, 0.6), (sizes.small_batch, 0.5)):
            took = step_s[None, batch]
            least = decode_work(parsed(raw), ITEM_BYTES["bfloat16"], batch, sizes.context + sizes.steps / 2)
            note = f"{1e3 * took:.2f} ms a step, {batch / took:.0f} tok/s{notes[batch]}"
            rows.measured(f"{name}, {batch} sequences", least.seconds(*limits) / took, "of the limit", bar, note)


def prefill(device: str, rows: Rows) -> None:
    """Whole prompts against the products of their tokens."""
    sizes, limits = sizes_of(device), measured_limits(device, rows)
    for name, raw in sizes.models.items():
        llm = new_engine(raw, device, len(sizes.prompts), max(sizes.prompts) + 1)
        took = prefill_seconds(device, llm, raw, sizes)
        llm.shutdown()
        least = prefill_work(parsed(raw), ITEM_BYTES["bfloat16"], list(sizes.prompts))
        note = f"{sum(sizes.prompts) / took:.0f} tok/s"
        rows.measured(name, least.flops / took / limits.flops_per_s, "of the tensor cores' peak", 0.4, note)


def training(device: str, rows: Rows) -> None:
    """A packed training step against its products."""
    limits, steps = measured_limits(device, rows), training_steps(device, resolve(TRAIN_OPS))
    share = steps.flops / steps.seconds / limits.flops_per_s
    rows.measured("DeepSeek-V3's layers, bf16", share, "MFU", 0.4, steps.note)


class TrainingSteps(NamedTuple):
    """Packed steps of DeepSeek-V3's layers with their updates: the quickest one's seconds, and its operations."""

    seconds: float
    flops: float
    losses: list[float]
    note: str


def training_steps(device: str, ops: TrainOps) -> TrainingSteps:
    """Steps on one packed batch with the products of `ops`."""
    sizes = sizes_of(device)
    torch.manual_seed(0)  # the same weights for every table
    trainer = Trainer(sizes.trained, ops, device, torch.bfloat16)
    batch = random_batch(list(sizes.lengths), sizes.trained["vocab_size"], 0)
    losses: list[float] = []
    took, _ = quickest(device, lambda: losses.append(trainer.step(batch)))
    flops = matmul_flops(parsed(sizes.trained), list(sizes.lengths))
    note = f"{batch.num_tokens / took:.0f} tok/s, no recompute"
    if device == "cuda":
        note += f", at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    return TrainingSteps(took, flops, losses, note)


def sleep(device: str, rows: Rows) -> None:
    """What a sleep frees, by the device's own account, against the engine's report."""
    sizes, platform = sizes_of(device), resolve_platform(device)
    raw = next(iter(sizes.models.values()))
    llm = new_engine(raw, device, sizes.batch, max(sizes.prompts) + sizes.steps)
    _generate(llm, raw, sizes.prompts[:1], sizes.steps)
    report = llm.get_memory_report()
    held = report["weights_bytes"] + report["kv_cache_bytes"]
    before = platform.memory(torch.device(device)).free_bytes
    llm.sleep(2)
    freed = platform.memory(torch.device(device)).free_bytes - before
    asleep = llm.get_memory_report()
    llm.shutdown()
    kept = asleep["weights_bytes"] + asleep["kv_cache_bytes"]
    rows.holds("by the engine's report", kept <= 0.02 * held, f"{kept} of {held} bytes are kept")
    if device == "cuda":  # a host has other tenants
        rows.measured("by the device's account", freed / held, "of weights and cache is free", 0.98)


def sizes_of(device: str) -> Sizes:
    return _GPU if device == "cuda" else _TINY


def measured_limits(device: str, rows: Rows) -> Limits:
    """A large copy's bytes, read and written, and a large product's operations."""
    scale = 1 if device == "cuda" else 32
    source = torch.ones((1 << 28) // scale**2, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(8192 // scale, 8192 // scale, device=device, dtype=torch.bfloat16) for _ in range(2))
    (copy_s, _), (product_s, _) = quickest(device, lambda: target.copy_(source)), quickest(device, lambda: left @ right)
    limits = Limits(2 * source.nbytes / copy_s, 2 * left.shape[0] ** 3 / product_s)
    rows.measured("memory", limits.bytes_per_s / 1e9, "GB/s")
    rows.measured("bf16 products", limits.flops_per_s / 1e12, "TFLOP/s")
    return limits


def _step_seconds(device: str, raw: dict[str, Any], sizes: Sizes, batch: int, is_eager: bool | None) -> float:
    llm = new_engine(raw, device, batch, sizes.context + 2 * sizes.steps + 1, enforce_eager=is_eager)
    took = decode_seconds(device, llm, raw, sizes, batch)
    llm.shutdown()
    return took


def decode_seconds(device: str, llm: LLM, raw: dict[str, Any], sizes: Sizes, batch: int) -> float:
    """Seconds of a decode step: what a generation takes longer for more tokens."""
    lengths = (sizes.context,) * batch
    many_s, _ = quickest(device, lambda: _generate(llm, raw, lengths, sizes.steps + 1))
    few_s, _ = quickest(device, lambda: _generate(llm, raw, lengths, 1))
    return (many_s - few_s) / sizes.steps


def prefill_seconds(device: str, llm: LLM, raw: dict[str, Any], sizes: Sizes) -> float:
    """Seconds of all prompts, which are others in each run."""
    seeds = count()
    took, _ = quickest(device, lambda: _generate(llm, raw, sizes.prompts, 1, next(seeds)))
    return took


def _generate(llm: LLM, raw: dict[str, Any], lengths: tuple[int, ...], steps: int, seed: int = 0) -> None:
    llm.generate(prompts(lengths, raw["vocab_size"], seed), drawn(steps), use_tqdm=False)


def quickest(device: str, run: Callable[[], Returned]) -> tuple[float, Returned]:
    """Seconds of the quickest of five runs, the first of which warms up, and what the last one returned.

    On a CPU, where no time is judged, there is one run.
    """
    platform, took = resolve_platform(device), []
    for _ in range(5 if device == "cuda" else 1):
        platform.synchronize()
        start = time.perf_counter()
        returned = run()
        platform.synchronize()
        took.append(time.perf_counter() - start)
    return min(took), returned
