"""Config of advantage estimation and KL control."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.trainer.config.rollout_correction import RolloutCorrectionConfig
from verl.workers.config.actor import KL_TYPES


@dataclass(frozen=True)
class KLControlConfig:
    """The coefficient of the KL penalty in the reward.

    Attributes:
        type: ``fixed`` keeps the coefficient; ``adaptive`` changes it so that the KL stays near ``target_kl``.
        kl_coef: the coefficient; ``adaptive`` starts from it.
        horizon: number of samples over which ``adaptive`` corrects the coefficient; a larger value corrects more
            slowly.
        target_kl: mean KL per token that ``adaptive`` aims at.
    """

    type: str = "fixed"
    kl_coef: float = 0.001
    horizon: int = 10000
    target_kl: float = 0.1


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476): only prompts whose samples differ are trained on.

    Attributes:
        enable: generate until ``data.train_batch_size`` prompts have passed the filter.
        metric: what must vary within a group: a part of the reward by its name, or ``seq_reward``, the sum of a
            sample's rewards with the overlong penalty.
        filter_path: a function ``(config, group) -> bool`` in place of ``metric``, as ``package.module.name`` or
            ``file.py:name``.
        max_num_gen_batches: the most generations of one step, after which the run ends with an error; 0 means no limit.
    """

    enable: bool = False
    metric: str | None = None
    filter_path: str | None = None
    max_num_gen_batches: int = 0

    def problems(self, where: str) -> list[str]:
        """Every value that cannot work, one sentence each."""
        found = []
        if self.enable and (self.metric is None) == (self.filter_path is None):
            said = "both are given" if self.metric else "neither is given"
            found.append(f"{where}.enable is True; give one of {where}.metric and {where}.filter_path ({said})")
        if self.max_num_gen_batches < 0:
            found.append(f"{where}.max_num_gen_batches is {self.max_num_gen_batches}; give a number, or 0 for no limit")
        return found


@dataclass(frozen=True)
class AlgoConfig:
    """The advantage estimator and its constants.

    Attributes:
        adv_estimator: registered name of the function that turns rewards into advantages.
        gamma: discount per token in the returns of ``reinforce_plus_plus``.
        norm_adv_by_std_in_grpo: GRPO divides by the standard deviation of the group; False gives Dr. GRPO.
        use_kl_in_reward: subtract the KL to the reference policy from the reward of every token; each step then
            computes old and reference log-probs.
        kl_penalty: estimator of that KL; ``k1`` equals ``kl``, ``k2`` equals ``mse``, ``k3`` equals ``low_var_kl``.
    """

    adv_estimator: str = "grpo"
    gamma: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def problems(self, where: str) -> list[str]:
        """Every value that cannot work, one sentence each."""
        found = [
            *self.filter_groups.problems(f"{where}.filter_groups"),
            *self.rollout_correction.problems(f"{where}.rollout_correction"),
        ]
        if self.kl_ctrl.type not in ("fixed", "adaptive"):
            found.append(f"{where}.kl_ctrl.type is {self.kl_ctrl.type!r}; expected fixed or adaptive")
        if self.kl_penalty not in KL_TYPES:
            found.append(f"{where}.kl_penalty is {self.kl_penalty!r}; expected one of {', '.join(KL_TYPES)}")
        if self.kl_ctrl.type == "adaptive" and (self.kl_ctrl.target_kl <= 0 or self.kl_ctrl.horizon <= 0):
            found.append(
                f"{where}.kl_ctrl.target_kl {self.kl_ctrl.target_kl} and horizon {self.kl_ctrl.horizon} must be above 0"
            )
        return found
