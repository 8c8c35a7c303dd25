"""docs/metrics.md has every metric that the code makes, and says truly where."""

from __future__ import annotations

import ast
import re

import numpy as np
import torch

from tests.pages import ROOT, functions_of, metric_rows, missing_references, undocumented
from third_party.jemalloc.stats import MemoryStats
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionSection
from verl.trainer.ppo import metric_utils
from verl.trainer.ppo.rollout_correction import PREFIX, corrections

GROUPS = (
    "schedule|actor|critic|timing_s|timing_per_token_ms|perf|training|train|response_length|prompt_length|val|val-core|"
    "reward"
)


def test_every_place_that_is_named_is_there() -> None:
    assert metric_rows()
    assert missing_references(ROOT / "docs" / "metrics.md") == []


def test_no_metric_is_written_twice() -> None:
    names = [name for name, _ in metric_rows()]
    assert len(names) == len(set(names))


def test_the_code_has_no_other_names() -> None:
    """Every text of the RL system that has the form of a metric's name."""
    name = re.compile(rf"(?:{GROUPS})/[\w@/-]+")
    texts = set()
    for path in (ROOT / "verl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and name.fullmatch(node.value):
                texts.add(node.value)
    assert len(texts) > 20
    whole = {text for text in texts if not text.endswith(("/", "_"))}  # the others are beginnings of names
    assert [text for text in undocumented(whole) if undocumented([f"{text}/mean"])] == []


def test_phases_are_those_of_the_code() -> None:
    timed = set()
    for path in (ROOT / "verl").rglob("*.py"):
        timed |= set(re.findall(r'marked_timer\("(\w+)"', path.read_text(encoding="utf-8")))
    assert timed and undocumented(f"timing_s/{phase}" for phase in timed) == []


def test_a_name_stands_in_the_function_that_is_said_to_compute_it() -> None:
    for written, place in metric_rows():
        path, _, function = place.partition(":")
        last = re.split(r"[/_]?[<{]", written.rstrip(">}"))[0].split("/")[-1]
        if "<" not in written and "{" not in written and last not in ("load_balancing_loss", "z_loss"):
            source = functions_of(path)[function]
            known = written in source or f'"{last}"' in source or last.startswith("seq_")
            assert known, f"{written} is not in {place}"


def test_metrics_of_a_batch_are_there() -> None:
    mask = torch.ones(4, 3, dtype=torch.int64)
    ones = torch.ones(4, 3)
    columns = dict.fromkeys(("token_level_scores", "token_level_rewards", "advantages", "returns", "responses"), ones)
    batch = DataProto.from_dict(tensors={**columns, "response_mask": mask, "num_tokens": torch.full((4,), 5)})
    timing = dict.fromkeys(("step", "gen", "old_log_prob", "ref", "adv", "update_actor"), 1.0)
    parts = {name: np.ones(4) for name in ("score", "accuracy", "format", "ungraded", "timeout", "grader_error")}
    sources, lengths = np.array(["openai/gsm8k", "code"] * 2, dtype=object), mask.sum(-1)
    made = {
        **metric_utils.compute_data_metrics(batch),
        **metric_utils.add_generation_times({0: 1.0, 2: 3.0}, timing),
        **metric_utils.compute_timing_metrics(batch, timing),
        **metric_utils.compute_throughout_metrics(batch, timing, 2),
        **metric_utils.compute_reward_metrics(parts, "reward"),
        **metric_utils.compute_validation_metrics(sources, parts, lengths, 8),
        **metric_utils.compute_set_metrics(np.array(["a", "b"] * 2, dtype=object), parts, lengths),
    }
    assert len(made) > 40 and undocumented(made) == []


def test_metrics_of_a_rollout_correction_are_there() -> None:
    config = RolloutCorrectionSection(rollout_is="token", rollout_rs="sequence", rollout_token_veto_threshold=1e-4)
    zeros = torch.zeros(2, 3)
    _, _, made = corrections(zeros, zeros, torch.ones(2, 3), config)
    assert undocumented(made) == []
    rows = [name.removeprefix(PREFIX).strip("{}") for name, _ in metric_rows() if name.startswith(PREFIX)]
    assert sorted(PREFIX + name for row in rows for name in row.split(",")) == sorted(made)


def test_the_host_allocator_s_numbers_are_there() -> None:
    assert undocumented(f"perf/jemalloc_{name}_gb" for name in MemoryStats.__annotations__) == []


def test_an_unknown_metric_is_told() -> None:
    assert undocumented(["actor/pg_loss", "actor/typo", "step", "perf/jemalloc_x_gb"]) == [
        "actor/typo",
        "perf/jemalloc_x_gb",
    ]
