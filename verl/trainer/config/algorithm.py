"""Config of advantage estimation, KL control and rollout correction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from verl.workers.config.actor import KL_TYPES
from verl.workers.config.keys import Idle, Section, Values, beside, key, one_of

LEVELS = ("token", "sequence", "geometric")
# Statistics that rejection bounds; v0.6.1 named three of them by their level.
REJECTIONS = [f"{scope}_k{k}" for scope in ("token", "seq_sum", "seq_mean") for k in (1, 2, 3)]
REJECTIONS += ["seq_max_k2", "seq_max_k3"]
OF_LEVEL = dict(zip(LEVELS, ("token_k1", "seq_sum_k1", "seq_mean_k1"), strict=True))
# What the estimators of this repository read; those of a user may read any key.
_DIVIDE_BY_STD = ("grpo", "grpo_vectorized", "grpo_passk", "grpo_turns")
_BASELINES = ("rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline")
_SMALL_SHARE = Values("expected above 0 and below 1, as 1e-4", lambda value: 0 < value < 1)
_FIXED = beside("type", "fixed")
_NO_FILTER = beside("enable", False)
_NO_REJECTION = beside("rollout_rs", None)
_NO_WEIGHTS = Idle(
    "in bypass_mode only loss_type=reinforce has weights",
    lambda run, own: own.bypass_mode and own.loss_type != "reinforce",
)
_NO_THRESHOLD = Idle(
    "{where} has no weights",
    lambda run, own: not own.has_weights and not (own.rollout_rs and own.rollout_rs_threshold is None),
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


def _statistics(text: str) -> list[str]:
    """The statistics that ``rollout_rs`` names, by v0.9.0's names."""
    return [OF_LEVEL.get(name, name) for name in text.replace(" ", "").split(",")]


def bounds_of(text: object) -> list[tuple[float, ...]]:
    """The bounds of each entry: ``0.6_1.6,2.5`` has (0.6, 1.6) and (2.5,)."""
    return [tuple(float(number) for number in entry.split("_")) for entry in str(text).split(",")]


def _are_bounds(text: object, most: int = len(REJECTIONS)) -> bool:
    try:
        found = bounds_of(text)
    except ValueError:
        return False
    return len(found) <= most and all(len(entry) <= 2 and 0 <= entry[0] <= entry[-1] > 0 for entry in found)


_BOUNDS = Values("expected numbers above 0, or lower and upper bounds, as 0.6_1.6,2.5", _are_bounds)
_ONE_BOUND = Values("expected a number above 0, or two bounds, as 0.5_4.0", lambda value: _are_bounds(value, 1))
_REJECTED = Values(
    f"expected one of {', '.join(LEVELS)}, or a list out of {', '.join(REJECTIONS)}",
    lambda value: set(_statistics(value)) <= set(REJECTIONS),
)


