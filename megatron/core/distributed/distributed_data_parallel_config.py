"""Choices of data parallelism, under upstream's field names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DistributedDataParallelConfig:
    """How gradients are kept and reduced.

    grad_reduce_in_fp32: accumulate and reduce in fp32 (else in the parameters' dtype: half the memory, less exact) ·
    use_distributed_optimizer: reduce-scatter, so that each replica owns one shard (else all-reduce, every replica
    owns everything) · check_for_nan_in_grad: after every micro-batch (``backward_of``) look for values that are not
    finite, so that the optimizer can name the rank, the micro-batch and the parameter where they arose; costs one pass
    over the gradient buffers and one wait of the host per micro-batch (with overlap_grad_reduce one wait per bucket in
    the last) · bucket_size: elements after which a new flat buffer begins, reduced and gathered on its own ·
    overlap_grad_reduce: reduce each bucket as soon as the last backward of a step has filled it, beside what is left
    of that backward · overlap_param_gather: gather the updated parameters of each bucket in the background and wait
    before their first use. Neither overlap changes a single bit of the result.
    """

    grad_reduce_in_fp32: bool = True
    use_distributed_optimizer: bool = True
    check_for_nan_in_grad: bool = False
    bucket_size: int = 40_000_000
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False

    def __post_init__(self) -> None:
        if self.bucket_size < 1:
            raise ValueError(f"bucket_size is {self.bucket_size}; it must be at least 1 (40000000 is usual)")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ValueError(
                "overlap_param_gather needs use_distributed_optimizer: without it every replica updates all parameters "
                "and there is nothing to gather"
            )
