"""The pins of the stacks: each names every package of the other, and its constraints hold every pin."""

from __future__ import annotations

import re

import pytest

from tools.doctor.finding import Stack, load_table
from tools.doctor.host import ROOT, pinned

# Why these differ is said in requirements/cann82/base.txt.
DIFFERENT = {"torch", "transformers", "tensordict", "numpy", "pyarrow"}


def test_the_stacks_pin_the_same_packages_and_only_a_few_at_other_versions() -> None:
    first, second = (pinned(ROOT / stack.requirements / "base.txt") for stack in load_table()[0])
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} == DIFFERENT
    text = (ROOT / "requirements/cann82/base.txt").read_text(encoding="utf-8")
    comment = " ".join(line for line in text.splitlines() if line.startswith("#"))
    assert all(re.search(rf"\b{name}\b", comment) for name in DIFFERENT)


@pytest.mark.parametrize("stack", load_table()[0], ids=lambda stack: stack.name)
def test_constraints_hold_every_pin(stack: Stack) -> None:
    folder = ROOT / stack.requirements
    constraints = pinned(folder / "constraints.txt")
    for file in (folder / "base.txt", folder / "npu.txt", ROOT / "requirements/dev.txt"):
        pins = {name: version for name, version in pinned(file).items() if not name.startswith("torch")}
        assert pins.items() <= constraints.items(), file
