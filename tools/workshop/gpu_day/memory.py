"""What the planner says of memory beside what the device's allocator counts: a training step, and a generation."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megatron.core.memory_ledger import ON_DEVICE, ledger, total_bytes
from megatron.core.ops import resolve
from tools.plan.collectives import CollectiveLog
from tools.plan.device import DEVICE, MemoryMeter, PlannedDevice
from tools.plan.ops import Routing
from tools.plan.ops import train_ops as planned_train_ops
from tools.plan.platform import PLATFORMS
from tools.plan.rollout_ops import Spread, ordinary_token
from tools.plan.rollout_ops import rollout_ops as planned_rollout_ops
from tools.workshop.bench.models import parsed, random_batch
from tools.workshop.gpu_day.engines import ROLLOUT_OPS, TRAIN_OPS, Trainer, drawn, new_engine, prompts
from tools.workshop.gpu_day.rows import Rows
from tools.workshop.gpu_day.speed import sizes_of
from vllm.ops.contract import RolloutOps
from vllm.platforms import Platform

SHARE = 0.1  # by which the allocator may differ from a plan
_TOTAL_BYTES = 80 << 30  # of the planned device: the number of cache blocks is given, so that nothing depends on it


class Peak:
    """Bytes that are allocated at most since the beginning, or since ``restart``, beyond those of the beginning."""

    def __init__(self, device: str) -> None:
        gc.collect()  # an engine that has gone is in cycles
        self._meter = None if device == "cuda" else MemoryMeter()
        self._before = torch.cuda.memory_allocated() if device == "cuda" else 0
        self.restart()

    @property
    def num_bytes(self) -> int:
        return self._meter.peak_bytes if self._meter is not None else torch.cuda.max_memory_allocated() - self._before

    def restart(self) -> None:
        if self._meter is not None:
            self._meter.peak_bytes = self._meter.now_bytes
        else:
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def counted(self) -> Iterator[Peak]:
        """Counts what is allocated inside: by the allocator, or on a host tensor by tensor."""
        if self._meter is None:
            yield self
            return
        with self._meter:
            yield self


def planned_device() -> PlannedDevice:
    """A context in which tensors on the meta device are counted as a GPU's."""
    return PlannedDevice(CollectiveLog(), MemoryMeter())


def _restart(planned: PlannedDevice) -> None:
    planned.meter.peak_bytes = planned.meter.now_bytes


def memory(device: str, rows: Rows) -> None:
    """State by owner, which must be the plan's to the byte, and peaks."""
    _training(device, rows)
    for name, raw in sizes_of(device).models.items():
        _generation(name, raw, device, rows)


def _training(device: str, rows: Rows) -> None:
    sizes = sizes_of(device)
    batch = random_batch(list(sizes.lengths), sizes.trained["vocab_size"], 0)

    def run(where: str, ops: Any, restart: Callable[[], None]) -> int:
        trainer = Trainer(sizes.trained, ops, where, torch.bfloat16)
        trainer.step(batch)  # the optimizer's state, and kernels that are chosen by trying
        restart()
        trainer.step(batch)
        return total_bytes(ledger(trainer.model, trainer.optimizer), ON_DEVICE)

    with planned_device() as planned:
        planned_state = run(DEVICE.type, planned_train_ops("cuda", Routing()), partial(_restart, planned))
    with Peak(device).counted() as peak:
        state = run(device, resolve(TRAIN_OPS), peak.restart)
    note = f"{state} bytes of weights, gradients and optimizer, {planned_state} in the plan"
    rows.holds("training: what stays", state == planned_state, note)
    _compare(rows, "training: the peak of a step", peak.num_bytes, planned.meter.peak_bytes)


def _generation(name: str, raw: dict[str, Any], device: str, rows: Rows) -> None:
    sizes = sizes_of(device)

    def run(where: str | Platform, ops: str | RolloutOps, restart: Callable[[], None]) -> dict[str, int]:
        llm = new_engine(raw, where, len(sizes.prompts), max(sizes.prompts) + 4, provider=ops, enforce_eager=True)
        restart()
        llm.generate(prompts(sizes.prompts, raw["vocab_size"]), drawn(2), use_tqdm=False)
        report = llm.get_memory_report()
        llm.shutdown()
        return report

    hf = parsed(raw)
    with planned_device() as planned:
        spread = Spread(1.0, 0, 1, hf.n_routed_experts, 1, is_dispatched=False)
        table = planned_rollout_ops("cuda", spread, ordinary_token(hf), planned.log)
        in_plan = run(PLATFORMS["cuda"](_TOTAL_BYTES, 0, planned), table, partial(_restart, planned))
    with Peak(device).counted() as peak:
        found = run(device, ROLLOUT_OPS, peak.restart)
    kept = {key: (found[key], in_plan[key]) for key in ("weights_bytes", "kv_cache_bytes")}
    note = ", ".join(f"{key} {ours}, {theirs} in the plan" for key, (ours, theirs) in kept.items())
    rows.holds(f"{name}: weights and cache", all(ours == theirs for ours, theirs in kept.values()), note)
    _compare(rows, f"{name}: the peak of a generation", peak.num_bytes, planned.meter.peak_bytes)


def _compare(rows: Rows, what: str, num_bytes: int, in_plan: int) -> None:
    note = f"{num_bytes / 2**30:.4g} GiB, {in_plan / 2**30:.4g} in the plan"
    rows.measured(what, num_bytes / in_plan, "of the plan", 1 - SHARE, note, most=1 + SHARE)
