"""Metrics of a batch under verl's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.config.config import TokenLimit
from verl.utils.masks import response_lengths, row_rewards
from verl.utils.megatron.packed_batch import padded_lengths
from verl.utils.timeline import Timeline, now_s
from verl.workers.rollout.rollout_messages import DRAFTS, TURNS


class PhaseSeconds(dict[str, float]):
    """Seconds per phase; ``marked_timer`` also makes each phase a span of ``timeline``."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self.timeline = timeline


@contextmanager
def marked_timer(name: str, timing: dict[str, float]) -> Iterator[None]:
    """Adds the seconds spent inside to ``timing[name]``."""
    start_s = now_s()
    try:
        yield
    finally:
        end_s = now_s()
        timing[name] = timing.get(name, 0.0) + end_s - start_s
        if isinstance(timing, PhaseSeconds):
            timing.timeline.add(name, start_s, end_s)


def compute_data_metrics(batch: DataProto) -> dict[str, float]:
    """Scores and lengths of a batch and, if it was trained on, rewards, advantages and returns of response tokens."""
    tensors, texts = batch.batch, batch.non_tensor_batch
    lengths, prompt_lengths = _lengths(batch)
    clipped = float((lengths == tensors["responses"].shape[-1]).float().mean())
    if "finish_reason" in texts:
        clipped = float(np.mean([reason == "length" for reason in texts["finish_reason"]]))
    metrics = {
        **_spread("critic/score", row_rewards(tensors["token_level_scores"], tensors["response_mask"])),
        **_spread("response_length", lengths),
        **_spread("prompt_length", prompt_lengths),
        "response_length/clip_ratio": clipped,
    }
    if DRAFTS in texts:
        metrics |= _draft_metrics(texts[DRAFTS])
    if TURNS in texts:
        metrics |= _turn_metrics(texts[TURNS], texts["finish_reason"])
    if "advantages" in tensors:
        mask = tensors["response_mask"].bool()
        metrics |= _spread("critic/rewards", row_rewards(tensors["token_level_rewards"], mask))
        metrics |= _spread("critic/advantages", tensors["advantages"][mask])
        metrics |= _spread("critic/returns", tensors["returns"][mask])
    return metrics


def _draft_metrics(counts: np.ndarray) -> dict[str, float]:
    """Tokens of a step that verifies drafts, and the share of right drafts; nothing where there were none."""
    steps, drafts, right = np.sum([list(one) for one in counts], axis=0).tolist()
    return {"perf/acceptance_length": 1 + right / steps, "perf/acceptance_rate": right / drafts} if steps else {}


def _turn_metrics(turns: np.ndarray, reasons: np.ndarray) -> dict[str, float]:
    """Turns and seconds of samples, what their environments told, and the share of samples by how they ended."""
    metrics = _spread("num_turns", torch.tensor([record["num_turns"] for record in turns]))
    metrics["num_turns/new_rows"] = float(np.mean([len(record.get("row_starts", ())) for record in turns]))
    for part in ("decode", "environment", "waiting"):
        metrics |= _spread(f"timing_s/{part}", torch.tensor([record["seconds"][part] for record in turns]))
    for name in sorted({name for record in turns for name in record["info"]}):
        metrics[f"environment/{name}"] = float(np.mean([record["info"].get(name, 0.0) for record in turns]))
    for reason in sorted(set(reasons)):
        metrics[f"finish_reason/{reason}"] = float(np.mean([other == reason for other in reasons]))
    return metrics


def _lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    """The tokens of each response and of each prompt, fp32 [B]."""
    lengths = response_lengths(batch.batch["response_mask"]).float()
    return lengths, batch.batch["num_tokens"].float() - lengths


def count_samples_above(num_tokens_B: Tensor, limits: Sequence[TokenLimit], cp_size: int) -> dict[str, float]:
    """Samples that get a micro-batch of their own in each training call, because they are longer than its limit."""
    padded_B = padded_lengths(num_tokens_B, cp_size)
    return {limit.metric: float((padded_B > limit.tokens).sum()) for limit in limits}


