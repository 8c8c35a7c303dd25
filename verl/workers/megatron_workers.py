"""The worker process of one device, which holds actor, rollout and reference, and the calls of the trainer."""

from __future__ import annotations

import logging

from torch import Tensor

from hf_formats.config import HFModelConfig, load_hf_config
from megatron.core.distributed import DistributedDataParallel
from megatron.core.memory_ledger import communicator_entries, ledger, table
from megatron.core.models.gpt import GPTModel, ModelChunks
from megatron.core.ops import TrainOps, resolve
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import UNUSED_GROUPS, ProcessGroups, connect, initialize_from_layout
from mindspeed_llm.hf_checkpoint import open_hf
from mindspeed_llm.load_weights import load_weights, open_shards
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import local_plan
from mindspeed_llm.weight_source import Checkpoint
from verl.protocol import BY_RANK, DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.config import PPOTrainerConfig
from verl.utils.checkpoint import MegatronCheckpointManager
from verl.utils.device import device_module, group_backend, init_device, ops_providers, resolve_device
from verl.utils.distributed import join_world, world_group
from verl.utils.hang_watchdog import HangWatchdog
from verl.utils.import_utils import import_external_libs, load_provider
from verl.utils.megatron.frozen import HostResidentModel
from verl.utils.profiler import DistProfiler, DistProfilerExtension
from verl.utils.timeline import now_s
from verl.workers.actor import MegatronPPOActor
from verl.workers.config import McoreEngineConfig
from verl.workers.engine_setup import ddp_config, model_fields, optimizer_config, trained_model
from verl.workers.phase_memory import PhaseMemory, resident_bytes
from verl.workers.phases import make_watchdog, training_phase, worker_phase
from verl.workers.rollout.environment_host import host_settings
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from verl.workers.row_store import RowStore, controller_batch
from verl.workers.weight_sync.plan import build_plan
from verl.workers.weight_sync.rollout_mode import RolloutMode
from verl.workers.weight_sync.sync import WeightSync
from vllm.platforms import resolve_platform

logger = logging.getLogger(__name__)

_TRAIN, _ROLLOUT = "train", "rollout"
_HOST_ALLOCATOR_STATS = "third_party.jemalloc:memory_stats"  # None unless jemalloc serves this process


