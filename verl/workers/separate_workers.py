"""Workers that do not both train and generate: in other schedules than ``sync``, and on saved rollouts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_formats.config import load_hf_config
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.config import PPOTrainerConfig
from verl.utils.device import init_device, ops_providers, resolve_device
from verl.utils.distributed import join_world, world_group
from verl.utils.hang_watchdog import HangWatchdog
from verl.utils.import_utils import load_provider
from verl.utils.profiler import DistProfiler, DistProfilerExtension
from verl.utils.timeline import now_s
from verl.workers.engine_setup import PARAMS_DTYPES
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.phases import make_watchdog, worker_phase
from verl.workers.rollout.environment_host import host_settings
from verl.workers.rollout.rollout_messages import RolloutRequest, RolloutResult, UnfinishedSample
from verl.workers.rollout.vllm_rollout.sample_stream import SampleStream, run_request
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import all_rank_shards, vLLMRollout
from verl.workers.row_store import RowStore, controller_batch
from verl.workers.weight_sync.plan import TransferPlan, build_plan
from verl.workers.weight_sync.sync import WeightSync
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.rank_shards import RankShards, engine_shards

_ROLLOUT, _SAVED = "rollout", "saved"


class TrainingWorker(ActorRolloutRefWorker):
    """A rank that trains and does not generate; it sends weights to the rollout ranks and fetches rows from them."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @worker_phase
    def update_weights(self, version: int) -> None:
        with self.timeline.span("onload"):
            self.actor_module.onload_params()
        with self.timeline.span("weight_sync"):
            self.sync.run(self.actor_module.module.state_dict(keep_vars=True), None, version)

    def _build_rollout(self) -> None:
        self.row_store = self.new_row_store()
        self.sync = self.new_weight_sync()

    def new_weight_sync(self) -> WeightSync:
        """The weight sync to the rollout ranks."""
        return weight_sync(self.run_config, self.device)


class SavedRolloutWorker(ActorRolloutRefWorker):
    """Trains on rows that an earlier run generated as if it had generated them; there is no rollout engine."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_SAVED))
    @worker_phase
    def take_rows(self, rows: DataProto) -> DataProto:
        """Stores its share of the next step's rows and returns references; frees those of the step before."""
        self.offload_for_rollout()
        return self.row_store.store_generated(rows, replica_size=1)

    def _build_rollout(self) -> None:
        self._register_dispatch_collect_info(_SAVED, self.rank, True)
        self.row_store = self.new_row_store()


