"""Context parallelism: one sequence over several ranks. Which tokens a rank holds, and attention between the ranks."""

from megatron.core.context_parallel.attention import ContextParallelAttention
from megatron.core.context_parallel.zigzag import ContextShard, gathered_rows, zigzag_indices

__all__ = ["ContextParallelAttention", "ContextShard", "gathered_rows", "zigzag_indices"]
