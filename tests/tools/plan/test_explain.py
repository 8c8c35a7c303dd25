"""``--why-not`` names what stops a layout; ``--page`` shows the plan without scripts, with figures that parse."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from megatron.core.parallel_layout import RankCoords
from recipes.common.tiny_models import DEEPSEEK_V3 as TINY_DEEPSEEK
from tools.launch.first_plan import cpu_profile
from tools.plan.__main__ import main
from tools.plan.devices import GIB
from tools.plan.exit_status import BAD_INPUT, DOES_NOT_FIT, FITS
from tools.plan.figures import OTHER, memory_svg
from tools.plan.rank_plan import RankPlan
from tools.plan.worker import PhaseMemory

ENGINE = "actor_rollout_ref.actor.megatron"
SMALL = (
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=2",
)

BESIDE = (
    "trainer.schedule=fully_async",
    "actor_rollout_ref.hybrid_engine=False",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
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
    page = tmp_path / "plan.html"
    assert plan(tmp_path, "--page", str(page)) == FITS
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    figures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(figures) >= 2
    names = {element.tag.rpartition("}")[2] for figure in figures for element in ET.fromstring(figure).iter()}
    assert names.isdisjoint({"script", "a", "image", "foreignObject", "animate", "set"})
    assert not re.search(r"(href|src)=\"(?!#)|url\((?!#)", text), "nothing from outside of the page"


def test_the_page_has_the_memory_of_every_phase_by_owner(tmp_path: Path) -> None:
    page, numbers = tmp_path / "plan.html", tmp_path / "plan.json"
    assert plan(tmp_path, "--page", str(page), "--output", str(numbers)) == FITS
    text = page.read_text(encoding="utf-8")
    assert "rank 0, fullest in" in text
    (stage,) = json.loads(numbers.read_text())["stages"]
    figure = text[text.index("<svg") : text.index("</svg>")]
    for phase in stage["phases"]:
        held, most, after = sum(phase["held"].values()), phase["peak_bytes"], phase["after_bytes"]
        assert f">{phase['name']}</text>" in figure
        assert f'<td>{phase["name"]}</td><td class="num">{most / GIB:.2f} {after / GIB:.2f}</td>' in text
        assert most - held >= 0, phase
        assert after - held < 0.02 * most + 1_000_000, phase
    of_update = next(phase["held"] for phase in stage["phases"] if phase["name"] == "update_actor")
    assert of_update["gradient"] > 0 and of_update["rollout weights"] == of_update["rollout kv_cache"] == 0
    assert ">gradient</text>" in figure and f">{OTHER}</text>" in figure


def test_ranks_that_only_generate_are_planned_beside_those_that_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, numbers = tmp_path / "plan.html", tmp_path / "plan.json"
    many = "actor_rollout_ref.rollout.num_gpu_blocks_override=400000"
    options = ("--page", str(page), "--output", str(numbers))
    assert plan(tmp_path, *BESIDE, many, *options, gib=6) == DOES_NOT_FIT
    found = json.loads(numbers.read_text())
    (problem,) = (text for text in found["problems"] if text.startswith("rank"))
    assert problem.startswith("rank 2 (rollout) needs 3.")
    training, rollout = found["stages"]
    phases = [[phase["name"] for phase in rank["phases"]] for rank in (training, rollout)]
    assert (training["stage"], rollout["stage"], rollout["rank"], found["num_devices"]) == (0, "rollout", 2, 3)
    assert "update_actor" in phases[0] and "decode" not in phases[0]
    assert phases[1] == ["weight_sync", "update_weights", "decode", "prefill"]
    assert rollout["device_state"]["rollout kv_cache"] > 0 and "rollout kv_cache" not in training["device_state"]
    assert training["weight_sync"]["sent"] > 0 == training["weight_sync"]["received"]
    assert rollout["weight_sync"]["received"] > 0 == rollout["weight_sync"]["sent"]
    assert page.read_text().count("fullest in") == 2
    capsys.readouterr()
    assert plan(tmp_path, *BESIDE, "--search") == BAD_INPUT
    assert "for schedule=sync alone" in capsys.readouterr().out


def test_a_bar_is_as_high_as_what_lies_there(monkeypatch: pytest.MonkeyPatch) -> None:
    tops: dict[str, float] = {}

    def bar(axes: Axes, names: list[str], sizes: np.ndarray, *, bottom: np.ndarray, **how: object) -> None:
        tops.update(zip(names, (sizes + bottom).tolist(), strict=True))

    monkeypatch.setattr("matplotlib.axes.Axes.bar", bar)
    phases = (PhaseMemory("a", 0, 5 << 30, 0, {"x": 1 << 30, "x copy": 2 << 30}), PhaseMemory("b", 0, 9 << 30, 0))
    memory_svg(RankPlan(0, RankCoords(*[0] * 7), 1, {}, {}, phases, (), {}), 10 << 30)
    assert tops == {"a": 5.0, "b": 9.0}


@pytest.mark.parametrize(
    "name",
    [
        "r1_zero_tiny",
        "math_lighteval_tiny",  # whose last micro-batch has fewer rows
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gsm8k_tiny", "dapo_qwen3_moe_tiny", "r1_dynamic_sampling_tiny", "cann_random_init_tiny")
        ),
    ],
)
def test_the_default_runs_are_planned_by_their_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model or a device: the recipes' tiny model on CPUs."""
    assert main([name, "--brief"]) == FITS
    assert capsys.readouterr().out.startswith("plan: fits on 2 x CPU core;")


def test_nothing_to_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["r1_zero_tiny", "--device", "abacus"]) == BAD_INPUT
    assert "known devices" in capsys.readouterr().out
