"""For plug-ins alone: upstream's names of the algorithms.

Advantages are one family a file in ``algos``, policy losses one file each in ``policy_losses``, KL estimates in ``kl``,
aggregation in ``aggregation``; all are reached from here.
"""

# ruff: noqa: F401 - the imports are what this module is for

from __future__ import annotations

from verl.trainer.ppo.aggregation import agg_loss, token_loss_weights
from verl.trainer.ppo.algos import ESTIMATORS, AdvantageEstimator, get_adv_estimator_fn, register_adv_est
from verl.trainer.ppo.algos.baselines import (
    compute_gpg_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from verl.trainer.ppo.algos.gae import compute_gae_advantage_return
from verl.trainer.ppo.algos.grpo import (
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
)
from verl.trainer.ppo.algos.reinforce_plus_plus import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)
from verl.trainer.ppo.kl import (
    AdaptiveKLController,
    FixedKLController,
    get_kl_controller,
    kl_penalty,
    kl_penalty_forward,
)
from verl.trainer.ppo.policy_losses import LOSSES, PolicyLossFn, get_policy_loss_fn, register_policy_loss
from verl.trainer.ppo.policy_losses.cispo import compute_policy_loss_cispo
from verl.trainer.ppo.policy_losses.covariance import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from verl.trainer.ppo.policy_losses.geo_mean import compute_policy_loss_geo_mean
from verl.trainer.ppo.policy_losses.gpg import compute_policy_loss_gpg
from verl.trainer.ppo.policy_losses.gspo import compute_policy_loss_gspo
from verl.trainer.ppo.policy_losses.vanilla import compute_policy_loss_vanilla

ADV_ESTIMATOR_REGISTRY = ESTIMATORS.entries
POLICY_LOSS_REGISTRY = LOSSES.entries
