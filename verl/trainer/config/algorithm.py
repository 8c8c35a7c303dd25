"""Config of advantage estimation, KL control and rollout correction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.workers.config.actor import KL_TYPES
from verl.workers.config.keys import Idle, Section, Values, above, beside, key, one_of

LEVELS = ("token", "sequence", "geometric")
# What the estimators of this repository read; those of a user may read any key.
_DIVIDE_BY_STD = ("grpo", "grpo_vectorized", "grpo_passk")
_BASELINES = ("rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline")
_SMALL_SHARE = Values("expected above 0 and below 1, as 1e-4", lambda value: 0 < value < 1)
_FIXED = beside("type", "fixed")
_NO_FILTER = beside("enable", False)
_NO_REJECTION = beside("rollout_rs", None)
_NO_THRESHOLD = Idle(
    "{where} has no rollout_is",
    lambda run, own: not own.rollout_is and not (own.rollout_rs and own.rollout_rs_threshold is None),
)
_NOT_GDPO = Idle(
    "only the estimator gdpo has it",
    lambda run, own: own.adv_estimator in (*_DIVIDE_BY_STD, *_BASELINES, "reinforce_plus_plus"),
)
_NO_DISCOUNT = Idle(
    "the estimator discounts nothing", lambda run, own: own.adv_estimator in (*_DIVIDE_BY_STD, *_BASELINES, "gdpo")
)
_NOT_GRPO = Idle(
    "the estimator is none of GRPO's",
    lambda run, own: own.adv_estimator in (*_BASELINES, "reinforce_plus_plus", "gdpo"),
)


@dataclass(frozen=True)
class KLControlConfig(Section):
    """The coefficient of the KL penalty in the reward."""

    #: ``fixed`` keeps the coefficient; ``adaptive`` changes it so that the KL stays near ``target_kl``.
    type: str = key("fixed", one_of("fixed", "adaptive"))
    kl_coef: float = 0.001  #: the coefficient; ``adaptive`` starts from it.
    #: number of samples over which ``adaptive`` corrects the coefficient; a larger value corrects more slowly.
    horizon: int = key(10000, _FIXED)
    target_kl: float = key(0.1, _FIXED)  #: mean KL per token that ``adaptive`` aims at.

    def contradictions(self, where: str) -> Iterator[str]:
        if self.type == "adaptive" and (self.target_kl <= 0 or self.horizon <= 0):
            yield f"{where}.target_kl {self.target_kl} and horizon {self.horizon} must be above 0"


@dataclass(frozen=True)
class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO, arXiv 2503.14476): only prompts whose samples differ are trained on."""

    enable: bool = False  #: generate until ``data.train_batch_size`` prompts have passed the filter.
    #: what must vary within a group: a part of the reward by its name, or ``seq_reward``, the sum of a sample's rewards
    #: with the overlong penalty.
    metric: str | None = key(None, _NO_FILTER)
    #: a function ``(config, group) -> bool`` in place of ``metric``, as ``package.module.name`` or ``file.py:name``.
    filter_path: str | None = key(None, _NO_FILTER)
    #: score groups as they end, and abort the rest when enough of them have passed, as slime does; the groups that are
    #: trained on are then the shorter ones of ``data.gen_batch_size``.
    stop_early: bool = key(False, _NO_FILTER)
    #: the most generations of one step, after which the run ends with an error; 0 means no limit.
    max_num_gen_batches: int = key(0, Values("give a number, or 0 for no limit", lambda value: value >= 0), _NO_FILTER)

    def contradictions(self, where: str) -> Iterator[str]:
        if self.stop_early and not self.enable:
            yield f"{where}.stop_early is True and {where}.enable False: no groups are chosen; set enable=True"
        if self.enable and (self.metric is None) == (self.filter_path is None):
            given = "both are given" if self.metric else "neither is given"
            yield f"{where}.enable is True; give one of {where}.metric and {where}.filter_path ({given})"


