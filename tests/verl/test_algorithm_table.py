"""Every config line of the page's table of algorithms, and of the benchmark's, is one that can be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.workshop.bench.algorithms import ALGORITHMS
from verl.trainer.config import load_config, validate_config
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

ROOT = Path(__file__).resolve().parents[2]
RECIPE_CONFIGS = ROOT / "recipes" / "r1_zero" / "config"


def _lines() -> dict[str, list[str]]:
    """Row of the table -> its overrides, with the prefix that the page leaves out."""
    section = (ROOT / "docs" / "algorithms.md").read_text().split("\n## Table\n")[1].split("\n## ")[0]
    found = {}
    for row in re.findall(r"^\| (?!algorithm|-{3})(.+) \|$", section, re.MULTILINE):
        name, *_, config = row.split(" | ")
        overrides = [part for span in re.findall(r"`([^`]+)`", config) for part in span.split() if "=" in part]
        found[name] = [re.sub(r"^(actor|rollout)\.", r"actor_rollout_ref.\1.", part) for part in overrides]
    return found


LINES = _lines()


def _problems(overrides: list[str]) -> list[str]:
    config = load_config(
        ["data.max_response_length=4096", *overrides], config_name="r1_zero_tiny", config_dir=RECIPE_CONFIGS
    )
    get_adv_estimator_fn(config.algorithm.adv_estimator)
    get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    ours = (
        "algorithm",
        "policy_loss",
        "clip_ratio",
        "kl_",
        "tau_",
        "entropy",
        "overlong",
        "loss_agg_mode",
        "replay",
        "gen_batch",
    )
    return [problem for problem in validate_config(config) if any(key in problem for key in ours)]


def test_the_table_is_found() -> None:
    assert len(LINES) == 31
    assert sum(bool(overrides) for overrides in LINES.values()) == 30


@pytest.mark.parametrize("name", LINES)
def test_lines_of_the_table_are_accepted(name: str) -> None:
    needs = ["actor_rollout_ref.rollout.enable_rollout_routing_replay=True"] if "R3" in name else []
    assert _problems([*needs, *LINES[name]]) == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_lines_of_the_benchmark_are_accepted(name: str) -> None:
    assert _problems([*ALGORITHMS[name]]) == []
