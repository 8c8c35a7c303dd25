"""Upstream's config classes and small tools as a caller's code uses them, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from verl import DataProto
from verl.trainer.config import AlgoConfig, KLControlConfig, RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.metric_utils import compute_data_metrics, reduce_metrics
from verl.utils import omega_conf_to_dataclass
from verl.utils.attention_utils import index_first_axis, pad_input, unpad_input
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.logger import DecoratorLoggerBase, log_with_rank, print_rank_0, print_with_rank
from verl.utils.profiler import DistProfiler, mark_annotate, mark_end_range, mark_start_range
from verl.utils.rollout_skip import RolloutSkip
from verl.utils.tracking import Tracking

ALGORITHM = {
    "_target_": "verl.trainer.config.AlgoConfig",
    "gamma": 0.99,
    "lam": 0.95,
    "adv_estimator": "gae",
    "kl_ctrl": {"_target_": "verl.trainer.config.KLControlConfig", "type": "adaptive", "horizon": 5000},
    "use_pf_ppo": True,
    "pf_ppo": {"reweight_method": "max_min", "weight_pow": 3.0},
}


@pytest.mark.parametrize("dataclass_type", [None, AlgoConfig])
def test_the_algorithms_config_is_a_frozen_mapping(dataclass_type: type | None) -> None:
    config = omega_conf_to_dataclass(OmegaConf.create(ALGORITHM), dataclass_type)
    assert isinstance(config, AlgoConfig) and isinstance(config.kl_ctrl, KLControlConfig)
    assert (config.gamma, config["lam"], config.get("kl_penalty"), config.get("absent", 7)) == (0.99, 0.95, "kl", 7)
    assert config.kl_ctrl.horizon == 5000 and config.pf_ppo.get("weight_pow") == 3.0
    assert "gamma" in config and "absent" not in config and dict(config)["use_pf_ppo"] is True
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.gamma = 1.0
    assert AlgoConfig().adv_estimator == "gae" and AlgoConfig().rollout_correction is None


def test_an_estimator_takes_the_config() -> None:
    ones = torch.ones(1, 2)
    config = AlgoConfig(gamma=0.5, lam=1.0)
    _, returns = core_algos.compute_gae_advantage_return(ones, torch.zeros(1, 2), ones, config.gamma, config.lam)
    assert returns.tolist() == [[1.5, 1.0]]
    _, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(ones, ones, config=config)
    assert returns.tolist() == [[1.5, 1.0]]


@pytest.mark.parametrize(
    ("preset", "given"),
    [
        (RolloutCorrectionConfig.decoupled_token_is(), {"rollout_is": "token"}),
        (RolloutCorrectionConfig.decoupled_seq_is(3.0), {"rollout_is": "sequence", "rollout_is_threshold": 3.0}),
        (
            RolloutCorrectionConfig.decoupled_seq_is_rs(rs_threshold=4.0),
            {"rollout_is": "sequence", "rollout_rs": "sequence", "rollout_rs_threshold": 4.0},
        ),
        (
            RolloutCorrectionConfig.decoupled_geo_rs(),
            {
                "rollout_is": None,
                "rollout_rs": "geometric",
                "rollout_rs_threshold": 1.001,
                "rollout_token_veto_threshold": 1e-4,
            },
        ),
        (RolloutCorrectionConfig.ppo_is_bypass(), {"rollout_is": "token", "bypass_mode": True}),
        (
            RolloutCorrectionConfig.pg_is(),
            {"rollout_is": "sequence", "bypass_mode": True, "use_policy_gradient": True},
        ),
        (
            RolloutCorrectionConfig.pg_rs(),
            {
                "rollout_is": None,
                "rollout_rs": "geometric",
                "rollout_rs_threshold": 1.001,
                "rollout_token_veto_threshold": 1e-4,
                "bypass_mode": True,
                "use_policy_gradient": True,
            },
        ),
        (RolloutCorrectionConfig.disabled(), {"rollout_is": None}),
    ],
)
def test_presets_of_the_rollout_correction(preset: RolloutCorrectionConfig, given: dict) -> None:
    assert preset == RolloutCorrectionConfig(**given)


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
    with pytest.warns(FutureWarning, match=r"verl\.utils\.metric\.reduce_metrics"):
        assert reduce_metrics({"loss": [1, 3], "max_x": [1, 3], "min_x": [1, 3]}) == {"loss": 2, "max_x": 3, "min_x": 1}


def test_debug_metrics_without_a_mask_count_every_token() -> None:
    log_probs = torch.log(torch.tensor([[0.5, 0.25]]))
    tensors = {"old_log_probs": log_probs, "rollout_log_probs": torch.log(torch.tensor([[0.4, 0.25]]))}
    metrics = calculate_debug_metrics(DataProto.from_dict({**tensors, "responses": torch.zeros(1, 2)}))
    assert metrics["training/rollout_probs_diff_valid"] == 1
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.05)


def test_rows_are_packed_and_padded_again() -> None:
    values = torch.arange(12.0).reshape(2, 3, 2)
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    tokens, indices, ends, longest, lengths = unpad_input(values, mask)
    assert tokens.tolist() == [[2, 3], [4, 5], [6, 7]] and indices.tolist() == [1, 2, 3]
    assert ends.tolist() == [0, 2, 3] and longest == 2 and lengths.tolist() == [2, 1]
    assert pad_input(tokens, indices, 2, 3).equal(values * mask[..., None])
    assert index_first_axis(values.flatten(0, 1), indices).equal(tokens)
    tokens, indices, _, _, lengths = unpad_input(values, mask, 1 - mask)
    assert len(tokens) == 6 and lengths.tolist() == [2, 1]


def test_lines_of_steps_and_ranks(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    Tracking("project", "experiment", "console").log({"loss": 0.5, "kl": 1}, step=3)
    print_rank_0("first")
    print_with_rank("second", rank=2)
    print_with_rank("hidden", rank=2, log_only_rank_0=True)
    DecoratorLoggerBase("actor").logging_function("loads")
    assert capsys.readouterr().out == "step:3 - loss:0.5 - kl:1\nfirst\n[Rank 2] second\nactor loads\n"
    with caplog.at_level(logging.INFO):
        log_with_rank("third", 1, logging.getLogger("test"))
        DecoratorLoggerBase("actor", logging.getLogger("test"), logging.INFO).logging_function("saves")
    assert [record.message for record in caplog.records] == ["[Rank 1] third", "actor saves"]


def test_ranges_are_in_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    @DistProfiler.annotate(color="red")
    @mark_annotate(message="annotated")
    def doubled(number: int) -> int:
        return 2 * number

    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")  # read once, and a later test asks that a recording prints nothing
    with torch.profiler.profile() as profile:
        mark = mark_start_range("between", color="red")
        assert doubled(2) == 4
        mark_end_range(mark)
    assert {"annotated", "between", "doubled"} <= {event.key for event in profile.key_averages()}


def test_a_rollout_that_is_skipped_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout={"n": 2, "skip_dump_dir": str(tmp_path)}),
        data={"train_batch_size": 4, "max_prompt_length": 8, "max_response_length": 8},
        trainer={"experiment_name": "run", "project_name": "project"},
    )
    workers = SimpleNamespace(generate_sequences=lambda batch: DataProto.from_dict({"x": torch.rand(4)}))
    RolloutSkip(config, workers).wrap_generate_sequences()
    first, second = workers.generate_sequences(None), workers.generate_sequences(None)
    assert first.batch["x"].equal(second.batch["x"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" /")[0] for line in lines] == [
        "[RolloutSkip()] Successfully dumped to",
        "[RolloutSkip()] Successfully loaded",
    ]
