"""What a step computes on the controller: KL in the reward, and advantages."""

from __future__ import annotations

import inspect
from typing import Any

from verl.protocol import DataProto
from verl.trainer.config.algorithm import AlgorithmSection
from verl.trainer.ppo.algos import AdvantageEstimator, get_adv_estimator_fn
from verl.trainer.ppo.kl import AdaptiveKLController, FixedKLController
from verl.trainer.ppo.kl import kl_penalty as kl_estimate
from verl.trainer.ppo.scores import reward_parts
from verl.utils.masks import selected


def apply_kl_penalty(
    data: DataProto, kl_ctrl: AdaptiveKLController | FixedKLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """token_level_rewards = token_level_scores - coefficient * KL per token; steers the coefficient afterwards.

    The metrics are the KL (mean over the tokens of a response, then over responses) and the coefficient that was used.
    """
    mask = data.batch["response_mask"].float()
    old, ref = (selected(data.batch[name], mask) for name in ("old_log_probs", "ref_log_prob"))
    kl = kl_estimate(old, ref, kl_penalty) * mask
    coefficient = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - coefficient * kl
    current = float((kl.sum(-1) / mask.sum(-1).clamp(min=1)).mean())
    kl_ctrl.update(current_kl=current, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": coefficient}


def compute_advantage(
    data: DataProto,
    adv_estimator: AdvantageEstimator | str,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgorithmSection | None = None,
) -> DataProto:
    """Adds ``advantages`` and ``returns`` [B, R]; a pure function of the rewards and the prompt groups (``uid``).

    The estimator gets those of the arguments that it names: the columns ``token_level_rewards``, ``response_mask``,
    ``values`` and ``reward_baselines``, and ``index`` (``uid``), ``gamma``, ``lam``, ``norm_adv_by_std_in_grpo`` and
    ``config``; and ``reward_parts``, the parts of the reward by name, float [B] each.
    """
    columns = data.batch
    given: dict[str, Any] = {
        "token_level_rewards": columns["token_level_rewards"],
        "response_mask": columns["response_mask"].float(),
        "config": AlgorithmSection() if config is None else config,
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
    }
    given |= {name: columns[name] for name in ("values", "reward_baselines") if name in columns}
    given |= {"index": data.non_tensor_batch["uid"]} if "uid" in data.non_tensor_batch else {}
    estimate = get_adv_estimator_fn(adv_estimator)
    parameters = inspect.signature(estimate).parameters
    if "reward_parts" in parameters:
        given["reward_parts"] = reward_parts(data)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {name: value for name, value in given.items() if name in parameters}
    columns["advantages"], columns["returns"] = estimate(**given)
    return data
