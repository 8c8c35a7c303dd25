"""Speculation: the tokens are those without drafts, and what drafts that are always or never right change in speed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tools.workshop.bench.models import CHECKPOINTS
from tools.workshop.gpu_day.engines import ROLLOUT_OPS, generated, new_engine, new_llm, prompts
from tools.workshop.gpu_day.parity import same_samples
from tools.workshop.gpu_day.rows import Rows
from tools.workshop.gpu_day.speed import quickest, sizes_of
from vllm import SamplingParams

_NUM_DRAFTS = 4
_LAYER = {"num_nextn_predict_layers": 1}


def speculation(device: str, rows: Rows) -> None:
    """Both, on models with a prediction layer."""
    _tokens(device, rows)
    sizes = sizes_of(device)
    raw = sizes.models["MLA"] | _LAYER
    kinds = (("suffix", "always", 1.5), ("mtp", "never", 0.95))
    for batch in (1, 8, sizes.batch) if device == "cuda" else (1,):
        off_s, _ = _seconds(device, raw, batch, None)
        # The second answer to a prompt is the first one: all drafts are right. A layer of random weights never is.
        for method, kind, bar in kinds if device == "cuda" else kinds[1:]:
            took, note = _seconds(device, raw, batch, method)
            rows.measured(f"drafts {kind} right ({method}), {batch} sequences", off_s / took, "of none", bar, note)


def _tokens(device: str, rows: Rows) -> None:
    """Captured steps that verify all drafts, those of a second generation too, which repeats the first one."""
    raw, work = CHECKPOINTS["tiny"] | _LAYER, ((22, 3, 16, 9), 36) if device == "cuda" else ((3,), 3)
    num_drafts = 3 if device == "cuda" else 1  # there kernels are interpreted
    for dtype in ("float32", "bfloat16") if device == "cuda" else ("float32",):
        llm = new_llm(raw, device, ROLLOUT_OPS, dtype, enforce_eager=None)
        wanted = generated(llm, *work)
        llm.shutdown()
        for method in ("mtp", "ngram", "suffix") if device == "cuda" else ("mtp",):
            drafts = {"method": method, "num_speculative_tokens": num_drafts, "prompt_lookup_min": 1, "adaptive": False}
            llm = new_llm(raw, device, ROLLOUT_OPS, dtype, enforce_eager=None, speculative_config=drafts)
            for name in ("", ", again") if device == "cuda" else ("",):
                same_samples(rows, f"{method}, {dtype}{name}", generated(llm, *work), wanted, dtype)
            llm.shutdown()


def _seconds(device: str, raw: dict[str, Any], batch: int, method: str | None) -> tuple[float, str]:
    """Seconds of a generation, and what the engine measured of its steps."""
    sizes = sizes_of(device)
    num_tokens = 4 * sizes.steps if device == "cuda" else 2
    drafts: dict[str, Any] | None = {"method": method, "num_speculative_tokens": _NUM_DRAFTS} if method else None
    if drafts is not None and device == "cpu":
        drafts["adaptive"] = False  # interpreted kernels take minutes to be measured
    llm = new_engine(raw, device, batch, sizes.context + num_tokens + 1, speculative_config=drafts)
    questions = prompts((sizes.context,) * batch, raw["vocab_size"])
    # So hot that rounding does not choose tokens: a second answer is the first one.
    sampling = SamplingParams(max_tokens=num_tokens, seed=0, ignore_eos=True, temperature=100.0)
    took, _ = quickest(device, lambda: llm.generate(questions, sampling, use_tqdm=False))
    note, speculation = f"{batch * num_tokens / took:.0f} tok/s", llm.core.scheduler.speculation
    if speculation is not None and (costs := speculation.costs) is not None:
        steps, num_tried, num_right = speculation.counts
        verified = costs.of_steps(batch, np.array([_NUM_DRAFTS * batch]))[0]
        note += f"; a step {1e3 * costs.plain[batch]:.2f} ms, with {_NUM_DRAFTS} drafts each {1e3 * verified:.2f} ms"
        note += f", a pass of the layer {1e3 * costs.predicted[batch]:.2f} ms" if method == "mtp" else ""
        note += f"; {steps} verified with {num_tried} drafts, {num_right} right"
    llm.shutdown()
    return took, note