def compute_rank_metrics(by_rank: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """The maximum over ranks of every figure, and the rank that uses the most memory, in each phase too.

    Args:
        by_rank: rank -> metric -> value, as the ranks report them with their results.
    """
    names = {name for figures in by_rank.values() for name in figures}
    metrics = {name: max(f[name] for f in by_rank.values() if name in f) for name in names}
    peak = "perf/max_memory_allocated_gb"
    if peak in metrics:
        metrics["perf/max_memory_allocated_rank"] = _rank_of_most(by_rank, peak)
    for phase in {name.rpartition("/")[0] for name in names if name.startswith("memory/")}:
        on_device, on_host = f"{phase}/allocated_gb", f"{phase}/host_gb"
        metrics[f"{phase}/rank"] = _rank_of_most(by_rank, on_device if on_device in names else on_host)
    return metrics


def _rank_of_most(by_rank: Mapping[int, Mapping[str, float]], name: str) -> float:
    return float(max(by_rank, key=lambda rank: by_rank[rank].get(name, 0.0)))


def add_generation_times(seconds: Mapping[int, float], timing: dict[str, float]) -> dict[str, float]:
    """Adds the slowest and the fastest replica's seconds to ``timing``; returns the slowest one's rank as a metric.

    Args:
        seconds: first rank of each replica -> seconds that it generated in this step.
    """
    slowest = max(seconds, key=seconds.__getitem__)
    timing["generate_sequences"] = timing["generation_timing/max"] = seconds[slowest]
    timing["generation_timing/min"] = min(seconds.values())
    return {"perf/generation_slowest_rank": float(slowest)}


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """``timing_s/*`` and, for phases that process tokens, ``timing_per_token_ms/*``."""
    num_response, num_all = float(_lengths(batch)[0].sum()), float(batch.batch["num_tokens"].sum())
    counts = {"gen": num_response, **dict.fromkeys(("old_log_prob", "ref", "adv", "update_actor"), num_all)}
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name, count in counts.items():
        if name in timing_raw:
            metrics[f"timing_per_token_ms/{name}"] = timing_raw[name] * 1000 / max(count, 1.0)
    return metrics


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Tokens of the step, its seconds, tokens per second and device (a device is one process: a die on Atlas A3)."""
    num_tokens = float(batch.batch["num_tokens"].sum())
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": timing_raw["step"],
        "perf/throughput": num_tokens / (timing_raw["step"] * n_gpus),
    }


def compute_reward_metrics(parts: Mapping[str, np.ndarray], prefix: str) -> dict[str, float]:
    """The mean of every component of the reward over the samples that have it (the others are NaN)."""
    return {f"{prefix}/{name}": float(np.nanmean(values)) for name, values in parts.items()}


def compute_validation_metrics(
    data_sources: np.ndarray, parts: Mapping[str, np.ndarray], response_lengths: Tensor, n: int
) -> dict[str, float]:
    """``val/*`` over all problems (n responses each), ``val-core/<data_source>/reward/mean@n`` for each source."""
    metrics = compute_reward_metrics(parts, "val")
    metrics["val/problems"] = len(data_sources) / n
    metrics["val/response_length"] = float(response_lengths.float().mean())
    for source in sorted(set(data_sources)):
        chosen = data_sources == source
        metrics[f"val-core/{source}/reward/mean@{n}"] = float(parts["score"][chosen].mean())
        if "accuracy" in parts and not np.isnan(parts["accuracy"][chosen]).all():
            metrics[f"val-core/{source}/acc/mean@{n}"] = float(np.nanmean(parts["accuracy"][chosen]))
    return metrics


def compute_set_metrics(
    sets: np.ndarray, parts: Mapping[str, np.ndarray], response_lengths: Tensor
) -> dict[str, float]:
    """``val/<set>/<part>`` and ``val/<set>/response_length`` of every evaluation set that has a name."""
    metrics: dict[str, float] = {}
    for name in sorted(set(sets) - {""}):
        chosen = sets == name
        own = {part: values[chosen] for part, values in parts.items() if not np.isnan(values[chosen]).all()}
        metrics |= compute_reward_metrics(own, f"val/{name}")
        metrics[f"val/{name}/response_length"] = float(response_lengths[torch.from_numpy(chosen)].float().mean())
    return metrics


def _spread(name: str, values: Tensor) -> dict[str, float]:
    values = values.float()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