class GroupRolloutWorker(ActorRolloutRefWorker):
    """Trains and generates like its base, but one step's samples in many calls between one weight sync and training."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @worker_phase
    def begin_generation(self) -> float:
        """Syncs the weights for ``run_steps`` and frees the last step's rows; returns the seconds of the sync."""
        self.row_store.drop()
        self.offload_for_rollout()
        return self.rollout_mode.__enter__().sync_seconds

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    @worker_phase
    def run_steps(self, request: RolloutRequest) -> RolloutResult:
        return run_request(self.stream, request, self.row_store, self.config.rollout.tensor_model_parallel_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @worker_phase
    def end_generation(self) -> None:
        """Drops what is unfinished and gives the device back to training."""
        self.stream.abort()
        self.rollout_mode.__exit__(None, None, None)

    def _build_rollout(self) -> None:
        super()._build_rollout()
        self.stream = SampleStream(self.rollout)


class RolloutWorker(Worker, DistProfilerExtension):
    """A rank that generates and does not train.

    Args:
        config: the whole tree of the run.
        role: ``rollout``.
    """

    def __init__(self, config: PPOTrainerConfig, role: str) -> None:
        super().__init__()
        assert role == _ROLLOUT, role
        self.run_config = config
        self.config = config.actor_rollout_ref
        self.watchdog: HangWatchdog | None = None
        self.device_type = resolve_device(config.trainer.device)
        _, self.rollout_ops_provider = ops_providers(config.trainer, self.device_type)
        chosen, report_dir = self.config.rollout.profiler, config.trainer.report_dir
        self.profiler = DistProfiler(self.rank, chosen, config.global_profiler, role, self.device_type, report_dir)
        self.replica_size = self.config.rollout.tensor_model_parallel_size
        self.first_rank = config.trainer.world_size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> dict[str, dict[str, str]]:
        """Joins the world of the training ranks and builds the engine, still without weights."""
        self.device = init_device(self.device_type)
        join_world(self.device_type, self.config.nccl_timeout)
        self.watchdog = make_watchdog(self.run_config, None)
        self.build_engine()
        return {"rollout": load_provider(self.rollout_ops_provider)().implementations}

    @worker_phase
    def build_engine(self) -> None:
        """Builds the engine, with room for its weights and its cache, on a rank that is in the world."""
        self.rollout = self.new_rollout()
        self.rollout.resume(["weights"])
        self.rollout.resume(["kv_cache"])
        self.stream = SampleStream(self.rollout)
        self.row_store = self.new_row_store()
        self.sync = self.new_weight_sync()
        replica, index = divmod(self.rank - self.first_rank, self.replica_size)
        self._register_dispatch_collect_info(_ROLLOUT, replica, index == 0)

    def new_rollout(self) -> vLLMRollout:
        """The rollout engine, still without weights."""
        return vLLMRollout(
            self.config.rollout,
            self.config.model.path,
            rollout_ops=self.rollout_ops_provider,
            device=self.device,
            first_rank=self.first_rank,
            environments=host_settings(self.run_config),
        )

    def new_row_store(self) -> RowStore:
        """The store of the rows that this rank generates."""
        return RowStore(world_group(), self.config.nccl_timeout, first_rank=self.first_rank)

    def new_weight_sync(self) -> WeightSync:
        """The weight sync from the training ranks."""
        return weight_sync(self.run_config, self.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @worker_phase
    def update_weights(self, version: int) -> None:
        """Collective with the training ranks' ``update_weights``.

        Unfinished samples continue with the new weights at the next ``run_steps``; with ``keep_kv_cache`` they keep the
        cache that the old weights computed.
        """
        self.stream.withdraw(keeps_cache=self.run_config.async_config.keep_kv_cache)
        with self.timeline.span("weight_sync"):
            self.sync.run({}, self.rollout, version)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    @worker_phase
    def run_steps(self, request: RolloutRequest) -> RolloutResult:
        return run_request(self.stream, request, self.row_store, self.replica_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @worker_phase
    def abort_unfinished(self) -> None:
        """Drops all unfinished samples."""
        self.stream.abort()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_ROLLOUT))
    @worker_phase
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One response per row by the current weights, for validation; unfinished samples wait until it is done."""
        start_s = now_s()
        self.stream.withdraw()
        output = self.rollout.generate_sequences(prompts)
        output.meta_info["timing"] = {"generate_sequences": now_s() - start_s}
        return controller_batch(output)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    @worker_phase
    def fetch_columns(self, data: DataProto, columns: tuple[str, ...]) -> DataProto:
        return self.row_store.fetch(data, columns).to("cpu")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @worker_phase
    def release_unfinished(self) -> list[UnfinishedSample]:
        """The state of this replica's unfinished samples for a checkpoint (``SampleStream.state``)."""
        return self.stream.state()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    @worker_phase
    def restore_samples(self, unfinished: list[UnfinishedSample], rows: DataProto) -> DataProto:
        """Takes over unfinished samples, stores finished ``rows`` and returns the references to these."""
        self.stream.restore(unfinished)
        if not len(rows):
            return DataProto()
        return self.row_store.store_generated(rows, self.replica_size, keeps_earlier=True)


def weight_sync(
    config: PPOTrainerConfig,
    device: torch.device,
    of_rank: Callable[[VllmConfig, int], RankShards] = engine_shards,
    build: Callable[..., TransferPlan] = build_plan,
) -> WeightSync:
    """The weight sync from the training ranks, which come first, to the others; all ranks make the same plan.

    of_rank: the shards of a rank of the engine · build: see ``build_plan``.
    """
    models, num_training, group = config.actor_rollout_ref, config.trainer.world_size, world_group()
    of_engine = all_rank_shards(models.rollout, models.model.path, config.rollout_world_size, of_rank)
    shards = {num_training + rank: owned for rank, owned in of_engine.items()}
    plan = build(
        load_hf_config(models.model.path),
        models.actor.megatron.layout(num_training),
        PARAMS_DTYPES[models.actor.megatron.dtype],
        shards,
        group.size(),
        bucket_bytes=models.rollout.update_weights_bucket_megabytes << 20,
        ranks_per_node=config.trainer.n_gpus_per_node,
    )
    return WeightSync(plan, shards.get(group.rank(), {}), group, device)
