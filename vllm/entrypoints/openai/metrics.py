"""Counts and times of the server in Prometheus' text format, under vLLM's metric names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TIME_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass
class Histogram:
    """How many observations fell below each bound."""

    bounds: tuple[float, ...] = TIME_BUCKETS_S
    counts: list[int] = field(default_factory=list)  # per bucket, the last one is beyond all bounds
    total: float = 0.0

    def observe(self, value: float) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


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
        pages = [_metric(name, "gauge", [("", model, value)]) for name, value in gauges.items()]
        pages += [_metric(name, "counter", [("", model, value)]) for name, value in counters.items()]
        pages += [
            _metric("prompt_tokens_total", "counter", [("", model, self.prompt_tokens)]),
            _metric("generation_tokens_total", "counter", [("", model, self.generation_tokens)]),
            _metric(
                "request_success_total",
                "counter",
                [("", model | {"finished_reason": reason}, count) for reason, count in self.finished.items()],
            ),
            _metric(
                "http_responses_total",
                "counter",
                [("", {"path": path, "status": str(status)}, count) for (path, status), count in self.http.items()],
            ),
            _metric("time_to_first_token_seconds", "histogram", _histogram(self.time_to_first_token, model)),
            _metric("e2e_request_latency_seconds", "histogram", _histogram(self.request_latency, model)),
        ]
        return "".join(pages)


def _histogram(histogram: Histogram, labels: dict[str, str]) -> list[tuple[str, dict[str, str], float]]:
    samples: list[tuple[str, dict[str, str], float]] = []
    below = 0
    counts = histogram.counts or [0] * (len(histogram.bounds) + 1)
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), counts, strict=True):
        below += count
        samples.append(("_bucket", labels | {"le": bound}, below))
    return [*samples, ("_sum", labels, histogram.total), ("_count", labels, below)]


def _metric(name: str, kind: str, samples: Iterable[tuple[str, dict[str, str], float]]) -> str:
    lines = [f"# TYPE vllm:{name} {kind}\n"]
    for suffix, labels, value in samples:
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        lines.append(f"vllm:{name}{suffix}{{{pairs}}} {value}\n")
    return "".join(lines)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
