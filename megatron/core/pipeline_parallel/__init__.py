"""Pipeline schedules: how micro-batches move through the stages of one replica."""

from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

__all__ = ["get_forward_backward_func"]
