"""The op table of a CPU, and what its entries are made of."""

from megatron.core.ops.cpu.table import cpu_ops

__all__ = ["cpu_ops"]