class ActorRolloutRefWorker(Worker, DistProfilerExtension):
    """The worker of one device.

    Args:
        config: the whole tree of the run.
        role: ``actor_rollout_ref``, without ``ref`` when no reference policy is needed, and without ``rollout`` when
            other ranks generate.
    """

    def __init__(self, config: PPOTrainerConfig, role: str) -> None:
        super().__init__()
        self.run_config = config
        self.config = config.actor_rollout_ref
        import_external_libs(self.config.model.external_lib)  # before its names are looked up
        self.role = role
        self.watchdog: HangWatchdog | None = None
        self.device_type = self.kind = resolve_device(config.trainer.device)
        self.profiler = DistProfiler(
            self.rank,
            self.config.actor.profiler,
            config.global_profiler,
            role,
            self.device_type,
            config.trainer.report_dir,
        )
        self.memory = PhaseMemory(None)  # of the host alone, until there is a device
        self.train_ops_provider, self.rollout_ops_provider = ops_providers(config.trainer, self.device_type)
        self.group_backend = group_backend(self.device_type)
        self.total_training_steps = config.trainer.total_training_steps or 0
        self.controller_needs_log_probs = config.algorithm.use_kl_in_reward

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> dict[str, dict[str, str]]:
        """Joins the process group, builds and loads every model; returns both op tables: engine -> entry -> kind."""
        ops = resolve(self.train_ops_provider, self.config.actor.megatron.op_choices)
        self.device = init_device(self.device_type)
        self.memory = PhaseMemory(device_module(self.device_type))
        self.hf_config = load_hf_config(self.config.model.path)
        self.groups = self._init_groups()
        self.watchdog = make_watchdog(self.run_config, self.groups)
        self.build_models(ops)
        return {"training": ops.names, "rollout": load_provider(self.rollout_ops_provider)().implementations}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_ROLLOUT))
    @worker_phase
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Syncs the weights and generates one response per row; returns ``controller_batch``.

        In training all other columns stay here, and references to them are returned (``row_store``). The rows of the
        previous generation are freed, except with ``meta_info["keeps_rows"]``: a step that generates several times
        trains on all of them.
        """
        keeps_earlier = bool(prompts.meta_info.get("keeps_rows", False))
        if not keeps_earlier:
            self.row_store.drop()
        self.offload_for_rollout()
        with self.rollout_mode as mode:
            start_s = now_s()
            output = self.rollout.generate_sequences(prompts)
            generate_s = now_s() - start_s
            self.timeline.add("generate", start_s, start_s + generate_s)
        output.meta_info["timing"] = {"update_weights": mode.sync_seconds, "generate_sequences": generate_s}
        output.meta_info[BY_RANK] = {self.rank: {"generate_sequences": generate_s}}
        if prompts.meta_info.get("validate", False):
            return controller_batch(output)
        replica_size = self.config.rollout.tensor_model_parallel_size
        return self.row_store.store_generated(output, replica_size, keeps_earlier=keeps_earlier)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_TRAIN))
    @worker_phase
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` fp32 [B, R] of the current actor, as references for rows that came as references."""
        with self.timeline.span("onload"):
            self.actor_module.onload_params()
        rollout = self.config.rollout
        with training_phase():
            log_probs = self.actor.compute_log_prob(
                self.fetch_rows(data, self.actor, self.actor.scored_columns),
                micro_batch_size=rollout.log_prob_micro_batch_size_per_gpu,
                max_token_len=rollout.log_prob_max_token_len_per_gpu if rollout.log_prob_use_dynamic_bsz else None,
            )
        return self._log_prob_output(data, "old_log_probs", log_probs)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_TRAIN))
    @worker_phase
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` fp32 [B, R] of the reference, as references for rows that came as references.

        The actor's weights are offloaded while it runs.
        """
        assert self.ref is not None, f"role {self.role} has no reference policy"
        ref = self.config.ref
        with self.timeline.span("onload"):
            if self.config.actor.megatron.param_offload:
                self.actor_module.offload_params()
            self.ref_weights.onload()
        with training_phase():
            log_probs = self.ref.compute_log_prob(
                self.fetch_rows(data, self.ref, self.ref.scored_columns),
                micro_batch_size=ref.log_prob_micro_batch_size_per_gpu,
                max_token_len=ref.log_prob_max_token_len_per_gpu if ref.log_prob_use_dynamic_bsz else None,
            )
        with self.timeline.span("offload"):
            self.ref_weights.offload()
        return self._log_prob_output(data, "ref_log_prob", log_probs)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_TRAIN, all_ranks_report=True))
    @worker_phase
    def update_actor(self, data: DataProto) -> DataProto:
        """One GRPO update; ``meta_info`` has its metrics and each rank's memory. Weights stay for the next sync."""
        megatron = self.config.actor.megatron
        self.checkpoint_manager.check()
        with self.timeline.span("onload"):
            self.actor_module.onload_params()
            self.actor_module.onload_grads()
            self.optimizer.onload()
        with training_phase():
            metrics = self.actor.update_policy(self.fetch_rows(data, self.actor, self.actor.trained_columns))
        with self.timeline.span("offload"):
            if megatron.grad_offload:
                self.actor_module.offload_grads()
            if megatron.optimizer_offload:
                self.optimizer.offload()
        memory = self._memory_metrics()
        if self.watchdog is not None:
            self.watchdog.note_metrics(metrics | memory)
        return DataProto(meta_info={"metrics": metrics, BY_RANK: {self.rank: memory}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    @worker_phase
    def fetch_columns(self, data: DataProto, columns: tuple[str, ...]) -> DataProto:
        """Fetches those of ``columns`` that are remote for ``data``'s rows, for the controller."""
        return self.row_store.fetch(data, columns)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @worker_phase
    def save_checkpoint(self, checkpoint_path: str, global_step: int = 0, latest_path: str | None = None) -> None:
        """Collective; ``checkpoint_path`` exists only when it is complete, then ``latest_path`` gets the step's number.

        With ``actor.checkpoint.async_save`` this returns before that. The trainer removes old checkpoints.
        """
        self.onload_training_state()
        self.checkpoint_manager.save_checkpoint(checkpoint_path, global_step, latest_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @worker_phase
    def wait_for_checkpoint(self) -> None:
        """Collective; returns when a save in the background is complete, raises when it failed."""
        self.checkpoint_manager.wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @worker_phase
    def verify_checkpoint(self, checkpoint_path: str) -> list[str]:
        """Collective; every missing or damaged file of a checkpoint, the same list on all ranks."""
        return self.checkpoint_manager.problems_of(checkpoint_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @worker_phase
    def load_checkpoint(self, checkpoint_path: str) -> int:
        """Collective; returns the global step of the checkpoint."""
        self.onload_training_state()
        return self.checkpoint_manager.load_checkpoint(checkpoint_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @worker_phase
    def export_hf(self, path: str) -> None:
        """Collective; writes the actor's weights under Hugging Face names."""
        self.actor_module.onload_params()
        self.checkpoint_manager.export_hf(path)

    build_transfer_plan = staticmethod(build_plan)  # of the weight sync; tools/plan makes one for all of its ranks

    @worker_phase
    def build_models(self, ops: TrainOps) -> None:
        """Builds the actor, the reference and the rollout engine on a rank that has its groups."""
        # All ranks of a replica take the same rows; context-parallel ones then keep their parts of the tokens.
        coords = self.groups.coords
        is_collect = self.groups.is_last_stage and coords.tp == 0 and coords.cp == 0
        self._register_dispatch_collect_info(_TRAIN, coords.dp, is_collect)
        self.build_actor(ops)
        # Free the device: it need not hold two models, and a rollout engine that sizes its cache counts everything that
        # is on the device as taken for ever.
        self.offload_for_rollout()
        if self.config.actor.megatron.param_offload:
            self.actor_module.offload_params()
        self.ref = self._build_ref(ops) if self.role.endswith("ref") else None
        self._build_rollout()

    def _init_groups(self) -> ProcessGroups:
        join_world(self.device_type, self.config.nccl_timeout)
        layout = self.run_config.training_layout
        num_other_ranks = self.world_size - layout.world_size  # ranks that only generate
        return initialize_from_layout(
            layout, self.config.nccl_timeout / 60, num_other_ranks=num_other_ranks, backend=self.group_backend
        )

    def new_model(self, ops: TrainOps, hf: HFModelConfig, engine: McoreEngineConfig) -> GPTModel | ModelChunks:
        """This rank's part of a model with its weights."""
        model = build_model(hf, self.groups, ops, **model_fields(self.config, engine)).to(self.device)
        if not (self.config.actor.load_weight and engine.load_weight):
            model.init_weights(engine.seed)
            return model
        plan = local_plan(hf, self.groups.layout, self.groups.rank, naming="core")
        source: Checkpoint
        if engine.use_dist_checkpointing:
            source = open_shards(str(engine.dist_checkpointing_path), hf)
        else:
            source = open_hf(self.config.model.path, hf)
        logger.info("weights from %s: %s", source.path, source.describe())
        load_weights(model, plan, source)
        return model

    def build_actor(self, ops: TrainOps) -> None:
        """Builds the trained model, its optimizer and what saves both."""
        config = self.config.actor
        hf = trained_model(self.hf_config, config.megatron)
        model = self.new_model(ops, hf, config.megatron)
        self.actor_module = DistributedDataParallel(model.config, ddp_config(config.megatron), model, self.groups)
        self._connect_groups(model.config.moe_token_dispatcher_type)
        make_optimizer = load_provider(config.megatron.optimizer_provider)
        optim = config.optim
        self.optimizer = make_optimizer(optimizer_config(optim, config.megatron), self.actor_module, self.groups, ops)
        if self.groups.rank == 0:
            held = ledger(self.actor_module, self.optimizer) + communicator_entries(self.communicator_bytes)
            logger.info("what rank 0 holds, in bytes:\n%s", table(held))
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            max_lr=optim.lr,
            min_lr=optim.min_lr,
            init_lr=optim.lr_warmup_init,
            lr_warmup_steps=optim.warmup_steps(self.total_training_steps),
            lr_decay_steps=optim.decay_steps(self.total_training_steps),
            lr_decay_style=optim.lr_decay_style,
        )
        self.actor = MegatronPPOActor(
            config,
            model.config,
            self.groups,
            ops,
            self.actor_module,
            self.optimizer,
            self.scheduler,
            self.run_config.algorithm.rollout_correction,
            self.kind,
        )
        self.checkpoint_manager = MegatronCheckpointManager(
            config.checkpoint, model, self.optimizer, self.scheduler, hf, self.config.model.path, self.groups
        )

    def _connect_groups(self, dispatcher: str) -> None:
        """Makes the communicators before the rollout engine measures how much of the device is free."""
        names = connect(self.groups, self.device, UNUSED_GROUPS[dispatcher])
        self.communicator_bytes = {name: self.group_backend.buffer_bytes(name) for name in names}

    def _build_ref(self, ops: TrainOps) -> MegatronPPOActor:
        model = self.new_model(ops, self.hf_config, self.config.ref.megatron or self.config.actor.megatron)
        self.ref_weights = HostResidentModel(model)
        return MegatronPPOActor(self.config.actor, model.config, self.groups, ops, model, device_type=self.kind)

    def _build_rollout(self) -> None:
        config = self.config.rollout
        replica, index = divmod(self.rank, config.tensor_model_parallel_size)
        self._register_dispatch_collect_info(_ROLLOUT, replica, index == 0)
        self.rollout = self.new_rollout()
        self.row_store = self.new_row_store()
        shards = {rank: self.rollout.rank_shards(rank) for rank in range(self.groups.layout.world_size)}
        plan = self.build_transfer_plan(
            trained_model(self.hf_config, self.config.actor.megatron),
            self.groups.layout,
            next(self.actor_module.module.parameters()).dtype,
            shards,
            self.groups.world.size(),
            bucket_bytes=config.update_weights_bucket_megabytes << 20,
            ranks_per_node=self.run_config.trainer.n_gpus_per_node,
        )
        self.sync = WeightSync(plan, shards[self.groups.world.rank()], self.groups.world, self.device)
        self.rollout_mode = RolloutMode(
            self.actor_module,
            self.rollout,
            self.sync,
            self.config.actor.megatron.param_offload,
            self.timeline,
            None if self.device_type == "cpu" else resolve_platform(self.device_type),
        )

    def new_rollout(self) -> vLLMRollout:
        """The rollout engine, still without weights."""
        return vLLMRollout(
            self.config.rollout,
            self.config.model.path,
            rollout_ops=self.rollout_ops_provider,
            device=self.device,
            environments=host_settings(self.run_config),
        )

    def new_row_store(self) -> RowStore:
        """The store of the rows that this rank generates."""
        return RowStore(world_group(), self.config.nccl_timeout)

    def _log_prob_output(self, data: DataProto, name: str, log_probs: Tensor | None) -> DataProto:
        """Log-probs of ``data``'s rows, or references to them, or both where the controller computes with log-probs."""
        if log_probs is None or not self._query_mesh(_TRAIN)[1]:
            return DataProto()
        output = DataProto.from_dict(tensors={name: log_probs.cpu()})
        if data.row_refs is None:
            return output
        stored = self.row_store.store(name, log_probs)
        return stored.union(output) if self.controller_needs_log_probs else stored

    def fetch_rows(self, data: DataProto, actor: MegatronPPOActor, columns: tuple[str, ...]) -> DataProto:
        """The rows of ``data`` with ``columns``; of a rollout's experts only those of this rank's layers."""
        with self.timeline.span("fetch_rows"):
            return self.row_store.fetch(data, columns, actor.moe_layers)

    def offload_for_rollout(self) -> None:
        """Frees the device of the gradients, and of the optimizer's state if it is offloaded."""
        self.actor_module.offload_grads()
        if self.config.actor.megatron.optimizer_offload:
            self.optimizer.offload()

    def onload_training_state(self) -> None:
        """Brings the weights and the optimizer's state to the device."""
        self.actor_module.onload_params()
        self.optimizer.onload()

    def _memory_metrics(self) -> dict[str, float]:
        metrics = {"perf/cpu_memory_used_gb": resident_bytes() / 2**30} | self.memory.take_metrics()
        allocator = load_provider(_HOST_ALLOCATOR_STATS)()
        for name, num_bytes in (allocator or {}).items():
            metrics[f"perf/jemalloc_{name}_gb"] = num_bytes / 2**30
        if self.device_type != "cpu":
            most = self.memory.most_bytes()
            metrics["perf/max_memory_allocated_gb"] = most["allocated"] / 2**30
            metrics["perf/max_memory_reserved_gb"] = most["reserved"] / 2**30
        return metrics
