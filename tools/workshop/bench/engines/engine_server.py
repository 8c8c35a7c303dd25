"""What every engine's program shares: it answers lines of JSON with lines of JSON.

Runs in any environment and imports nothing of this repository: there, ``vllm`` may be the other engine's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any


class Channel:
    """This program's options, the requests it gets and the answers it gives."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print must not get between the answers
        self.options: dict[str, Any] = json.loads(sys.argv[1])
        os.sched_setaffinity(0, self.options["cpus"])  # before any library starts its threads
        import torch

        torch.set_num_threads(self.options["threads"])

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield each request; ends when the benchmark closes the pipe."""
        for line in sys.stdin:
            yield json.loads(line)

    def answer(self, content: dict[str, Any]) -> None:
        """Answer the last request; a first answer, to no request, reports that the engine is ready."""
        print(json.dumps(content), file=self._answers, flush=True)


def serve(build: Callable[[dict[str, Any]], Any]) -> None:
    """Build the engine and answer requests until there are no more; see ``answer_all``."""
    channel = Channel()
    answer_all(channel, build(channel.options))


def answer_all(channel: Channel, engine: Any) -> None:
    """Answer each {"command": a method of the engine, ...its arguments}."""
    channel.answer({"name": engine.name})
    for request in channel.requests():
        channel.answer(getattr(engine, request.pop("command"))(**request))


def pretrained(options: dict[str, Any]) -> tuple[Any, str]:
    """The model of transformers in the options' variant of attention and experts, and what it is called."""
    import torch
    import transformers

    attention, experts = options["variant"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options["model"],
        dtype=getattr(torch, options["dtype"]),
        attn_implementation=attention,
        experts_implementation=experts,
    )
    return model, f"transformers {transformers.__version__}, {attention} attention, {experts} experts"


class Stopwatch:
    """Seconds, CPU seconds of all threads and the highest resident bytes so far, from its making to ``read``."""

    def __init__(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        seconds, cpu_seconds = time.perf_counter() - self._start, time.process_time() - self._cpu_start
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak_resident_bytes()}


def peak_resident_bytes() -> int:
    """The peak of this process since its start, or since it last wrote 5 to /proc/self/clear_refs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM; the benchmark reads peak memory on Linux")


def best_seconds(work: Callable[[], Any], rounds: int) -> float:
    """The least seconds of several runs of ``work``."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def matmul_peaks(*dtypes: str) -> dict[str, float]:
    """Floating-point operations per second of large square products, the best of several, by dtype."""
    import torch

    peaks = {}
    for dtype in dtypes:
        left, right = (torch.randn(2048, 2048).to(getattr(torch, dtype)) for _ in range(2))
        peaks[dtype] = 2 * 2048**3 / best_seconds(partial(torch.matmul, left, right), 3)
    return peaks
