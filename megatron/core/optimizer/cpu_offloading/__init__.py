"""The optimizer whose state lives and is updated on the host."""

from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

__all__ = ["HybridDeviceOptimizer"]
