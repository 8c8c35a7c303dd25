"""The root of the configuration tree."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.parallel_layout import ParallelLayout
from verl.trainer.config.algorithm import AlgorithmSection
from verl.trainer.config.data import DataConfig
from verl.trainer.config.schedule import ONE_STEP_OFF, AsyncTrainingConfig, RolloutRanksConfig
from verl.trainer.config.trainer import RayConfig, TrainerConfig
from verl.workers.config import (
    ActorConfig,
    CustomRewardFunctionConfig,
    GlobalProfilerConfig,
    HFModelConfig,
    RefConfig,
    RewardModelConfig,
    RolloutConfig,
)
from verl.workers.config.keys import Idle, Section, key
from verl.workers.config.profiler import NO_PROFILER

_NO_REFERENCE = Idle("no loss and no reward needs a reference policy", lambda run, own: not run.use_reference_policy)
_NOT_ASYNC = Idle("trainer.schedule is not fully_async", lambda run, own: run.trainer.schedule != "fully_async")


@dataclass(frozen=True)
class ActorRolloutRefConfig(Section):
    """The three roles of one worker process."""

    #: actor and rollout share their processes; set it False with every ``trainer.schedule`` but ``sync``.
    hybrid_engine: bool = True
    #: seconds after which a collective, HCCL's too, or a fetch of rows from another rank ends the job.
    nccl_timeout: int = 600
    model: HFModelConfig = key(HFModelConfig)
    actor: ActorConfig = key(ActorConfig)
    ref: RefConfig = key(RefConfig, _NO_REFERENCE)
    rollout: RolloutConfig = key(RolloutConfig)


@dataclass(frozen=True)
class TokenLimit:
    """The packed tokens that a micro-batch of a training call may have."""

    key: str  #: the setting.
    tokens: int  #: over all context-parallel ranks.
    metric: str  #: the name under which a step counts the samples above it.


@dataclass(frozen=True)
class PPOTrainerConfig(Section):
    """Everything about one run; workers receive this whole tree and never change it."""

    data: DataConfig = key(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = key(ActorRolloutRefConfig)
    algorithm: AlgorithmSection = key(AlgorithmSection)
    reward_model: RewardModelConfig = key(RewardModelConfig)
    custom_reward_function: CustomRewardFunctionConfig = key(CustomRewardFunctionConfig)
    trainer: TrainerConfig = key(TrainerConfig)
    rollout: RolloutRanksConfig = key(RolloutRanksConfig)
    async_training: AsyncTrainingConfig = key(AsyncTrainingConfig, _NOT_ASYNC)
    ray_kwargs: RayConfig = key(RayConfig)
    global_profiler: GlobalProfilerConfig = key(GlobalProfilerConfig, NO_PROFILER)

    @property
    def is_profiled(self) -> bool:
        """True when some role's profiler is enabled for some step."""
        models = self.actor_rollout_ref
        is_enabled = models.actor.profiler.enable or (self.has_rollout_ranks and models.rollout.profiler.enable)
        return is_enabled and bool(self.global_profiler.steps)

    @property
    def use_reference_policy(self) -> bool:
        """True when some loss or reward needs log-probs of the reference weights."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def has_rollout_ranks(self) -> bool:
        return self.trainer.schedule != "sync"

    @property
    def training_layout(self) -> ParallelLayout:
        return self.actor_rollout_ref.actor.megatron.layout(self.trainer.world_size)

    @property
    def rollout_world_size(self) -> int:
        return self.rollout.world_size if self.has_rollout_ranks else self.trainer.world_size

    @property
    def num_devices(self) -> int:
        return self.trainer.world_size + (self.rollout.world_size if self.has_rollout_ranks else 0)

    @property
    def rollout_replicas(self) -> int:
        """Sets of tensor-parallel rollout ranks, each of which generates for different prompts."""
        return self.rollout_world_size // self.actor_rollout_ref.rollout.tensor_model_parallel_size

    @property
    def async_config(self) -> AsyncTrainingConfig:
        """The asynchronous schedule's config, where generation has ranks of its own."""
        return ONE_STEP_OFF if self.trainer.schedule == "one_step_off" else self.async_training

    @property
    def needs_old_log_prob(self) -> bool:
        """True when a step computes log-probs of the policy before its updates.

        A rollout correction compares them with the rollout's; in bypass mode the rollout's replace them.
        """
        actor, algorithm = self.actor_rollout_ref.actor, self.algorithm
        correction = algorithm.rollout_correction
        if algorithm.use_kl_in_reward or actor.records_routing or correction.is_on:
            return True
        return not correction.bypass_mode and actor.needs_old_log_prob(self.data.train_batch_size)

    @property
    def automatic_router_replay(self) -> str:
        """The value of ``actor.router_replay.mode=auto``: replay the experts that are known without another pass.

        Off with exact log-probs, because both engines then choose the same experts.
        """
        if self.trainer.exact_log_probs:
            return "disabled"
        if self.actor_rollout_ref.rollout.enable_rollout_routing_replay:
            return "R3"
        return "R2" if self.needs_old_log_prob else "disabled"

    @property
    def exceeded_token_limits(self) -> list[TokenLimit]:
        """The limits of micro-batches that are below the longest sequence, of the training calls that the run makes."""
        models = self.actor_rollout_ref
        actor, rollout, ref = models.actor, models.rollout, models.ref
        limits = []
        if actor.use_dynamic_bsz:
            limits.append(("update_actor", "actor.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu))
        if rollout.log_prob_use_dynamic_bsz and self.needs_old_log_prob:
            name = "log_prob_max_token_len_per_gpu"
            limits.append(("old_log_prob", f"rollout.{name}", rollout.log_prob_max_token_len_per_gpu))
        if ref.log_prob_use_dynamic_bsz and self.use_reference_policy:
            limits.append(("ref", "ref.log_prob_max_token_len_per_gpu", ref.log_prob_max_token_len_per_gpu))
        cp = actor.megatron.context_parallel_size
        return [
            TokenLimit(f"actor_rollout_ref.{key}", tokens * cp, f"training/samples_above_token_limit/{call}")
            for call, key, tokens in limits
            if tokens * cp < rollout.context_length
        ]

    @property
    def gen_batch_size(self) -> int:
        """Prompts of one generation; dynamic sampling may generate several times a step, and more than it trains on."""
        chosen = self.data.gen_batch_size if self.algorithm.filter_groups.enable else None
        return chosen or self.data.train_batch_size
