"""Knobs of the Megatron training engine: layout, offload, recomputation, weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.core.parallel_layout import ParallelLayout
from verl.workers.config.model import GradientCheckpointingConfig

# Keys of override_transformer_config that change something; values are checked where they are used.
TRANSFORMER_OVERRIDES = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_num_transformer_layers",
    "moe_aux_loss_coeff",
    "moe_router_bias_update_rate",
    "moe_router_load_balancing_type",
    "moe_shared_expert_overlap",
    "moe_alltoall_overlap_comm",  # MindSpeed's name of the one above
)
# Keys of override_ddp_config: fields of the engine's DistributedDataParallelConfig.
DDP_OVERRIDES = ("overlap_grad_reduce", "overlap_param_gather", "check_for_nan_in_grad", "bucket_size")
# Keys that upstream scripts set and that have one right answer here: key -> (accepted values, where it is decided).
FIXED_TRANSFORMER_OVERRIDES: dict[str, tuple[tuple[Any, ...], str]] = {
    "multi_head_latent_attention": ((True,), "the model's config.json decides"),
    "moe_token_dispatcher_type": (("alltoall",), "the only dispatcher here"),
    "moe_grouped_gemm": ((True,), "experts are always grouped"),
    "moe_permutation_async_comm": ((True,), "counts are always exchanged while tokens are sorted"),
    "moe_router_dtype": (("fp32",), "the router always computes in fp32"),
    "use_flash_attn": ((True,), "trainer.train_ops decides"),
    "attention_backend": (("flash", "auto"), "trainer.train_ops decides"),
    "use_fused_rotary_pos_emb": ((True,), "trainer.train_ops decides"),
    "use_fused_swiglu": ((True,), "trainer.train_ops decides"),
    "use_fused_rmsnorm": ((True,), "trainer.train_ops decides"),
    "use_fused_moe_token_permute_and_unpermute": ((True,), "trainer.train_ops decides"),
    "position_embedding_type": (("rope",), "the model's config.json decides"),
    "use_rope_scaling": ((True, False), "the model's config.json decides"),
    "rope_scaling_type": (("yarn",), "the model's config.json decides"),
    "recompute_modules": ((["core_attn"], None), "recomputation is by layer"),
}
_PASSED_ON = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "moe_aux_loss_coeff",
    "moe_router_bias_update_rate",
    "moe_shared_expert_overlap",
)
_FROM_MODEL = "rope_scaling_"  # YaRN numbers (factor, mscale, beta ...) always come from config.json


@dataclass(frozen=True)
class McoreEngineConfig:
    """One training layout; ``num_layer_list`` is layers per stage as a list or as text "7,7,8"."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    num_layer_list: Any = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    moe_tp_extend_ep: bool = False
    sequence_parallel: bool = True
    use_distributed_optimizer: bool = True
    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    swap_optimizer: bool = False
    use_dist_checkpointing: bool = False
    dist_checkpointing_path: str | None = None
    load_weight: bool = True
    fix_router: bool = False
    seed: int = 42
    dtype: str = "bfloat16"
    override_ddp_config: dict[str, Any] = field(default_factory=dict)
    override_transformer_config: dict[str, Any] = field(default_factory=dict)

    @property
    def expert_parallel(self) -> int:
        """Expert groups of the layout: with ``moe_tp_extend_ep`` the TP ranks join them."""
        return self.expert_model_parallel_size * (self.tensor_model_parallel_size if self.moe_tp_extend_ep else 1)

    @property
    def optimizer_provider(self) -> str:
        """``module:function`` that makes the optimizer."""
        if self.swap_optimizer:
            return "mindspeed.core.optimizer.swap_optimizer:get_swap_optimizer"
        return "megatron.core.optimizer:get_megatron_optimizer"

    def layer_counts(self, num_layers: int | None = None) -> tuple[int, ...] | None:
        """Layers of every stage from ``num_layer_list`` or upstream's overrides; None means an even split."""
        overrides = self.override_transformer_config
        if self.num_layer_list not in (None, "", []):
            return _counts(self.num_layer_list)
        if overrides.get("pipeline_num_transformer_layers"):
            return _counts([stage[0] for stage in overrides["pipeline_num_transformer_layers"]])
        first = overrides.get("num_layers_in_first_pipeline_stage")
        last = overrides.get("num_layers_in_last_pipeline_stage")
        pp = self.pipeline_model_parallel_size
        if num_layers is None or pp == 1 or (first is None and last is None):
            return None
        middle_stages = pp - (first is not None) - (last is not None)
        left = num_layers - (first or 0) - (last or 0)
        if middle_stages and left % middle_stages:
            raise ValueError(f"{left} layers do not divide over the {middle_stages} stages between first and last")
        middle = (left // middle_stages,) * middle_stages if middle_stages else ()
        return ((first,) if first is not None else ()) + middle + ((last,) if last is not None else ())

    def layout(self, world_size: int, num_layers: int | None = None) -> ParallelLayout:
        """The layout of ``world_size`` ranks; ``num_layers`` is needed for first/last stage overrides."""
        return ParallelLayout(
            world_size=world_size,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_parallel,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size or 1,
            num_layer_list=self.layer_counts(num_layers),
        )

    def transformer_fields(self, checkpointing: GradientCheckpointingConfig, is_on: bool) -> dict[str, Any]:
        """Fields of the engine's TransformerConfig that differ from what config.json says.

        Recomputation comes from ``checkpointing`` (``model.gradient_checkpointing_kwargs``) when ``is_on``, and from
        ``override_transformer_config`` otherwise.
        """
        overrides = self.override_transformer_config
        fields = {key: overrides[key] for key in _PASSED_ON if overrides.get(key) is not None}
        if overrides.get("moe_alltoall_overlap_comm"):
            fields["moe_shared_expert_overlap"] = True
        given = {
            "recompute_granularity": checkpointing.activations_checkpoint_granularity,
            "recompute_method": checkpointing.activations_checkpoint_method,
            "recompute_num_layers": checkpointing.activations_checkpoint_num_layers,
        }
        if is_on:
            fields |= {key: value for key, value in given.items() if value is not None}
        return fields | {"moe_router_force_load_balancing": self.fix_router}

    def problems(self, where: str) -> list[str]:
        """Every value that cannot work whatever the model, one sentence each."""
        found = []
        if self.dtype not in ("bfloat16", "float32"):
            found.append(f"{where}.dtype is {self.dtype!r}; expected bfloat16 or float32")
        if self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            found.append(f"{where}.sequence_parallel is False; tensor parallelism here needs it True")
        if not self.use_distributed_optimizer:
            found.append(f"{where}.use_distributed_optimizer is False; the optimizer state is always sharded here")
        if self.swap_optimizer and self.optimizer_offload:
            found.append(f"{where}: swap_optimizer and optimizer_offload exclude each other; choose one")
        if self.use_dist_checkpointing and self.load_weight and not self.dist_checkpointing_path:
            found.append(f"{where}.use_dist_checkpointing is True but dist_checkpointing_path is empty")
        for key, value in self.override_transformer_config.items():
            found.extend(_override_problems(f"{where}.override_transformer_config", key, value))
        found.extend(self._ddp_problems(f"{where}.override_ddp_config"))
        try:
            self.layer_counts()
        except (TypeError, ValueError, IndexError, KeyError):
            found.append(f"{where}: layers per stage {self.num_layer_list!r} are not a list of whole numbers")
        return found

    def _ddp_problems(self, where: str) -> list[str]:
        found = []
        for key, value in self.override_ddp_config.items():
            if key not in DDP_OVERRIDES:
                found.append(f"{where}.{key} is not known here; known: {', '.join(DDP_OVERRIDES)}")
            elif key == "bucket_size":
                if type(value) is not int or value < 1:
                    found.append(f"{where}.{key} is {value!r}; expected a whole number, at least 1")
            elif not isinstance(value, bool):
                found.append(f"{where}.{key} is {value!r}; expected True or False")
        return found


def _counts(stages: Any) -> tuple[int, ...]:
    parts = stages.strip("[] ").split(",") if isinstance(stages, str) else stages
    return tuple(int(part) for part in parts)


def _override_problems(where: str, key: str, value: Any) -> list[str]:
    if key in TRANSFORMER_OVERRIDES or key in ("seq_length", "swap_optimizer") or key.startswith(_FROM_MODEL):
        return []
    if key not in FIXED_TRANSFORMER_OVERRIDES:
        known = ", ".join(sorted((*TRANSFORMER_OVERRIDES, *FIXED_TRANSFORMER_OVERRIDES)))
        return [f"{where}.{key} is not known here; known: {known}"]
    accepted, reason = FIXED_TRANSFORMER_OVERRIDES[key]
    if value in accepted:
        return []
    return [f"{where}.{key} is {value!r}; expected {' or '.join(map(repr, accepted))} ({reason})"]
