"""Device ops of the training engine: their contract, and the plain-torch reference that specifies them."""

from megatron.core.ops.contract import TrainOps, resolve
from megatron.core.ops.reference import reference_ops

__all__ = ["TrainOps", "reference_ops", "resolve"]
