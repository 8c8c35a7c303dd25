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


def test_the_page_has_the_versions_of_the_stacks() -> None:
    page = (ROOT / "docs/installation.md").read_text(encoding="utf-8")
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    table = {row[0]: row[1:] for row in rows}
    for column, stack in enumerate(load_table()[0]):
        pins = pinned(ROOT / stack.requirements / "base.txt") | {"torch_npu": stack.torch_npu}
        for names in ("torch, torch_npu", "transformers, tensordict", "numpy, pyarrow"):
            assert table[names][column] == ", ".join(pins[name] for name in names.split(", "))
        assert table["CANN"][column].startswith(stack.cann) and table["driver and firmware"][column].startswith(
            stack.driver
        )
        assert table["pins"][column].rstrip("/") == stack.requirements
        dockerfile = (ROOT / "Dockerfile.vllm_ascend.mindspeed.deepseekV3").read_text(encoding="utf-8")
        assert f"FROM {table['image'][column]} AS {stack.name}\n" in dockerfile


@pytest.mark.parametrize("stack", load_table()[0], ids=lambda stack: stack.name)
def test_constraints_hold_every_pin(stack: Stack) -> None:
    folder = ROOT / stack.requirements
    constraints = pinned(folder / "constraints.txt")
    for file in (folder / "base.txt", folder / "npu.txt", ROOT / "requirements/dev.txt"):
        pins = {name: version for name, version in pinned(file).items() if not name.startswith("torch")}
        assert pins.items() <= constraints.items(), file


def test_a_gpu_gets_the_torch_of_every_other_run_and_never_its_cpu_build() -> None:
    folder = ROOT / "requirements"
    pins, text = pinned(folder / "cuda.txt"), (folder / "cuda.txt").read_text(encoding="utf-8")
    torch = pins.pop("torch")
    assert torch == pinned(folder / "base.txt")["torch"] and f"\ntorch=={torch},!={torch}+cpu\n" in text
    assert pins.items() <= pinned(folder / "constraints.txt").items()
