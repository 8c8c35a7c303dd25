"""A rank of the run as the run itself builds it, on a device without values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.config import HFModelConfig, load_hf_config
from hf_formats.ranges import Ranges
from megatron.core.memory_ledger import ON_DEVICE, ON_HOST, ledger
from megatron.core.models.gpt import GPTModel, ModelChunks
from megatron.core.ops import TrainOps
from mindspeed_llm.model import build_model
from tools.plan.device import DEVICE, MemoryMeter
from tools.plan.ops import Routing, train_ops
from tools.plan.platform import PlannedPlatform
from tools.plan.rollout_ops import ordinary_token, rollout_ops, rollout_spread
from tools.plan.sync import LazyShards, lazy_shards, move_largest_only, shared_plan
from tools.plan.world import own_groups
from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig
from verl.utils.device import group_backend
from verl.utils.distributed import world_group
from verl.utils.timeline import Timeline
from verl.workers.actor import MegatronPPOActor
from verl.workers.config import McoreEngineConfig
from verl.workers.engine_setup import model_fields
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from verl.workers.row_store import RowStore
from verl.workers.separate_workers import RolloutWorker, TrainingWorker, weight_sync
from verl.workers.weight_sync.sync import WeightSync
from vllm.model_executor.model_loader.digest import WeightDigest
from vllm.model_executor.model_loader.shard_writer import ShardWriter


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on the device when phase ``name`` starts, at most during it, and when it ends.

    held: owner -> bytes of what lies there at its fullest border, which is its start, its end or that of a phase within
    it; what ``peak_bytes`` is more are activations, buffers and captured graphs.
    """

    name: str
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    held: Mapping[str, int] = field(default_factory=dict)


