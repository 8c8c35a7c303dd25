"""``--why-not`` names what stops a layout; ``--page`` shows the plan without scripts, with figures that parse."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest

from recipes.common.tiny_models import DEEPSEEK_V3 as TINY_DEEPSEEK
from tools.launch.first_plan import cpu_profile
from tools.plan.__main__ import main
from tools.plan.devices import GIB
from tools.plan.exit_status import BAD_INPUT, DOES_NOT_FIT, FITS
from tools.plan.figures import size_text

ENGINE = "actor_rollout_ref.actor.megatron"
SMALL = (
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=2",
)


def plan(tmp_path: Path, *options: str, gib: float = 16) -> int:
    model, device = tmp_path / "model", tmp_path / "device.toml"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(TINY_DEEPSEEK.config), encoding="utf-8")
    device.write_text(cpu_profile(int(gib * GIB), 2), encoding="utf-8")
    return main(["r1_zero_tiny", *SMALL, "--device", str(device), "--model", str(model), *options])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ((f"{ENGINE}.tensor_model_parallel_size=3",), ["world size 2 is not a multiple of TP 3"]),
        ((f"{ENGINE}.expert_model_parallel_size=3", "actor_rollout_ref.rollout.tensor_model_parallel_size=5"),
         ["EP 3", "tensor_model_parallel_size is 5"]),
        ((f"{ENGINE}.tensor_paralel=2",), ["tensor_model_parallel_size", "tensor_paralel"]),
    ],
)  # fmt: skip
def test_all_problems_of_a_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: Sequence[str], words: Sequence[str]
) -> None:
    assert plan(tmp_path, "--why-not", *changes) == DOES_NOT_FIT
    said = " ".join(capsys.readouterr().out.split())
    for word in words:
        assert word in said


def test_what_would_have_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, "--why-not", "actor_rollout_ref.rollout.n=2", gib=0.05) == DOES_NOT_FIT
    said = capsys.readouterr().out
    assert "It does not fit:" in said
    assert re.search(r"stage 0 in \w+: [\d.]+ GiB, [\d.]+ too much", said)


def test_a_layout_that_fits_is_compared_with_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, "--why-not", f"{ENGINE}.tensor_model_parallel_size=2") == FITS
    said = capsys.readouterr().out
    assert "It fits" in said
    assert "slower than the fastest" in said or "nothing that the search knows is faster" in said


def test_search_on_a_laptop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, "--search", "1") == FITS
    said = capsys.readouterr().out
    assert "Layouts, fastest first" in said
    assert "As overrides:" in said
    overrides = said.split("As overrides:\n")[1].split()
    capsys.readouterr()
    assert plan(tmp_path, *overrides, "--brief") == FITS


def test_the_page_parses_and_runs_nothing(tmp_path: Path) -> None:
    page, numbers = tmp_path / "plan.html", tmp_path / "plan.json"
    assert plan(tmp_path, "--page", str(page), "--output", str(numbers)) == FITS
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    figures = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(figures) >= 3
    names = {element.tag.rpartition("}")[2] for figure in figures for element in figure.iter()}
    assert names <= {"svg", "rect", "line", "text", "title", "g"}
    memory = next(figure for figure in figures if figure.get("aria-label") == "device memory by phase")
    titles = [element.text or "" for element in memory.iter() if element.tag.endswith("title")]
    phases = json.loads(numbers.read_text())["stages"][0]["phases"]
    assert [title.split(":")[0] for title in titles] == [phase["name"] for phase in phases]
    for title, phase in zip(titles, phases, strict=True):
        assert f"most {size_text(phase['peak_bytes'])}, after it {size_text(phase['after_bytes'])}" in title


def test_the_bars_by_owner_are_those_of_the_phases(tmp_path: Path) -> None:
    """Of the same device, which the page names: for each phase the owners and the rest add up to its most."""
    page, numbers = tmp_path / "plan.html", tmp_path / "plan.json"
    assert plan(tmp_path, "--page", str(page), "--output", str(numbers)) == FITS
    text = page.read_text(encoding="utf-8")
    figures = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    memory, holders = (
        next(figure for figure in figures if figure.get("aria-label") == f"device memory by {what}")
        for what in ("phase", "owner")
    )
    assert "<b>Device of rank 0</b>" in text and "rank 0, fullest in" in text
    phases = json.loads(numbers.read_text())["stages"][0]["phases"]
    tops, stacks = _tops(memory), _tops(holders)
    assert len(tops) == len(stacks) == len({*tops}) == len(phases)
    assert stacks == pytest.approx(tops, abs=0.3), "the same heights, in units of the figure"
    for phase in phases:
        held = sum(phase["held"].values())
        assert phase["peak_bytes"] - held >= 0, phase
        assert phase["after_bytes"] - held < 0.02 * phase["peak_bytes"] + 1_000_000, phase
    of_update = next(phase["held"] for phase in phases if phase["name"] == "update_actor")
    assert of_update["gradient"] > 0 and of_update["rollout weights"] == of_update["rollout kv_cache"] == 0


def _tops(figure: ET.Element) -> dict[float, float]:
    """Where the bar of each column ends above, by the left edge of the column."""
    found: dict[float, float] = {}
    for group in figure.iter("{http://www.w3.org/2000/svg}g"):
        for bar in group.iter("{http://www.w3.org/2000/svg}rect"):
            x, y = float(bar.attrib["x"]), float(bar.attrib["y"])
            found[x] = min(found.get(x, y), y)
    return found


def test_the_default_run_is_planned_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model or a device: the recipes' tiny model on CPUs."""
    assert main(["r1_zero_tiny", "--brief"]) == FITS
    assert capsys.readouterr().out.startswith("plan: fits on 2 x CPU core;")


def test_nothing_to_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["r1_zero_tiny", "--device", "abacus"]) == BAD_INPUT
    assert "known devices" in capsys.readouterr().out
