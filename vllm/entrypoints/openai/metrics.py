"""Counts and times of the server in Prometheus' text format, under vLLM's metric names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

TIME_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Sample: TypeAlias = tuple[str, dict[str, str], float]  # suffix of the metric's name, labels, value


@dataclass
class Histogram:
    """How many observations fell below each of TIME_BUCKETS_S, and beyond all of them."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(TIME_BUCKETS_S) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(TIME_BUCKETS_S, value)] += 1
        self.total += value

    def samples(self, labels: dict[str, str]) -> list[Sample]:
        below = zip((*map(str, TIME_BUCKETS_S), "+Inf"), accumulate(self.counts), strict=True)
        buckets: list[Sample] = [("_bucket", labels | {"le": bound}, count) for bound, count in below]
        return [*buckets, ("_sum", labels, self.total), ("_count", labels, sum(self.counts))]


@dataclass
class ServerMetrics:
    """The server's counters; used on the event loop only."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # samples by finish reason
    http: Counter[tuple[str, int]] = field(default_factory=Counter)  # responses by (path, status)
    time_to_first_token: Histogram = field(default_factory=Histogram)
    request_latency: Histogram = field(default_factory=Histogram)

    def text(self, model_name: str, gauges: Mapping[str, float], counters: Mapping[str, float]) -> str:
        """Return the metrics page; `gauges` and `counters` are the engine's, named without their prefix."""
        model = {"model_name": model_name}
        tokens = {"prompt_tokens_total": self.prompt_tokens, "generation_tokens_total": self.generation_tokens}
        finished = [("", model | {"finished_reason": reason}, count) for reason, count in self.finished.items()]
        http = [("", {"path": path, "status": str(status)}, count) for (path, status), count in self.http.items()]
        return "".join(
            [
                *(_metric(name, "gauge", [("", model, value)]) for name, value in gauges.items()),
                *(_metric(name, "counter", [("", model, value)]) for name, value in {**counters, **tokens}.items()),
                _metric("request_success_total", "counter", finished),
                _metric("http_responses_total", "counter", http),
                _metric("time_to_first_token_seconds", "histogram", self.time_to_first_token.samples(model)),
                _metric("e2e_request_latency_seconds", "histogram", self.request_latency.samples(model)),
            ]
        )


def _metric(name: str, kind: str, samples: Sequence[Sample]) -> str:
    lines = [f"# TYPE vllm:{name} {kind}\n"]
    for suffix, labels, value in samples:
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        lines.append(f"vllm:{name}{suffix}{{{pairs}}} {value}\n")
    return "".join(lines)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
