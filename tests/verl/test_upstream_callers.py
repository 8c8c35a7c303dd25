"""Upstream's config classes and small tools as a caller's code uses them, against numbers worked out by hand."""

from __future__ import annotations

import torch

from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos


def test_an_estimator_takes_the_config() -> None:
    ones = torch.ones(1, 2)
    config = AlgoConfig(gamma=0.5, lam=1.0)
    _, returns = core_algos.compute_gae_advantage_return(ones, torch.zeros(1, 2), ones, config.gamma, config.lam)
    assert returns.tolist() == [[1.5, 1.0]]
    _, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(ones, ones, config=config)
    assert returns.tolist() == [[1.5, 1.0]]
