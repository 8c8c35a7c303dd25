"""The parts of a GPU day in order of worth."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path

import torch

from tests.megatron.flash_attention_form import flash_attention_on_cpu
from tools.workshop.gpu_day.rows import ENDED, Rows, described

# Name -> the function of a module that gets a device and the part's rows, and the part's share of a day in seconds.
PARTS = {
    "training ops": ("tools.workshop.gpu_day.parity:training_ops", 80),
    "rollout ops": ("tools.workshop.gpu_day.parity:rollout_ops", 60),
    "training model": ("tools.workshop.gpu_day.parity:training_model", 30),
    "rollout model": ("tools.workshop.gpu_day.parity:rollout_models", 55),
    "host waits": ("tools.workshop.gpu_day.waits:host_waits", 35),
    "grpo step": ("tools.workshop.gpu_day.grpo:grpo_step", 40),
    "decode": ("tools.workshop.gpu_day.speed:decode", 75),
    "speculation": ("tools.workshop.gpu_day.drafts:speculation", 60),
    "training": ("tools.workshop.gpu_day.speed:training", 30),
    "prefill": ("tools.workshop.gpu_day.speed:prefill", 40),
    "fp8": ("tools.workshop.gpu_day.fp8:fp8_products", 45),
    "fp8 training": ("tools.workshop.gpu_day.fp8:fp8_training", 45),
    "context parallel": ("tools.workshop.gpu_day.context:context_parallel", 30),
    "memory": ("tools.workshop.gpu_day.memory:memory", 40),
    "sleep": ("tools.workshop.gpu_day.speed:sleep", 25),
}


def ends_of_parts(names: Sequence[str], seconds: float) -> dict[str, float]:
    """When each part of a day of so many seconds must have ended, counted from its beginning.

    What a part leaves over, the ones after it may take.
    """
    shares = [PARTS[name][1] for name in names]
    ends = accumulate(share / sum(shares) * seconds for share in shares)
    return dict(zip(names, ends, strict=True))


def resolved_device(asked: str | None) -> str:
    """cuda where there is one, unless another is asked for; SystemExit where the one that is asked for is not there."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no GPU (torch.cuda.is_available()); leave --device out, or use cpu")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def run_part(name: str, path: Path, device: str) -> None:
    """Run one part in this process; its rows go to the JSON file ``path``."""
    run = pkgutil.resolve_name(PARTS[name][0])
    rows = Rows(path, name, judges=device == "cuda")
    try:
        with flash_attention_on_cpu() if device == "cpu" else nullcontext():
            run(device, rows)
    except Exception as error:
        rows.holds(ENDED, False, described(error))
        raise
