"""Data parallelism: flat parameter and gradient buffers, and what must be reduced before an optimizer step."""

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.finite_check import NonFiniteGradientError, NonFiniteGrads
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "NonFiniteGradientError",
    "NonFiniteGrads",
    "ParamAndGradBuffer",
    "finalize_model_grads",
]
