"""Tensor and sequence parallelism: collectives with gradients, parallel layers, losses on sharded logits."""

from megatron.core.tensor_parallel.checkpoint import CheckpointWithoutOutput, checkpoint
from megatron.core.tensor_parallel.cross_entropy import (
    vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy_and_entropy,
    vocab_parallel_entropy,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

__all__ = [
    "CheckpointWithoutOutput",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "all_to_all",
    "checkpoint",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "set_tensor_model_parallel_attributes",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_cross_entropy_and_entropy",
    "vocab_parallel_entropy",
]
