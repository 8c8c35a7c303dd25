"""`python -m tools.doctor --die`: what no simulator shows, found out on this machine's dies, a row each.

Every visible die has a process (die_ranks.py). The first one runs ops (die_ops.py), the last one a captured layer
(die_layer.py); then all of them exchange tokens of experts (die_experts.py) and what each group sends (die_groups.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tools.doctor.die_check import is_simulated
from tools.doctor.die_ranks import checks_alone, checks_together, run_ranks
from tools.doctor.finding import Finding
from vllm.platforms import resolve_platform

IF_WELL = "Everything is as expected of these dies."
IF_NOT = "Something is not as expected of these dies: see the problems above."
SIMULATED = "The dies are simulated: times are not judged."
WITHOUT_RESULT = "see the output of the ranks; the first row without a result is where they stopped"


def examine() -> list[Finding]:
    """A finding for every check; ValueError or ImportError where no die can be used."""
    num_dies = resolve_platform("npu").num_devices()
    return rows(num_dies, *run_ranks(num_dies))


def rows(num_dies: int, found: Mapping[str, Sequence[Finding]], ends: Sequence[str]) -> list[Finding]:
    """A finding for every check, from those of the ranks by name; ``ends``: how ranks ended that did not end well."""
    alone, together = checks_alone(0, 1), checks_together()
    missing = Finding("", f"no result: {'; '.join(ends)}", WITHOUT_RESULT, is_fatal=True)
    skipped = missing if num_dies > 1 else Finding("", "skipped: needs two dies")
    made = []
    for checks, without in ((alone, missing), (together, skipped)):
        for name in (check.name for check in checks):
            # The first rank's, unless another's is worse.
            of_ranks = found.get(name) or [replace(without, name=name)]
            made.append(max(of_ranks, key=lambda finding: (finding.is_fatal, bool(finding.remedy))))
    return made


def verdict(has_problem: bool) -> str:
    return "\n".join([IF_NOT if has_problem else IF_WELL, *([SIMULATED] if is_simulated() else [])])
