"""Config of the Megatron training engine: layout, offload, recomputation, weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.parallel_layout import ParallelLayout
from verl.workers.config import overrides
from verl.workers.config.keys import TRAINED_DTYPES, Idle, Section, beside, key
from verl.workers.config.model import GradientCheckpointingConfig

END_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
COUNTED_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_SWAP_NAMES = {"0.6.1": "override_transformer_config.swap_optimizer"}


def _names(
    overrides: str = "", torchtitan: str = "", mlite: str = "", fsdp: str = "", veomni: str = ""
) -> dict[str, str]:
    """A key's names in upstream's other sections: in ``override_transformer_config``, and those of other engines."""
    sections = ("override_transformer_config", "../torchtitan", "../engine", "../fsdp_config", "../veomni")
    names = zip(sections, (overrides, torchtitan, mlite, fsdp, veomni), strict=True)
    return {f"0.9.0, {section}": f"{section}.{name}" for section, name in names if name}


_NOT_TRAINED, _OF_ACTOR = "the reference is not trained", "the actor's value counts for both"
_RANDOM = Idle(
    "the weights are initialised at random",
    lambda run, own: own.use_dist_checkpointing and not (run.actor_rollout_ref.actor.load_weight and own.load_weight),
)


@dataclass(frozen=True)
class McoreEngineConfig(Section):
    """One training layout, where its weights come from and where its memory goes.

    ``override_transformer_config`` has more keys of the layout: layers of the first and last stage, no-op layers,
    ``mla_down_proj_column_parallel``.
    """

    #: ranks that split every layer (TP).
    tensor_model_parallel_size: int = key(1, names=_names("tensor_model_parallel_size", "tensor_parallel_size", "tp"))
    #: stages that split the layers (PP).
    pipeline_model_parallel_size: int = key(1, names=_names("", "pipeline_parallel_size", "pp"))
    #: chunks of layers on each stage (VPP), which run interleaved; absent means 1.
    virtual_pipeline_model_parallel_size: int | None = key(None, names=_names("", "", "vpp"))
    num_layer_list: Any = None  #: layers of every stage, as a list or as text "7,7,8"; absent means an even split.
    #: ranks that split every sequence (CP).
    context_parallel_size: int = key(
        1,
        names=_names(
            *("context_parallel_size", "context_parallel_size", "cp"),
            *("ulysses_sequence_parallel_size", "ulysses_parallel_size"),
        )
        | {"0.9.0": "../ulysses_sequence_parallel_size"},
    )
    #: groups of experts (EP), across the data-parallel ranks.
    expert_model_parallel_size: int = key(1, names=_names("", "expert_parallel_size", "ep", "", "expert_parallel_size"))
    #: ranks that split every expert (ETP); absent means 1, not TP as in Megatron alone.
    expert_tensor_parallel_size: int | None = key(None, names=_names("", "expert_tensor_parallel_size", "etp"))
    #: make the tensor-parallel ranks expert groups too, so that there are EP x TP of them.
    moe_tp_extend_ep: bool = False
    #: split activations between layers over the tensor-parallel ranks; required with TP.
    sequence_parallel: bool = key(True, names=_names("sequence_parallel"), not_of_reference=_OF_ACTOR)
    #: move weights to host memory while something else needs the device.
    param_offload: bool = key(
        False,
        names=_names("", "param_offload", "param_offload", "", "param_offload"),
        not_of_reference="the reference is in host memory but for its own pass",
    )
    #: move gradients to host memory after the update.
    grad_offload: bool = key(False, names=_names("", "", "grad_offload"), not_of_reference=_NOT_TRAINED)
    #: move the optimizer state to host memory after the update.
    optimizer_offload: bool = key(False, names=_names("", *["optimizer_offload"] * 4), not_of_reference=_NOT_TRAINED)
    #: keep the optimizer state in host memory and bring it to the device in pieces (MindSpeed).
    swap_optimizer: bool = key(False, names=_SWAP_NAMES, not_of_reference=_NOT_TRAINED)
    #: split layers further than is given, over tensor-parallel ranks and then stages, where weights and gradients do
    #: not fit a device. Scripts whose engine shards weights over all ranks (FSDP) set it.
    fit_layout: bool = key(False, not_of_reference=_OF_ACTOR)
    #: start from sharded weights at ``dist_checkpointing_path`` instead of ``model.path``.
    use_dist_checkpointing: bool = key(False, _RANDOM)
    #: mp_rank files, a distributed checkpoint, or ``global_step_N/actor`` of another run, in any layout.
    dist_checkpointing_path: str | None = key(None, _RANDOM, beside("use_dist_checkpointing", False), is_path=True)
    #: load the weights; False initialises them at random, from ``seed``.
    load_weight: bool = key(True, names={"0.6.1": "../load_weight"})
    #: give every expert the same number of tokens, whatever the router chooses; for throughput measurements only.
    fix_router: bool = False
    #: seed of weights that are initialised at random.
    seed: int = key(42, names=_names("", "seed", "", "seed", "seed"))
    #: dtype of weights and activations; the optimizer's master weights are float32.
    dtype: str = key("bfloat16", TRAINED_DTYPES)
    #: how gradients are buffered and reduced; its keys are below.
    override_ddp_config: dict[str, Any] = key(dict, members=overrides.DDP_OVERRIDES, not_of_reference=_NOT_TRAINED)
    #: layout, recomputation, MoE and MTP; its keys are below.
    override_transformer_config: dict[str, Any] = key(dict, members=overrides.TRANSFORMER_OVERRIDES)

    @property
    def expert_parallel(self) -> int:
        """Expert groups of the layout: with ``moe_tp_extend_ep`` the TP ranks join them."""
        return self.expert_model_parallel_size * (self.tensor_model_parallel_size if self.moe_tp_extend_ep else 1)

    @property
    def optimizer_provider(self) -> str:
        if self.swap_optimizer:
            return "mindspeed.core.optimizer.swap_optimizer:get_swap_optimizer"
        return "megatron.core.optimizer:get_megatron_optimizer"

    @property
    def has_deep_ep(self) -> bool:
        """Whether the experts' dispatcher is DeepEP; it stays only with trainer.device=cuda."""
        return self.override_transformer_config.get("moe_token_dispatcher_type") == "flex"

    @property
    def op_choices(self) -> dict[str, bool | str]:
        """Forms of kernels that are asked for of the op table."""
        given = self.override_transformer_config
        return {key: given[key] for key in overrides.OP_CHOICES if given.get(key) is not None}

    def layer_counts(self, num_layers: int | None = None) -> tuple[int, ...] | None:
        """Layer slots of every stage; None means an even split.

        Counts that follow from the first or last stage need ``num_layers``; ValueError if it does not divide.
        """
        given = self.override_transformer_config
        if self.num_layer_list not in (None, "", []):
            return overrides.layer_numbers(self.num_layer_list)
        if stages := given.get("pipeline_num_transformer_layers"):
            return tuple(sum(overrides.layer_numbers(stage)) for stage in stages)
        if num_layers is None or not any(given.get(key) for key in (*END_STAGES, *COUNTED_ENDS)):
            return None
        return self.layout(self.pipeline_model_parallel_size).stage_layer_counts(num_layers)

    def layout(self, world_size: int) -> ParallelLayout:
        """The layout of ``world_size`` ranks, unchecked; a layer list takes precedence over first and last stage."""
        given, counts = self.override_transformer_config, self.layer_counts()
        first, last = (given.get(key) if counts is None else None for key in END_STAGES)
        return ParallelLayout(
            world_size=world_size,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_parallel,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size or 1,
            num_layer_list=counts,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size or 1,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
            account_for_embedding_in_pipeline_split=bool(given.get(COUNTED_ENDS[0])),
            account_for_loss_in_pipeline_split=bool(given.get(COUNTED_ENDS[1])),
            noop_layers=overrides.layer_numbers(given.get("noop_layers") or ()),
            mla_down_proj_column_parallel=bool(given.get("mla_down_proj_column_parallel")),
        )

    def transformer_fields(self, checkpointing: GradientCheckpointingConfig, is_on: bool) -> dict[str, Any]:
        """Fields of the engine's TransformerConfig that differ from what config.json says.

        Recomputation comes from ``checkpointing`` (``model.gradient_checkpointing_kwargs``) when ``is_on``, and from
        ``override_transformer_config`` otherwise.
        """
        fields = overrides.transformer_fields(self.override_transformer_config)
        given = {
            "recompute_granularity": checkpointing.activations_checkpoint_granularity,
            "recompute_method": checkpointing.activations_checkpoint_method,
            "recompute_num_layers": checkpointing.activations_checkpoint_num_layers,
        }
        if is_on:
            fields |= {key: value for key, value in given.items() if value is not None}
        return fields | {"moe_router_force_load_balancing": self.fix_router}

    def device_problems(self, where: str, device: str) -> Iterator[str]:
        """Settings that no op table of ``device`` has; ``auto`` passes, since only the workers resolve it."""
        if device in ("cpu", "npu") and "fp8" in self.op_choices:
            yield (
                f"{where}.override_transformer_config.fp8 is 'e4m3', but trainer.device is {device}: only NVIDIA GPUs "
                "from H100 on train with FP8 products; leave it out"
            )

    def contradictions(self, where: str) -> Iterator[str]:
        if self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            yield f"{where}.sequence_parallel is False; tensor parallelism here needs it True"
        if self.moe_tp_extend_ep and (self.expert_tensor_parallel_size or 1) > 1:
            yield (
                f"{where}: moe_tp_extend_ep hands the tensor-parallel ranks to the experts as they are; it and "
                f"expert_tensor_parallel_size {self.expert_tensor_parallel_size} exclude each other"
            )
        choices = self.op_choices
        if ("fp8" in choices) != ("fp8_recipe" in choices):
            yield (
                f"{where}.override_transformer_config: fp8 is {choices.get('fp8')} and fp8_recipe "
                f"{choices.get('fp8_recipe')}; give both (e4m3, blockwise) or none"
            )
        if "fp8" in choices and self.override_transformer_config.get("cp_send_latents"):
            yield (
                f"{where}.override_transformer_config: fp8 and cp_send_latents exclude each other: attention then "
                "multiplies by linear_kv_up_proj itself, in its own dtype"
            )
        if self.has_deep_ep and self.dtype != "bfloat16":
            yield f"{where}.dtype is {self.dtype}; moe_token_dispatcher_type=flex (DeepEP) needs bfloat16"
        if self.has_deep_ep and (self.expert_tensor_parallel_size or 1) > 1:
            yield (
                f"{where}.expert_tensor_parallel_size is {self.expert_tensor_parallel_size}; "
                "moe_token_dispatcher_type=flex (DeepEP) needs 1"
            )
        if self.swap_optimizer and self.optimizer_offload:
            yield f"{where}: swap_optimizer and optimizer_offload exclude each other; choose one"
        try:
            counts = self.layer_counts()
            for name, stage in zip(END_STAGES, (0, -1), strict=True):
                given = self.override_transformer_config.get(name)
                if counts and given not in (None, counts[stage]):
                    yield f"{where}.override_transformer_config.{name} is {given}; the layer list says {counts[stage]}"
        except (TypeError, ValueError, IndexError, KeyError):
            yield f"{where}: layers per stage {self.num_layer_list!r} are not a list of whole numbers"
