"""The switch of a worker from training to rollout and back: weight sync, and who has the device's memory when."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from megatron.core.distributed import DistributedDataParallel
from verl.utils.timeline import Timeline, now_s
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from verl.workers.weight_sync.sync import WeightSync
from vllm.platforms import Platform


@dataclass(eq=False)
class RolloutMode:
    """A context in which the rollout engine has the actor's current weights and a KV cache.

    On entry the rollout weights are allocated as empty buffers, every rank receives its rollout shards from the ranks
    that train them, all shards are compared with the actor's, the training weights are offloaded, and only then the KV
    cache is allocated: its blocks never share the device with two copies of the model. On exit all memory of the
    rollout engine is freed.

    Attributes:
        offload_param: offload the training weights while the engine generates.
        timeline: gets a span of each part.
        platform: the device's, whose allocator gives its unused memory back before the other engine allocates, so that
            this need not fit into the holes of the last phase; it waits for the device. None on the CPU.
        sync_seconds: the duration of the last entry.
        policy_version: syncs so far.
    """

    actor_module: DistributedDataParallel
    rollout: vLLMRollout
    sync: WeightSync
    offload_param: bool
    timeline: Timeline
    platform: Platform | None = None
    sync_seconds: float = 0.0
    policy_version: int = 0

    def __enter__(self) -> RolloutMode:
        start_s = now_s()
        with self.timeline.span("onload"):
            self.actor_module.offload_grads()
            self.actor_module.onload_params()
            self._empty_cache()
        with self.timeline.span("wake_weights"):
            self.rollout.resume(tags=["weights"])
        self.policy_version += 1
        with self.timeline.span("weight_sync"):
            self.sync.run(self.actor_module.module.state_dict(keep_vars=True), self.rollout, self.policy_version)
        if self.offload_param:
            with self.timeline.span("offload"):
                self.actor_module.offload_params()
                self._empty_cache()
        # NPU-ADAPTATION(kv-cache-last): on a die of 64 GB that trains and generates in turns, the KV cache fits only
        # after the training weights have left; drop when a die holds both at once.
        with self.timeline.span("wake_kv_cache"):
            self.rollout.resume(tags=["kv_cache"])
        # NPU-ADAPTATION END
        end_s = now_s()
        self.timeline.add("update_weights", start_s, end_s)
        self.sync_seconds = end_s - start_s
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self.timeline.span("sleep"):
            self.rollout.release()  # and the engine empties the cache

    def _empty_cache(self) -> None:
        if self.platform is not None:
            self.platform.empty_cache()
