"""Config of advantage estimation, KL control and rollout correction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from verl.workers.config.actor import KL_TYPES
from verl.workers.config.values import Section, Values, above, one_of

LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class KLControlConfig(Section):
    """The coefficient of the KL penalty in the reward.

    Attributes:
        type: ``fixed`` keeps the coefficient; ``adaptive`` changes it so that the KL stays near ``target_kl``.
        kl_coef: the coefficient; ``adaptive`` starts from it.
        horizon: number of samples over which ``adaptive`` corrects the coefficient; a larger value corrects more
            slowly.
        target_kl: mean KL per token that ``adaptive`` aims at.
    """

    VALUES: ClassVar = {"type": one_of("fixed", "adaptive")}

    type: str = "fixed"
    kl_coef: float = 0.001
    horizon: int = 10000
    target_kl: float = 0.1

    def contradictions(self, where: str) -> list[str]:
        if self.type == "adaptive" and (self.target_kl <= 0 or self.horizon <= 0):
            return [f"{where}.target_kl {self.target_kl} and horizon {self.horizon} must be above 0"]
        return []


@dataclass(frozen=True)
class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO, arXiv 2503.14476): only prompts whose samples differ are trained on.

    Attributes:
        enable: generate until ``data.train_batch_size`` prompts have passed the filter.
        metric: what must vary within a group: a part of the reward by its name, or ``seq_reward``, the sum of a
            sample's rewards with the overlong penalty.
        filter_path: a function ``(config, group) -> bool`` in place of ``metric``, as ``package.module.name`` or
            ``file.py:name``.
        stop_early: score groups as they end, and abort the rest when enough of them have passed, as slime does; the
            groups that are trained on are then the shorter ones of ``data.gen_batch_size``.
        max_num_gen_batches: the most generations of one step, after which the run ends with an error; 0 means no limit.
    """

    VALUES: ClassVar = {"max_num_gen_batches": Values("give a number, or 0 for no limit", lambda value: value >= 0)}

    enable: bool = False
    metric: str | None = None
    filter_path: str | None = None
    stop_early: bool = False
    max_num_gen_batches: int = 0

    def contradictions(self, where: str) -> list[str]:
        if self.stop_early and not self.enable:
            return [f"{where}.stop_early is True and {where}.enable False: no groups are chosen; set enable=True"]
        if self.enable and (self.metric is None) == (self.filter_path is None):
            given = "both are given" if self.metric else "neither is given"
            return [f"{where}.enable is True; give one of {where}.metric and {where}.filter_path ({given})"]
        return []


@dataclass(frozen=True)
class RolloutCorrectionSection(Section):
    """Importance sampling and rejection by exp(old_log_prob - rollout_log_prob).

    Attributes:
        rollout_is: level of the importance weights: ``token``, ``sequence`` (the product of its tokens' ratios) or
            ``geometric`` (their geometric mean); absent means no weights.
        rollout_is_threshold: upper bound of the weights; larger ones are cut to it.
        rollout_rs: level at which tokens or sequences outside of [lower, upper] are rejected, that is left out of the
            loss; absent means that none is.
        rollout_rs_threshold: the upper bound of rejection; absent means ``rollout_is_threshold``.
        rollout_rs_threshold_lower: the lower bound of rejection; absent means 1 / upper, 0 means no lower bound.
        rollout_token_veto_threshold: reject a whole sequence if the ratio of one of its tokens is below this; absent
            means never.
        bypass_mode: use the rollout's log-probs as the old ones, so that no pass computes others.
        rollout_is_batch_normalize: divide the weights by their mean over the batch.
    """

    VALUES: ClassVar = {
        **dict.fromkeys(("rollout_is", "rollout_rs"), one_of(*LEVELS)),
        **dict.fromkeys(("rollout_is_threshold", "rollout_rs_threshold"), above(0)),
        "rollout_token_veto_threshold": Values("expected above 0 and below 1, as 1e-4", lambda value: 0 < value < 1),
    }

    rollout_is: str | None = None
    rollout_is_threshold: float = 2.0
    rollout_rs: str | None = None
    rollout_rs_threshold: float | None = None
    rollout_rs_threshold_lower: float | None = None
    rollout_token_veto_threshold: float | None = None
    bypass_mode: bool = False
    rollout_is_batch_normalize: bool = False

    @property
    def is_on(self) -> bool:
        return bool(self.rollout_is or self.rollout_rs or self.rollout_token_veto_threshold is not None)

    @property
    def needs_rollout_log_probs(self) -> bool:
        return self.is_on or self.bypass_mode

    @property
    def rs_upper(self) -> float:
        return self.rollout_is_threshold if self.rollout_rs_threshold is None else self.rollout_rs_threshold

    @property
    def rs_lower(self) -> float:
        return 1.0 / self.rs_upper if self.rollout_rs_threshold_lower is None else self.rollout_rs_threshold_lower

    def contradictions(self, where: str) -> list[str]:
        found = []
        if self.rs_upper > 0 and not 0 <= self.rs_lower <= self.rs_upper:
            found.append(
                f"{where}.rollout_rs_threshold_lower is {self.rs_lower:g}; it must lie between 0 (no lower bound) and "
                f"the upper threshold {self.rs_upper:g}"
            )
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            found.append(f"{where}.rollout_is_batch_normalize is True, but {where}.rollout_is is empty: no weights")
        if self.bypass_mode and self.is_on:
            found.append(
                f"{where}.bypass_mode is True, so old and rollout log-probs are the same and every ratio is 1; take "
                "out rollout_is, rollout_rs and rollout_token_veto_threshold, or set bypass_mode=False"
            )
        return found


@dataclass(frozen=True)
class AlgorithmSection(Section):
    """The advantage estimator and its constants.

    Attributes:
        adv_estimator: registered name of the function that turns rewards into advantages.
        gamma: discount per token in the returns of ``reinforce_plus_plus``.
        norm_adv_by_std_in_grpo: GRPO divides by the standard deviation of the group; False gives Dr. GRPO.
        use_kl_in_reward: subtract the KL to the reference policy from the reward of every token; each step then
            computes old and reference log-probs.
        kl_penalty: estimator of that KL; ``k1`` equals ``kl``, ``k2`` equals ``mse``, ``k3`` equals ``low_var_kl``.
    """

    VALUES: ClassVar = {"kl_penalty": one_of(*KL_TYPES)}

    adv_estimator: str = "grpo"
    gamma: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionSection = field(default_factory=RolloutCorrectionSection)


@dataclass(frozen=True)
class AlgoConfig(AlgorithmSection):
    """Upstream's class, the ``config`` of a user's advantage estimator: the section ``algorithm``, and GAE's lambda."""

    lam: float = 1.0