@dataclass(frozen=True)
class RolloutCorrectionSection(Section):
    """Importance sampling and rejection by exp(old_log_prob - rollout_log_prob)."""

    #: level of the importance weights: ``token``, ``sequence`` (the product of its tokens' ratios) or ``geometric``
    #: (their geometric mean); absent means no weights.
    rollout_is: str | None = key(None, one_of(*LEVELS), _NO_WEIGHTS)
    #: upper bound of the weights; larger ones are cut to it. Two bounds, as ``0.5_4.0``, set weights outside to 0.
    rollout_is_threshold: str = key("2.0", _ONE_BOUND, _NO_THRESHOLD)
    #: what must lie within bounds, else a token or sequence is left out of the loss: a comma-separated list; absent
    #: means nothing. ``k1`` is the ratio r, ``k2`` (log r)^2 / 2, ``k3`` r - 1 - log r, of a token or of a sequence's
    #: sum, mean or largest. ``token``, ``sequence``, ``geometric`` are ``token_k1``, ``seq_sum_k1``, ``seq_mean_k1``.
    rollout_rs: str | None = key(None, _REJECTED)
    #: the upper bound of each, or one for all, or both bounds, as in ``0.6_1.6,2.5``. Absent means
    #: ``rollout_is_threshold``, for ``k1`` alone.
    rollout_rs_threshold: str | None = key(None, _BOUNDS, _NO_REJECTION)
    #: the lower bound of ``k1``; absent means 1 / upper, 0 means no lower bound.
    rollout_rs_threshold_lower: float | None = key(None, _NO_REJECTION)
    #: reject a whole sequence if the ratio of one of its tokens is below this; absent means never.
    rollout_token_veto_threshold: float | None = key(None, _SMALL_SHARE)
    #: use the rollout's log-probs as the old ones, so that no pass computes others. Corrections then take their ratio
    #: from the policy that is updated.
    bypass_mode: bool = False
    #: the loss in ``bypass_mode``: ``ppo_clip`` means ``actor.policy_loss``, whose ratio needs no weights;
    #: ``reinforce`` the policy gradient with weights.
    loss_type: str = key("ppo_clip", one_of("ppo_clip", "reinforce"), beside("bypass_mode", False))
    #: divide the weights by their mean over the batch; in ``bypass_mode`` by that of the policy before its updates,
    #: which takes the pass of old log-probs.
    rollout_is_batch_normalize: bool = key(False, _NO_WEIGHTS)

    @property
    def is_on(self) -> bool:
        """Whether old log-probs are compared with the rollout's."""
        return self._corrects and (not self.bypass_mode or (self.is_reinforce and self.rollout_is_batch_normalize))

    @property
    def in_loss(self) -> RolloutCorrectionSection | None:
        """What compares the policy that is updated with the rollout; None where nothing does."""
        found = self if self.has_weights else replace(self, rollout_is=None)
        return found if self.bypass_mode and found._corrects else None

    @property
    def is_reinforce(self) -> bool:
        return self.bypass_mode and self.loss_type == "reinforce"

    @property
    def has_weights(self) -> bool:
        return self.rollout_is is not None and (self.is_reinforce or not self.bypass_mode)

    @property
    def needs_rollout_log_probs(self) -> bool:
        return self.is_on or self.bypass_mode

    @property
    def _corrects(self) -> bool:
        return bool(self.rollout_is or self.rollout_rs or self.rollout_token_veto_threshold is not None)

    @property
    def rejections(self) -> list[tuple[str, float, float]]:
        """(statistic, lower bound, upper bound) of each of ``rollout_rs``; call ``problems`` first."""
        if self.rollout_rs is None:
            return []
        names, bounds = _statistics(self.rollout_rs), bounds_of(self._rs_bounds)
        bounds = bounds * len(names) if len(bounds) == 1 else bounds
        return [(name, self._lower(name, entry), entry[-1]) for name, entry in zip(names, bounds, strict=True)]

    @property
    def _rs_bounds(self) -> str:
        return self.rollout_is_threshold if self.rollout_rs_threshold is None else self.rollout_rs_threshold

    def _lower(self, name: str, entry: tuple[float, ...]) -> float:
        if len(entry) == 2 or not name.endswith("k1"):
            return entry[0] if len(entry) == 2 else -inf
        return 1.0 / entry[0] if self.rollout_rs_threshold_lower is None else self.rollout_rs_threshold_lower

    def contradictions(self, where: str) -> Iterator[str]:
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            yield f"{where}.rollout_is_batch_normalize is True, but {where}.rollout_is is empty: no weights"
        if self.rollout_rs is None or not (_REJECTED.accepts(self.rollout_rs) and _are_bounds(self._rs_bounds)):
            return
        names, lower, bounds = set(_statistics(self.rollout_rs)), self.rollout_rs_threshold_lower, str(self._rs_bounds)
        is_for_ratios = self.rollout_rs_threshold is None
        if bounds.count(",") not in (0, self.rollout_rs.count(",")) or (is_for_ratios and names - {*OF_LEVEL.values()}):
            yield f"{where}.rollout_rs is {self.rollout_rs}; give rollout_rs_threshold a bound for each, or one for all"
        elif (lower is not None and "_" in bounds) or any(-inf < r[1] < 0 or r[1] > r[2] for r in self.rejections):
            yield (
                f"{where}.rollout_rs_threshold_lower is {lower}; give a lower bound once, from 0 (no lower bound) to "
                f"the upper threshold, where rollout_rs_threshold is {bounds}"
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
