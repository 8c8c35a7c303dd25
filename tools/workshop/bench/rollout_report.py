"""The figures of the rollout benchmark: medians, ratios, shares of the machine's limit, and their table."""

from __future__ import annotations

import statistics
from typing import Any

from hf_formats.config import HFModelConfig
from tools.workshop.bench.models import CHECKPOINTS, ITEM_BYTES, LeastWork, decode_work, parsed, prefill_work
from tools.workshop.bench.options import aligned
from tools.workshop.bench.remote import allocator_name

_COLUMNS = {
    "engine": "<52",
    "work": "<9",
    "tok/s": ">7.0f",
    "tok/cpu-s": ">9.0f",
    "CPU-ms/step": ">11.1f",
    "step ms": ">8.2f",
    "host us": ">8.0f",
    "host cpu": ">8.0f",
    "of limit": ">8.1%",
    "peak MB": ">8.0f",
    "others": ">6.2f",
}


Answers = list[dict[str, Any]]


def report(options: dict[str, Any], measured: Answers, started: Answers, machine: Answers) -> dict[str, Any]:
    """Rows per engine and work, ratios of ours to each other engine; ``options``: with the name of the checkpoint."""
    raw = CHECKPOINTS[options["checkpoint"]]
    rates = {key: statistics.median(probe[key] for probe in machine) for key in ("bytes_per_s", "flops_per_s")}
    rows = [_row(one, parsed(raw), ITEM_BYTES[options["dtype"]], rates) for one in measured]
    starts = [_start_row(one) for one in started if one["ready_seconds"]]
    return {
        "checkpoint": options["checkpoint"],
        "options": options,
        "model": raw,
        "allocator": allocator_name(),
        "machine": rates,
        "starts": starts,
        "rows": rows,
        "ratios": _ratios(rows, starts),
    }


def table(found: dict[str, Any]) -> str:
    """The report for people."""
    options, machine = found["options"], found["machine"]
    lines = [
        f"checkpoint {found['checkpoint']}, {options['dtype']}, {options['threads']} threads, allocator "
        f"{found['allocator']}",
        f"the machine: {machine['bytes_per_s'] / 1e9:.0f} GB/s of reads over the size of the weights, "
        f"{machine['flops_per_s'] / 1e9:.0f} GFLOP/s in matmuls",
        "others: cores that other processes used then; of limit: least time by these two figures, overlapped",
        *aligned(_COLUMNS, map(_cells, found["rows"])),
    ]
    for start in found["starts"]:
        cold, warm = start["first_token_seconds"], start["warm_first_token_seconds"]
        again = "" if warm is None else f", {warm:.1f} s with them"
        lines.append(f"{start['engine']}: first token {cold:.1f} s after its start with empty caches{again}")
    lines += [f"{name}: {value:.2f}" for name, value in found["ratios"].items()]
    lines += [f"FAILED {name}: {error}" for name, error in found["failures"].items()]
    return "\n".join(lines) + "\n"


def _row(one: dict[str, Any], hf: HFModelConfig, item_bytes: int, rates: dict[str, float]) -> dict[str, Any]:
    work, rounds = one["work"], one["rounds"]
    num_samples, new_tokens = work["num_prompts"] * work["n"], work["new_tokens"]
    median = {key: statistics.median(r[key] for r in rounds) for key in ("seconds", "cpu_seconds")}
    row = {
        "engine": one["engine"],
        "name": one["name"],
        "work": work["name"],
        "seconds": [r["seconds"] for r in rounds],
        "cpu_seconds": [r["cpu_seconds"] for r in rounds],
        "tokens_per_s": num_samples * new_tokens / median["seconds"],
        "tokens_per_cpu_s": num_samples * new_tokens / median["cpu_seconds"],
        "cpu_ms_per_step": 1e3 * median["cpu_seconds"] / new_tokens,
        "peak_bytes": max(r["peak_bytes"] for r in rounds),
        "others_cores": statistics.median(one["others_cores"]),
    }
    prompt_length = (work["shortest"] + work["longest"]) / 2
    if new_tokens == 1:
        least = prefill_work(hf, item_bytes, [round(prompt_length)] * num_samples)
        return row | {"of_limit": _part(least, rates, median["seconds"])}
    # Decode steps are the last ones of a round; the first of them follows the last prefill.
    decode = [{key: r[key][-(new_tokens - 2) :] for key in ("step_us", "host_us", "host_cpu_us")} for r in rounds]
    for key in ("step_us", "host_us", "host_cpu_us"):
        row[key] = statistics.median(statistics.median(steps[key]) for steps in decode) if decode[0][key] else None
    if row["step_us"]:
        common = (num_samples - work["num_prompts"]) * prompt_length
        least = decode_work(hf, item_bytes, num_samples, prompt_length + new_tokens / 2, common)
        row["of_limit"] = _part(least, rates, row["step_us"] / 1e6)
    return row


def _part(least: LeastWork, rates: dict[str, float], seconds: float) -> float:
    return least.seconds(rates["bytes_per_s"], rates["flops_per_s"]) / seconds


def _start_row(one: dict[str, Any]) -> dict[str, Any]:
    cold, *warm = one["first_token_seconds"]
    return {
        "engine": one["engine"],
        "ready_seconds": one["ready_seconds"],
        "first_token_seconds": cold,
        "warm_first_token_seconds": statistics.median(warm) if warm else None,
    }


def _ratios(rows: list[dict[str, Any]], starts: list[dict[str, Any]]) -> dict[str, float]:
    """Ours to each other engine; of speed more is better, of memory, start-up and host time less."""
    by_key = {(row["engine"], row["work"]): row for row in rows}
    by_start = {start["engine"]: start for start in starts}
    found: dict[str, float] = {}
    for other in sorted({row["engine"] for row in rows} - {"ours"}):
        for (engine, work), theirs in by_key.items():
            ours = by_key.get(("ours", work))
            if engine != other or ours is None:
                continue
            pair = f"{work}: ours / {other}"
            found[f"{pair}, tokens per second"] = ours["tokens_per_s"] / theirs["tokens_per_s"]
            found[f"{pair}, tokens per CPU second"] = ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"]
            found[f"{pair}, peak memory"] = ours["peak_bytes"] / theirs["peak_bytes"]
            if work.startswith("host") and ours["host_us"] and theirs["host_us"]:
                found[f"{pair}, host time per step"] = ours["host_us"] / theirs["host_us"]
                found[f"{pair}, host CPU time per step"] = ours["host_cpu_us"] / theirs["host_cpu_us"]
        for key in ("first_token_seconds", "warm_first_token_seconds"):
            if "ours" in by_start and other in by_start and by_start[other][key]:
                kind = key.removesuffix("_seconds").replace("_", " ")
                found[f"start-up, {kind}: ours / {other}"] = by_start["ours"][key] / by_start[other][key]
    for engine in sorted({row["engine"] for row in rows}):
        if (engine, "shared") in by_key and (engine, "unshared") in by_key:
            shared, unshared = (by_key[engine, work]["tokens_per_s"] for work in ("shared", "unshared"))
            found[f"gain by sharing prompts, {engine}"] = shared / unshared
    return found


def _cells(row: dict[str, Any]) -> list[Any]:
    step_us = row.get("step_us")
    keys = ("name", "work", "tokens_per_s", "tokens_per_cpu_s", "cpu_ms_per_step")
    times = [step_us / 1e3 if step_us else None, *map(row.get, ("host_us", "host_cpu_us", "of_limit"))]
    return [*(row[key] for key in keys), *times, row["peak_bytes"] / 1e6, row["others_cores"]]
