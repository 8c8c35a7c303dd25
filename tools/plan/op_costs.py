"""Which ops have no kernel on a die's cores, and for which the host waits: `op_costs.toml`, applied to what has run.

    python -m tools.plan.op_costs FOLDER

FOLDER has the files that processes on simulated NPUs write (FAKE_NPU_CALLS_DIR, tests/npu/README.md). What is printed:
for each phase the ops of the control processor, those that the host waits for, and those that the table does not have.
"""

from __future__ import annotations

import argparse
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("op_costs.toml")
COPIES = ("_to_copy", "copy", "_copy_from")
INDEXING = ("index", "index_put", "_index_put_impl")
ON_HOST = ("host:", "pinned:", "scalar:")


@dataclass(frozen=True)
class OpCost:
    """Where an op runs, beside its bytes.

    on_control: the control processor (AICPU) · waits: the host waits for the device · source: a key of the table's
    sources.
    """

    on_control: bool
    waits: bool
    source: str


@dataclass
class PhaseCosts:
    """The remarkable ops of one phase, "op types" -> times, and how often the phase came."""

    times: int = 0
    control: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)


def cost_of(op: str, types: str) -> OpCost | None:
    """The cost of a call as the simulator notes it, e.g. ``aten::add.Tensor`` with ``Long,Long->Long``.

    None: the table does not have the op.
    """
    name, entry = _entry(op)
    tensors, *marks = types.split(" ")
    given = [part for part in tensors.replace("->", ",").split(",") if part]
    if entry is None:
        return None
    on_device = [part for part in given if not part.startswith(ON_HOST)]
    is_crossing = name in COPIES and len(on_device) < len(given)
    waits = is_crossing and "async" not in marks
    waits |= name in INDEXING and "Bool" in on_device[1:]
    waits |= bool(entry.get("waits")) and "sized" not in marks
    runs = not is_crossing and not entry.get("host")
    slow_inputs = set(entry.get("control", ())).intersection(tensors.split("->")[0].split(","))
    on_control = runs and bool(slow_inputs or set(_table()["control"]).intersection(on_device))
    return OpCost(on_control, waits, entry["source"])


def by_phase(calls: Iterable[tuple[str, str, str, int]]) -> dict[str, PhaseCosts]:
    """The costs of every phase; a call is its phase, its op (empty: the phase came), its types and how often."""
    found: dict[str, PhaseCosts] = {}
    for phase, op, types, times in calls:
        costs = found.setdefault(phase, PhaseCosts())
        if not op:
            costs.times += times
            continue
        cost, text = cost_of(op, types), f"{op} {types}"
        if cost is None:
            costs.unknown[text] += times
        elif cost.on_control:
            costs.control[text] += times
        elif cost.waits:
            costs.waits[text] += times
    return found


def read_calls(path: Path) -> list[tuple[str, str, str, int]]:
    """What one process has written."""
    lines = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return [(phase, op, types, int(times)) for phase, op, types, times in lines]


def report(costs: dict[str, PhaseCosts]) -> str:
    """The remarkable ops of every phase, how often in each."""
    lines = []
    for phase, found in sorted(costs.items()):
        named = (("control processor", found.control), ("host waits", found.waits), ("not in the table", found.unknown))
        shown = [
            f"  {kind}: {times / max(found.times, 1):.1f} {text}"
            for kind, ops in named
            for text, times in ops.most_common()
        ]
        if shown:
            lines += [f"{phase or 'outside of phases'}, {found.times} times", *shown]
    return "\n".join(lines) or "no op of the control processor, none that the host waits for, none unknown"


def _entry(op: str) -> tuple[str, dict | None]:
    """The op's name without its overload, and its entry in the table."""
    name, _, overload = op.removeprefix("aten::").partition(".")
    name = name if name.startswith("__") else name.rstrip("_")
    entry = _entries().get(f"{name}.{overload}") or _entries().get(name)
    if entry is None and name.startswith(("npu_", "_npu_")):
        entry = {"source": "npu"}
    return name, entry


@cache
def _table() -> dict:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@cache
def _entries() -> dict[str, dict]:
    return {op: entry for entry in _table()["entry"] for op in entry["ops"]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.plan.op_costs", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="with the .phases files of the processes")
    paths = sorted(parser.parse_args().folder.glob("*.phases"))
    if not paths:
        parser.error("the folder has no .phases files: run on simulated NPUs with FAKE_NPU_CALLS_DIR set to it")
    for path in paths:
        print(f"== process {path.stem}\n{report(by_phase(read_calls(path)))}")


if __name__ == "__main__":
    main()
