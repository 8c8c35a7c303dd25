"""Typed config of the workers, with verl's key names; imports neither torch nor ray."""

from verl.workers.config.actor import ActorConfig, CheckpointConfig, RefConfig, RouterReplayConfig
from verl.workers.config.engine import McoreEngineConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.config.optimizer import McoreOptimizerConfig
from verl.workers.config.profiler import GlobalProfilerConfig
from verl.workers.config.reward_model import CustomRewardFunctionConfig, OverlongBufferConfig, RewardModelConfig
from verl.workers.config.rollout import RolloutConfig

__all__ = [
    "ActorConfig",
    "CheckpointConfig",
    "CustomRewardFunctionConfig",
    "GlobalProfilerConfig",
    "HFModelConfig",
    "McoreEngineConfig",
    "McoreOptimizerConfig",
    "OverlongBufferConfig",
    "RefConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RouterReplayConfig",
]
