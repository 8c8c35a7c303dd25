"""Every algorithm learns: on the smallest task each reaches what GRPO reaches after 20 steps of two updates.

The policy is a table of logits, one per prompt, place and symbol; sampling, rewards and the optimizer are this file's,
advantages, corrections, filters and losses those of a run. ``tools.workshop.bench.algorithms`` does it with the
arithmetic task.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.verl.advantages import estimate_advantages
from verl.trainer.config import AlgoConfig
from verl.trainer.config.algorithm import RolloutCorrectionSection
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.trainer.ppo.filter_groups import varies
from verl.trainer.ppo.rollout_correction import corrections
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

PROMPTS, PLACES, SYMBOLS, SAMPLES, STEPS, UPDATES = 8, 3, 5, 16, 20, 2


@dataclass(frozen=True)
class Algorithm:
    """One line of the README's table; ``margin`` is how far below GRPO's score it may end."""

    estimator: str = "grpo"
    divides_by_std: bool = True
    actor: ActorConfig = field(default_factory=ActorConfig)
    correction: RolloutCorrectionSection = field(default_factory=RolloutCorrectionSection)
    filters: bool = False
    kl_in_reward: str | None = None
    margin: float = 0.01


def _loss(mode: str, **fields: float | str) -> ActorConfig:
    return ActorConfig(policy_loss=PolicyLossConfig(mode), **fields)  # type: ignore[arg-type]


ALGORITHMS = {
    "grpo": Algorithm(),
    "dr_grpo": Algorithm(divides_by_std=False, actor=ActorConfig(loss_agg_mode="seq-mean-token-sum-norm")),
    "dapo": Algorithm(actor=ActorConfig(clip_ratio_high=0.28), filters=True),
    "gspo": Algorithm(actor=_loss("gspo", loss_agg_mode="seq-mean-token-mean")),
    "cispo": Algorithm(actor=_loss("cispo", clip_ratio_low=1.0, clip_ratio_high=1.0)),
    # Its advantages are not divided by their spread, so that it slows down as rewards come close to each other.
    "gpg": Algorithm("gpg", actor=_loss("gpg"), margin=0.03),
    "clip_cov": Algorithm(actor=_loss("clip_cov")),
    "kl_cov": Algorithm(actor=_loss("kl_cov")),
    "geo_mean": Algorithm(actor=_loss("geo_mean", clip_ratio=0.4)),
    "opo": Algorithm("opo"),
    "kl loss k3+": Algorithm(actor=ActorConfig(use_kl_loss=True, kl_loss_type="k3+")),
    "rloo": Algorithm("rloo"),
    "reinforce++": Algorithm("reinforce_plus_plus"),
    "reinforce++ baseline": Algorithm("reinforce_plus_plus_baseline"),
    "tis": Algorithm(correction=RolloutCorrectionSection("token", 2.0)),
    "mis": Algorithm(correction=RolloutCorrectionSection("sequence", 2.0, "sequence", 2.0, 0.0)),
    "icepop": Algorithm(correction=RolloutCorrectionSection("token", 5.0, "token", 5.0, 0.5)),
    "geometric": Algorithm(correction=RolloutCorrectionSection(rollout_rs="geometric", rollout_rs_threshold=1.3)),
    "kl loss k3": Algorithm(actor=ActorConfig(use_kl_loss=True, kl_loss_type="low_var_kl")),
    "kl in reward k1": Algorithm(kl_in_reward="kl"),
    "entropy": Algorithm(actor=ActorConfig(entropy_coeff=0.001)),
}


def trained_score(algorithm: Algorithm, seed: int) -> float:
    """Chance of a right symbol after training, over prompts and places: a fifth before."""
    generator = torch.Generator().manual_seed(seed)
    right_PT = torch.randint(SYMBOLS, (PROMPTS, PLACES), generator=generator)
    logits = torch.zeros(PROMPTS, PLACES, SYMBOLS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    rows_B = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    for _ in range(STEPS):
        with torch.no_grad():
            # The rollout's numbers differ a little from the trainer's, as of a quantised engine.
            noise = 0.1 * torch.randn(logits.shape, generator=generator)
            rollout_BTV = (logits + noise).log_softmax(-1)[rows_B]
            picks_BT = torch.multinomial(rollout_BTV.exp().flatten(0, 1), 1, generator=generator).view(-1, PLACES)
            rollout_BT = rollout_BTV.gather(-1, picks_BT[..., None])[..., 0]
            old_BT = _log_probs(logits, rows_B, picks_BT)[0]
        _train(
            algorithm, optimizer, logits, rows_B, picks_BT, (picks_BT == right_PT[rows_B]).float(), old_BT, rollout_BT
        )
    return logits.detach().softmax(-1).gather(-1, right_PT[..., None]).mean().item()


def _train(
    algorithm: Algorithm,
    optimizer: torch.optim.Optimizer,
    logits: Tensor,
    rows_B: Tensor,
    picks_BT: Tensor,
    is_right_BT: Tensor,
    old_BT: Tensor,
    rollout_BT: Tensor,
) -> None:
    actor, mask_BT = algorithm.actor, torch.ones_like(old_BT)
    rewards_BT = torch.zeros_like(old_BT)
    rewards_BT[:, -1] = is_right_BT.mean(-1)
    reference_BT = torch.full_like(old_BT, 1 / SYMBOLS).log()
    scores_B = rewards_BT.sum(-1)
    if algorithm.kl_in_reward is not None:
        rewards_BT = rewards_BT - 0.001 * kl_penalty(old_BT, reference_BT, algorithm.kl_in_reward)
    if algorithm.filters:
        keeps_P = [varies(scores_B[rows_B == prompt].numpy()) for prompt in range(PROMPTS)]
        mask_BT = mask_BT * torch.tensor(keeps_P)[rows_B, None]
    config = AlgoConfig(norm_adv_by_std_in_grpo=algorithm.divides_by_std)
    advantages_BT, _ = estimate_advantages(algorithm.estimator, rewards_BT, mask_BT, rows_B, config)
    weights_BT, kept_BT, _ = corrections(old_BT, rollout_BT, mask_BT, algorithm.correction)
    policy_loss = get_policy_loss_fn(actor.policy_loss.loss_mode)
    for _ in range(UPDATES):
        new_BT, entropy_BT = _log_probs(logits, rows_B, picks_BT)
        loss, _ = policy_loss(
            old_BT, new_BT, advantages_BT, kept_BT, actor.loss_agg_mode, config=actor, rollout_is_weights=weights_BT
        )
        other_BT = -actor.entropy_coeff * entropy_BT
        if actor.use_kl_loss:
            other_BT = other_BT + actor.kl_loss_coef * kl_penalty(new_BT, reference_BT, actor.kl_loss_type)
        optimizer.zero_grad()
        (loss + agg_loss(other_BT, kept_BT, actor.loss_agg_mode)).backward()
        optimizer.step()


def _log_probs(logits: Tensor, rows_B: Tensor, picks_BT: Tensor) -> tuple[Tensor, Tensor]:
    log_BTV = logits.log_softmax(-1)[rows_B]
    return log_BTV.gather(-1, picks_BT[..., None])[..., 0], -(log_BTV.exp() * log_BTV).sum(-1)


@pytest.fixture(scope="module")
def of_grpo() -> float:
    return sum(trained_score(ALGORITHMS["grpo"], seed) for seed in range(4)) / 4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_reaches_what_grpo_reaches(name: str, of_grpo: float) -> None:
    score = sum(trained_score(ALGORITHMS[name], seed) for seed in range(4)) / 4
    assert of_grpo > 0.9
    assert score >= of_grpo - ALGORITHMS[name].margin
