"""The profile of a training step: each operation's time beside the least time that its bytes and arithmetic take."""

from __future__ import annotations

from typing import Any

from tools.workshop.bench.options import aligned

COLUMNS = {
    "phase": "<9",
    "part": "<46",
    "op": "<28",
    "dtype": "<8",
    "calls": ">6d",
    "s": ">7.3f",
    "of step": ">7.1%",
    "GiB": ">7.2f",
    "GFLOP": ">8.1f",
    "of limit": ">8.0%",
}
_SMALL = 0.005  # operations of less than this share of the step are one row
_SHORT = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def with_limits(profile: dict[str, Any]) -> dict[str, Any]:
    """The profile with ``limit_s`` of each operation, and ``explained``: the share of the step that they take.

    The limit is the larger of its bytes at the rate of a copy and its products at the higher matmul rate; values that a
    cache still holds take less.
    """
    flops_per_s = max(profile["peaks"].values())
    for op in profile["ops"]:
        op["limit_s"] = max(op["num_bytes"] / profile["bytes_per_s"], op["flops"] / flops_per_s)
    profile["ops"].sort(key=lambda op: -op["seconds"])
    return profile | {"explained": sum(op["seconds"] for op in profile["ops"]) / profile["seconds"]}


def profile_table(profile: dict[str, Any]) -> str:
    """The operations that take the most time, the rest as one row, and each phase."""
    ops, step_s = profile["ops"], profile["seconds"]
    large = [op for op in ops if op["seconds"] >= _SMALL * step_s]
    small = ops[len(large) :]
    rows = [
        _cells(op["phase"], op["part"], op["op"], _SHORT.get(op["dtype"], op["dtype"]), [op], step_s) for op in large
    ]
    rows.append(_cells("", f"{len(small)} others", "", "", small, step_s))
    for phase in dict.fromkeys(op["phase"] for op in ops):
        rows.append(_cells(phase, "all", "", "", [op for op in ops if op["phase"] == phase], step_s))
    peaks = ", ".join(f"{dtype} {peak / 1e9:.0f} GFLOP/s" for dtype, peak in profile["peaks"].items())
    return "\n".join(
        [
            f"{profile['engine']}: a step of {step_s:.2f} s, {profile['explained']:.1%} of it in operations",
            f"limits: {profile['bytes_per_s'] / 1e9:.1f} GB/s, {peaks}",
            *aligned(COLUMNS, rows),
        ]
    )


def _short(op: dict[str, Any]) -> str:
    return _SHORT.get(op["dtype"], op["dtype"])


def _cells(phase: str, part: str, op: str, dtype: str, ops: list[dict[str, Any]], step_s: float) -> tuple[Any, ...]:
    calls, seconds, num_bytes, flops, limit_s = (
        sum(one[key] for one in ops) for key in ("calls", "seconds", "num_bytes", "flops", "limit_s")
    )
    share = limit_s / seconds if seconds else 0.0
    return phase, part, op, dtype, calls, seconds, seconds / step_s, num_bytes / 2**30, flops / 1e9, share
