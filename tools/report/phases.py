"""Where a run's time went: a mean step, the phases within it, and what is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.report.run_data import RunData

STEP, GENERATION = "step", "generate_sequences"
# In the order in which they happen; a phase that is not named here comes last.
_IN_STEP = ("gen", "old_log_prob", "ref", "reward", "save_rollouts", "adv", "log_samples", "update_actor")
_WITHIN = {"gen": ("update_weights", GENERATION), GENERATION: ("generation_timing/min",)}
_BETWEEN = ("testing", "save_checkpoint")
_SAME = "generation_timing/max"  # as generate_sequences
_OF_SAMPLES = ("decode/", "environment/", "waiting/")  # parts of a sample's time, which overlap those of others
LABELS = {"generation_timing/min": "the fastest replica"}
REST = "anything else"


@dataclass(frozen=True)
class Phase:
    """A phase of a mean step, or what is beside it.

    depth: how many phases contain it; 0 for the step and what is beside it · start_s: where it begins, one phase put
    after the other · seconds: the mean over all training steps, and over the steps that had it of what is beside
    them · num_steps: how many steps had it.
    """

    name: str
    depth: int
    start_s: float
    seconds: float
    num_steps: int


def phases(run: RunData) -> list[Phase]:
    """The step, its phases in order, each before those within it, and then what is beside it."""
    names = {name.removeprefix("timing_s/") for row in run.metrics for name in row if name.startswith("timing_s/")}
    names = {name for name in names - {_SAME} if not name.startswith(_OF_SAMPLES)}
    of_all = {name: [value for _, value in run.series(f"timing_s/{name}")] for name in names}
    measured = {name: values for name, values in of_all.items() if values}
    beside = list(_BETWEEN)
    if any(name.startswith("schedule/") for row in run.metrics for name in row):
        beside.insert(0, GENERATION)  # ranks of their own generate while the others train
    found = list(_in_step(measured, beside)) if STEP in measured else []
    return found + [
        Phase(name, 0, 0.0, _mean(measured[name]), len(measured[name])) for name in beside if name in measured
    ]


def _in_step(measured: dict[str, list[float]], beside: list[str]) -> Iterator[Phase]:
    num_steps, within = len(measured[STEP]), {name for children in _WITHIN.values() for name in children}
    others = sorted(measured.keys() - {STEP, *_IN_STEP, *within, *beside})
    whole = _mean(measured[STEP])

    def add(children: tuple[str, ...], depth: int, start_s: float) -> Iterator[Phase]:
        for name in children:
            if name in measured and name not in beside:
                seconds = sum(measured[name]) / num_steps
                yield Phase(name, depth, start_s, seconds, len(measured[name]))
                yield from add(_WITHIN.get(name, ()), depth + 1, start_s)
                start_s += seconds

    yield Phase(STEP, 0, 0.0, whole, num_steps)
    parts = list(add((*_IN_STEP, *others), 1, 0.0))
    yield from parts
    known = sum(part.seconds for part in parts if part.depth == 1)
    if parts and whole - known > 0.005 * whole:
        yield Phase(REST, 1, known, whole - known, num_steps)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
