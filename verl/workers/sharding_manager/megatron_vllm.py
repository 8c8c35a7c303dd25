"""Weights from the training engine to the rollout engine, and the memory life cycle of a die around it."""

from __future__ import annotations

import logging
import time
from types import ModuleType, TracebackType

from megatron.core.distributed import DistributedDataParallel
from megatron.core.parallel_state import ProcessGroups
from mindspeed_llm.hf_config import HFModelConfig
from mindspeed_llm.weights import export_weights
from verl.workers.phases import release_cached_memory
from verl.workers.rollout.base import BaseRollout
from verl.workers.sharding_manager.weights_check import check_rollout_weights

logger = logging.getLogger(__name__)


class MegatronVLLMShardingManager:
    """A context in which the rollout engine holds the actor's current weights and a KV cache.

    Entering: rollout weights are allocated as empty buffers, written by a stream of HF-named tensors from the training
    ranks, the training weights leave the device, and only then the KV cache is allocated, so that its blocks never
    share the device with two copies of the model. Leaving frees all of the rollout engine.

    Args:
        offload_param: the training weights leave the device while the engine generates.
        bucket_bytes: how much of the weights travels at once.
        verify: after each sync the rollout engine's weights are compared with the actor's, by digest and name.
        accelerator: ``torch.npu`` or ``torch.cuda``, whose allocator gives back what one side freed before the other
            allocates; None on the CPU.
    """

    def __init__(
        self,
        actor_module: DistributedDataParallel,
        rollout: BaseRollout,
        hf_config: HFModelConfig,
        groups: ProcessGroups,
        *,
        offload_param: bool,
        bucket_bytes: int,
        verify: bool = False,
        accelerator: ModuleType | None = None,
    ) -> None:
        self.actor_module = actor_module
        self.rollout = rollout
        self.hf_config = hf_config
        self.groups = groups
        self.offload_param = offload_param
        self.bucket_bytes = bucket_bytes
        self.verify = verify
        self.accelerator = accelerator
        self.sync_seconds = 0.0
        self.policy_version = 0  # syncs so far

    def __enter__(self) -> MegatronVLLMShardingManager:
        start = time.perf_counter()
        self.actor_module.offload_grads()
        self.actor_module.onload_params()
        release_cached_memory(self.accelerator)
        self.rollout.resume(tags=["weights"])
        stream = export_weights(
            self.actor_module.module, self.hf_config, self.groups.layout, self.groups, bucket_bytes=self.bucket_bytes
        )
        self.policy_version += 1
        self.rollout.update_weights(stream, self.policy_version)
        if self.verify:
            found = self.rollout.weights_digest()
            check_rollout_weights(self.actor_module.module, self.hf_config, self.groups, found, self.bucket_bytes)
        if self.offload_param:
            self.actor_module.offload_params()
            release_cached_memory(self.accelerator)
        # NPU-ADAPTATION(kv-cache-last): on a 64 GB die the KV cache fits only after the training weights have left;
        # drop when rollout and training run on separate dies.
        self.rollout.resume(tags=["kv_cache"])
        # NPU-ADAPTATION END
        self.sync_seconds = time.perf_counter() - start
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.rollout.release()
        release_cached_memory(self.accelerator)
