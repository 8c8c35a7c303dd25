"""Choices of data parallelism, under upstream's field names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DistributedDataParallelConfig:
    """How gradients are kept and reduced.

    grad_reduce_in_fp32: accumulate and reduce in fp32 (else in the parameters' dtype: half the memory, less exact) ·
    use_distributed_optimizer: reduce-scatter, so that each replica owns one shard (else all-reduce, every replica
    owns everything) · check_for_nan_in_grad: before each reduction look for values that are not finite and log the
    rank and the parameter where they arose.
    """

    grad_reduce_in_fp32: bool = True
    use_distributed_optimizer: bool = True
    check_for_nan_in_grad: bool = False
