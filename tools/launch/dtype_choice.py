"""``python -m tools.launch.dtype_choice``: whether this machine's CPU computes a model quicker in bfloat16.

It prints how many times as fast a linear layer is in bfloat16 as in float32, on the threads of one worker: the median
over rounds in which both take turns. The launcher asks once, and keeps the answer with the layout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from hf_formats.cores import THREADS, threads_per_worker
from tools.launch.processes import python_path

if TYPE_CHECKING:
    from torch import Tensor

KEYS = ("actor_rollout_ref.actor.megatron.dtype", "actor_rollout_ref.rollout.dtype")
MIN_GAIN = 1.3  # below it float32 is taken, whose products are exact to more digits
_ROUNDS, _TIMEOUT_S = 9, 120.0
_ROWS, _INNER, _COLUMNS = 512, 1024, 2048


def main() -> int:
    """See the module."""
    import torch  # here alone: the launcher, which imports this module, does without

    from megatron.core.ops.cpu.instructions import multiplies_bfloat16

    torch.set_num_threads(threads_per_worker(1))
    print(f"{_gain() if multiplies_bfloat16() else 0.0:.3f}")
    return 0


def chosen_dtypes(num_workers: int) -> tuple[str, ...]:
    """Overrides of ``KEYS``, as measured now with the threads of one of ``num_workers`` processes.

    ValueError: the measurement failed.
    """
    environment = {**os.environ, THREADS: str(threads_per_worker(num_workers)), "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "tools.launch.dtype_choice"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"whether bfloat16 is quick here cannot be measured: {error}") from error
    dtype = "bfloat16" if float(done.stdout) >= MIN_GAIN else "float32"
    return tuple(f"{key}={dtype}" for key in KEYS)


def dtypes_in(overrides: Sequence[str]) -> tuple[str, ...]:
    """Those of ``overrides`` that give a dtype."""
    return tuple(text for text in overrides if text.lstrip("+").partition("=")[0] in KEYS)


def _gain() -> float:
    """Seconds of the layer in float32 over those in bfloat16."""
    import torch

    x, weight = torch.ones(_ROWS, _INNER), torch.ones(_COLUMNS, _INNER)
    of_dtype = {dtype: (x.to(dtype), weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16)}
    gains = []
    for _ in range(_ROUNDS):
        exact, quick = (_seconds(*tensors) for tensors in of_dtype.values())
        gains.append(exact / quick)
    return median(gains)


def _seconds(x: Tensor, weight: Tensor) -> float:
    from torch.nn.functional import linear

    linear(x, weight)  # what was used last is in the cache
    start = time.perf_counter()
    linear(x, weight)
    return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main())
