"""Where the host waits for the device: never within a decode step up to its samples, counted in a prefill step."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tests.vllm.meta_steps import decode_and_sample
from tools.workshop.bench.models import parsed
from tools.workshop.gpu_day.engines import ROLLOUT_OPS, drawn, generated, new_llm, prompts
from tools.workshop.gpu_day.parity import MODELS
from tools.workshop.gpu_day.rows import ROOT, Rows, described
from vllm import LLM
from vllm.ops.contract import RolloutOps, SampledTokens, SamplingBatch, resolve
from vllm.ops.cuda.table import cuda_table
from vllm.transformers_utils.config import HFConfig

_LENGTHS, _STEPS = (22, 3, 16), 4
_WAIT = "called a synchronizing CUDA operation"  # torch's words of an error and of a warning


def host_waits(device: str, rows: Rows) -> None:
    """Torch's sync debug mode around whole engine steps, captured and eager; on a CPU a device that has no values."""
    for name, raw in MODELS.items():
        if device == "cpu":
            launched = decode_and_sample(HFConfig(**vars(parsed(raw))), torch.bfloat16, cuda_table)
            rows.holds(f"{name}: a decode step without values", True, f"{len(launched)} kernels; steps need a GPU")
            continue
        for enforce_eager in (None, True):
            llm = new_llm(raw, device, _read_apart(resolve(ROLLOUT_OPS)), "bfloat16", enforce_eager=enforce_eager)
            generated(llm, _LENGTHS, _STEPS)  # kernels are compiled, graphs captured
            _watch_steps(rows, f"{name}, {'eager' if enforce_eager else 'captured'}", llm, raw["vocab_size"])
            llm.shutdown()


def _watch_steps(rows: Rows, name: str, llm: LLM, vocab_size: int) -> None:
    """A prefill step of all prompts, then decode steps, each from its schedule to its samples."""
    for index, prompt in enumerate(prompts(_LENGTHS, vocab_size, seed=1)):
        llm.engine.add_request(str(index), prompt, drawn(_STEPS))
    with warnings.catch_warnings(record=True) as caught, _sync_debug_mode("warn"):
        warnings.simplefilter("always")
        llm.engine.step()
    waits = [warning for warning in caught if _WAIT in str(warning.message)]
    places = Counter(f"{warning.filename.removeprefix(f'{ROOT}/')}:{warning.lineno}" for warning in waits)
    note = ", ".join(f"{place} ({count})" for place, count in places.most_common(6))
    rows.measured(f"{name}: a prefill step", len(waits), "waits of the host", note=note)
    num_steps, wrong = 0, ""
    try:
        while llm.engine.has_unfinished_requests():
            with _sync_debug_mode("error"):
                llm.engine.step()
            num_steps += 1
    except RuntimeError as error:  # the engine has dropped its requests
        wrong = described(error)
    graphs = llm.core.worker.graphs
    how = "" if graphs is None else f", graphs of {graphs.captured_sizes}"
    rows.holds(f"{name}: decode steps", not wrong, wrong or f"{num_steps} without a wait{how}")


def _read_apart(table: RolloutOps) -> RolloutOps:
    """The table, after whose samples the host may wait: it reads them, which ends a step."""

    def sample(logits_BW: Tensor, batch: SamplingBatch) -> SampledTokens:
        sampled = table.sample(logits_BW, batch)
        torch.cuda.set_sync_debug_mode("default")
        return sampled

    return replace(table, sample=sample)


@contextmanager
def _sync_debug_mode(mode: str) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
