"""Upstream's config classes and small tools as a caller's code uses them, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.utils.profiler import DistProfiler, mark_annotate
from verl.utils.tracking import Tracking


def test_an_estimator_takes_the_config() -> None:
    ones = torch.ones(1, 2)
    config = AlgoConfig(gamma=0.5, lam=1.0)
    _, returns = core_algos.compute_gae_advantage_return(ones, torch.zeros(1, 2), ones, config.gamma, config.lam)
    assert returns.tolist() == [[1.5, 1.0]]
    _, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(ones, ones, config=config)
    assert returns.tolist() == [[1.5, 1.0]]


def test_metrics_of_a_batch_in_upstreams_form() -> None:
    """Three rows of 3 + 2 tokens: a full one, a shorter one, and one whose response was aborted."""
    attention = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 0, 1, 0, 0]])
    scores = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]])
    batch = DataProto.from_dict(
        {"responses": torch.zeros(3, 2), "attention_mask": attention, "token_level_scores": scores},
        {"__num_turns__": [2, 4, 3]},
    )
    metrics = compute_data_metrics(batch)
    assert metrics["prompt_length/mean"] == 2.0 and metrics["prompt_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["response_length/mean"] == 1.0 and metrics["response/aborted_ratio"] == pytest.approx(1 / 3)
    assert metrics["response_length_non_aborted/mean"] == 1.5
    assert metrics["response_length_non_aborted/clip_ratio"] == 0.5
    assert (metrics["num_turns/min"], metrics["num_turns/max"], metrics["num_turns/mean"]) == (2, 4, 3)


def test_lines_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    Tracking("project", "experiment", "console").log({"loss": 0.5, "kl": 1}, step=3)
    assert capsys.readouterr().out == "step:3 - loss:0.5 - kl:1\n"


def test_ranges_are_in_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    @DistProfiler.annotate(color="red")
    @mark_annotate(message="annotated")
    def doubled(number: int) -> int:
        return 2 * number

    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")  # read once, and a later test asks that a recording prints nothing
    with torch.profiler.profile() as profile:
        assert doubled(2) == 4
    assert {"annotated", "doubled"} <= {event.key for event in profile.key_averages()}