@dataclass(frozen=True)
class RolloutCorrectionSection(Section):
    """Importance sampling and rejection by exp(old_log_prob - rollout_log_prob)."""

    #: level of the importance weights: ``token``, ``sequence`` (the product of its tokens' ratios) or ``geometric``
    #: (their geometric mean); absent means no weights.
    rollout_is: str | None = key(None, one_of(*LEVELS))
    #: upper bound of the weights; larger ones are cut to it.
    rollout_is_threshold: float = key(2.0, above(0), _NO_THRESHOLD)
    #: level at which tokens or sequences outside of [lower, upper] are rejected, that is left out of the loss; absent
    #: means that none is.
    rollout_rs: str | None = key(None, one_of(*LEVELS))
    #: the upper bound of rejection; absent means ``rollout_is_threshold``.
    rollout_rs_threshold: float | None = key(None, above(0), _NO_REJECTION)
    #: the lower bound of rejection; absent means 1 / upper, 0 means no lower bound.
    rollout_rs_threshold_lower: float | None = key(None, _NO_REJECTION)
    #: reject a whole sequence if the ratio of one of its tokens is below this; absent means never.
    rollout_token_veto_threshold: float | None = key(None, _SMALL_SHARE)
    bypass_mode: bool = False  #: use the rollout's log-probs as the old ones, so that no pass computes others.
    rollout_is_batch_normalize: bool = False  #: divide the weights by their mean over the batch.

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

    def contradictions(self, where: str) -> Iterator[str]:
        if self.rs_upper > 0 and not 0 <= self.rs_lower <= self.rs_upper:
            yield (
                f"{where}.rollout_rs_threshold_lower is {self.rs_lower:g}; it must lie between 0 (no lower bound) and "
                f"the upper threshold {self.rs_upper:g}"
            )
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            yield f"{where}.rollout_is_batch_normalize is True, but {where}.rollout_is is empty: no weights"
        if self.bypass_mode and self.is_on:
            yield (
                f"{where}.bypass_mode is True, so old and rollout log-probs are the same and every ratio is 1; take "
                "out rollout_is, rollout_rs and rollout_token_veto_threshold, or set bypass_mode=False"
            )


@dataclass(frozen=True)
class AlgorithmSection(Section):
    """The advantage estimator and its constants."""

    adv_estimator: str = "grpo"  #: registered name of the function that turns rewards into advantages.
    gamma: float = key(1.0, _NO_DISCOUNT)  #: discount per token in the returns of ``reinforce_plus_plus``.
    #: GRPO divides by the standard deviation of the group; False gives Dr. GRPO.
    norm_adv_by_std_in_grpo: bool = key(True, _NOT_GRPO)
    #: subtract the KL to the reference policy from the reward of every token; each step then computes old and reference
    #: log-probs.
    use_kl_in_reward: bool = False
    #: estimator of that KL; ``k1`` equals ``kl``, ``k2`` equals ``mse``, ``k3`` equals ``low_var_kl``.
    kl_penalty: str = key("kl", one_of(*KL_TYPES), beside("use_kl_in_reward", False))
    kl_ctrl: KLControlConfig = key(KLControlConfig, beside("use_kl_in_reward", False))
    #: the parts of the reward, by name, that ``gdpo`` normalises one by one.
    gdpo_reward_keys: list[str] = key(list, _NOT_GDPO)
    filter_groups: FilterGroupsConfig = key(FilterGroupsConfig)
    rollout_correction: RolloutCorrectionSection = key(RolloutCorrectionSection)

    def contradictions(self, where: str) -> Iterator[str]:
        if self.adv_estimator == "gdpo" and not self.gdpo_reward_keys:
            yield f"{where}.gdpo_reward_keys is empty; name the parts of the reward that gdpo normalises"
        if self.adv_estimator == "gdpo" and self.use_kl_in_reward:
            yield f"{where}.use_kl_in_reward is True, but gdpo reads only the parts of the reward; use a KL loss"


@dataclass(frozen=True)
class AlgoConfig(AlgorithmSection):
    """Upstream's class, the ``config`` of a user's advantage estimator: the section ``algorithm``, and GAE's lambda."""

    lam: float = 1.0
