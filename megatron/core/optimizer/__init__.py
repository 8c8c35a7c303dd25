"""AdamW with fp32 master weights and moments, sharded over the replicas."""

from megatron.core.distributed import DistributedDataParallel
from megatron.core.ops import TrainOps
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, ParamShard
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import ProcessGroups

__all__ = ["DistributedOptimizer", "HybridDeviceOptimizer", "OptimizerConfig", "ParamShard", "get_megatron_optimizer"]


def get_megatron_optimizer(
    config: OptimizerConfig, ddp_model: DistributedDataParallel, groups: ProcessGroups, ops: TrainOps
) -> DistributedOptimizer:
    """The optimizer of ``ddp_model``; its master weights start as the model's weights at this moment.

    ``DistributedDataParallelConfig`` decides whether the state is sharded; a different ``config`` is a ``ValueError``.
    With ``optimizer_cpu_offload`` it is a ``HybridDeviceOptimizer``.
    """
    if config.use_distributed_optimizer != ddp_model.ddp_config.use_distributed_optimizer:
        raise ValueError(
            f"use_distributed_optimizer is {config.use_distributed_optimizer} in OptimizerConfig and "
            f"{ddp_model.ddp_config.use_distributed_optimizer} in DistributedDataParallelConfig; set both alike"
        )
    kind = HybridDeviceOptimizer if config.optimizer_cpu_offload else DistributedOptimizer
    return kind(config, ddp_model, groups, ops)
