"""Device ops of the training engine: their contract, and the plain-torch reference that specifies them."""

from megatron.core.ops.contract import TrainOps
from megatron.core.ops.reference import reference_ops
from megatron.core.ops.resolve import resolve

__all__ = ["TrainOps", "reference_ops", "resolve"]