class MemoryTimeline(Timeline):
    """A worker's timeline that records bytes instead of seconds; a phase within another one is recorded before it."""

    def __init__(self, meter: MemoryMeter) -> None:
        super().__init__()
        self.meter = meter
        self.phases: list[PhaseMemory] = []
        self.owners: Callable[[], dict[str, int]] = dict  # what lies on the device now

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        meter = self.meter
        meter.settle()
        before, outer_peak, held, num_phases = meter.now_bytes, meter.peak_bytes, self.owners(), len(self.phases)
        meter.peak_bytes = before
        try:
            yield
        finally:
            meter.settle()
            borders = [held, self.owners(), *(phase.held for phase in self.phases[num_phases:])]
            fullest = max(borders, key=lambda border: sum(border.values()))
            self.phases.append(PhaseMemory(name, before, meter.peak_bytes, meter.now_bytes, fullest))
            meter.peak_bytes = max(outer_peak, meter.peak_bytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record the phases inside."""
        num_phases = len(self.phases)
        yield
        del self.phases[num_phases:]


class PlannedRowStore(RowStore):
    """A row store without the server: there is no other rank."""

    def open_server(self, group: dist.ProcessGroup) -> None:
        """Does nothing: no other rank fetches rows."""

    def close(self) -> None:
        """Does nothing: there is no server."""


class ForgetfulWriter(ShardWriter):
    """Takes any values and copies none."""

    def write(self, hf_name: str, ranges: Ranges, values: Tensor, of_values: Tensor | None = None) -> None:
        """Does nothing."""


class PlannedRollout(vLLMRollout):
    """The engine of a planned rank.

    ``takes_samples``: weight syncs bring only samples of the slices, and nothing is checked.
    """

    takes_samples = False

    def rank_shards(self, rank: int) -> LazyShards:
        return lazy_shards(self.inference_engine.config, rank)

    def update_weight_shards(self, version: int) -> AbstractContextManager[ShardWriter]:
        return nullcontext(ForgetfulWriter({})) if self.takes_samples else super().update_weight_shards(version)

    def shard_digests(self) -> dict[str, WeightDigest]:
        return {} if self.takes_samples else super().shard_digests()


class PlannedEngine:
    """What every planned worker has. Attributes as in ``PlannedWorker``; first_rank: the ranks before it only train."""

    run_config: PPOTrainerConfig
    hf_config: HFModelConfig
    rank: int
    kind: str
    load: float
    platform: PlannedPlatform
    rollout: PlannedRollout
    first_rank = 0

    def new_rollout(self) -> PlannedRollout:
        models, hf, num_ranks = self.run_config.actor_rollout_ref, self.hf_config, self.run_config.rollout_world_size
        spread = rollout_spread(models.rollout, hf, self.rank - self.first_rank, num_ranks, self.load)
        ops = rollout_ops(self.kind, spread, ordinary_token(hf), self.platform.planned.log)
        engine: dict[str, Any] = {"rollout_ops": ops, "device": self.platform, "first_rank": self.first_rank}
        return PlannedRollout(models.rollout, models.model.path, **engine)

    def new_row_store(self) -> RowStore:
        return PlannedRowStore(world_group(), self.run_config.actor_rollout_ref.nccl_timeout)

    def engine_owners(self) -> dict[str, int]:
        """Owner -> bytes on the device now of the rollout engine and the communicators."""
        report = self.rollout.inference_engine.get_memory_report()
        return {
            "rollout weights": report["weights_bytes"],
            "rollout kv_cache": report["kv_cache_bytes"],
            "communicators": self.platform.planned.communicator_bytes,
        }


class PlannedWorker(PlannedEngine, ActorRolloutRefWorker):  # type: ignore[misc]
    """The worker of one rank, inside ``planned_rank`` and a ``PlannedDevice``; only weights and rows have no values.

    Args:
        config: the run's; ``trainer.hang_timeout_s`` is 0.
        kind: the device whose kernels are planned: cpu, cuda or npu.
        load: see ``Routing``.
        platform: one of ``PLATFORMS``, of this kind of device.
    """

    timeline: MemoryTimeline

    def __init__(self, config: PPOTrainerConfig, kind: str, load: float, platform: PlannedPlatform) -> None:
        super().__init__(config, "actor_rollout_ref" if config.use_reference_policy else "actor_rollout")
        self.kind, self.load, self.platform = kind, load, platform
        self.group_backend = group_backend(kind)
        self.device_type = "cpu"  # there is no accelerator to ask about its memory
        self.timeline = MemoryTimeline(platform.planned.meter)

    def init_model(self) -> None:  # type: ignore[override]
        """Builds every model of this rank; weights have shapes and no values."""
        self.device = DEVICE
        self.hf_config = load_hf_config(self.config.model.path)
        self.groups = own_groups(self.run_config.training_layout, self.rank)
        ep = self.groups.ep
        num_local = self.hf_config.n_routed_experts // ep.size()
        routing = Routing(self.load, ep.rank() * num_local, num_local, ep.size())
        choices = self.config.actor.megatron.op_choices
        pads_values = not choices.get("mla_fa_without_pad", False)
        overlaps = bool(choices.get("tp_comm_overlap", False))
        self.build_models(train_ops(self.kind, routing, pads_values, overlaps, has_fp8="fp8" in choices))

    def new_model(self, ops: TrainOps, hf: HFModelConfig, engine: McoreEngineConfig) -> GPTModel | ModelChunks:
        with torch.device(DEVICE):
            return build_model(hf, self.groups, ops, **model_fields(self.config, engine))

    def build_actor(self, ops: TrainOps) -> None:
        super().build_actor(ops)
        # The optimizer makes states of the host without telling the allocator that they are the host's.
        held = ledger(self.actor_module, self.optimizer)
        self.platform.planned.move_to_host(sum(entry.num_bytes for entry in held if entry.device == ON_HOST))

    def device_owners(self) -> dict[str, int]:
        """Owner -> bytes on the device now, where the host's are among them if both are one."""
        planned, found = self.platform.planned, Counter[str]()
        places = (ON_DEVICE,) if planned.has_host_memory else (ON_DEVICE, ON_HOST)
        for entry in ledger(self.actor_module, self.optimizer):
            if entry.device in places:
                found[entry.what] += entry.num_bytes
        if self.ref is not None:
            found["reference"] = self.ref_weights.host_bytes * (self.ref_weights.is_onloaded + (len(places) == 2))
        return found | self.engine_owners()

    build_transfer_plan = staticmethod(shared_plan)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Inside, the rollout engine has weights and cache, after a sync that moves samples only."""
        self.rollout.takes_samples = True
        move_largest_only(self.sync)
        self.offload_for_rollout()
        with self.rollout_mode:
            yield

    def fetch_rows(self, data: DataProto, actor: MegatronPPOActor, columns: tuple[str, ...]) -> DataProto:
        return data


class _SeparateEngine(PlannedEngine):
    """What the planned workers of other schedules than ``sync`` have."""

    device: torch.device
    sync: WeightSync
    update_weights: Callable[[int], None]

    @contextmanager
    def generating(self) -> Iterator[None]:
        """As ``PlannedWorker.generating``; on a rank that trains it is the sync alone."""
        move_largest_only(self.sync)
        self.update_weights(1)
        yield

    def new_weight_sync(self) -> WeightSync:
        return weight_sync(self.run_config, self.device, lazy_shards, shared_plan)


class PlannedTrainingWorker(_SeparateEngine, PlannedWorker, TrainingWorker):  # type: ignore[misc]
    """A rank that trains while others generate."""

    def engine_owners(self) -> dict[str, int]:
        return {"communicators": self.platform.planned.communicator_bytes}


class PlannedRolloutWorker(_SeparateEngine, RolloutWorker):  # type: ignore[misc]
    """A rank that generates while others train; the arguments are those of ``PlannedWorker``."""

    timeline: MemoryTimeline

    def __init__(self, config: PPOTrainerConfig, kind: str, load: float, platform: PlannedPlatform) -> None:
        super().__init__(config, "rollout")
        self.kind, self.load, self.platform = kind, load, platform
        self.timeline = MemoryTimeline(platform.planned.meter)

    def init_model(self) -> None:  # type: ignore[override]
        """Builds the engine, whose weights have shapes and no values."""
        self.device, self.hf_config = DEVICE, load_hf_config(self.config.model.path)
        self.build_engine()
        self.rollout.takes_samples = True

    device_owners = PlannedEngine.engine_owners
