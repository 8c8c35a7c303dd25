"""Keys of the free sections, such as ``override_transformer_config``: the values that each accepts, and its meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verl.workers.config.keys import Idle, Values, beside, members, one_of

# The modules of megatron.core.transformer.transformer_config, which needs torch.
RECOMPUTE_MODULES = ("mla_up_proj", "core_attn", "moe_act", "layernorm", "mlp", "moe")


def _count(least: int) -> Values:
    return Values(
        f"expected a whole number, at least {least}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
    )


def _number(least: float, most: float = math.inf) -> Values:
    return Values(
        f"expected a number, at least {least:g}" + ("" if most == math.inf else f" and at most {most:g}"),
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most,
    )


def _modules(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(name in RECOMPUTE_MODULES for name in value)


def _slots(value: Any) -> bool:
    try:
        return all(slot >= 0 for slot in layer_numbers(value))
    except (TypeError, ValueError):
        return False


def _stages(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(stage, list | tuple) and stage for stage in value)


_FLAG = Values("expected True or False", lambda value: isinstance(value, bool))
_DTYPE = one_of("fp32", "bf16")


def _granularity(run: Any, own: Any) -> Any:
    model = run.actor_rollout_ref.model
    given = model.gradient_checkpointing_kwargs.activations_checkpoint_granularity
    if model.enable_gradient_checkpointing and given:
        return given
    return own.override_transformer_config.get("recompute_granularity")


def _balance(own: Any) -> tuple[Any, Any]:
    """Kind and weight of the loss that balances experts."""
    given = own.override_transformer_config
    return given.get("moe_router_load_balancing_type"), given.get("moe_aux_loss_coeff")


def _has_only_fp32(run: Any, own: Any) -> bool:
    state = own.override_optimizer_config
    dtypes = [value for name, value in state.items() if name.endswith("_dtype")]
    return bool(state.get("use_precision_aware_optimizer")) and all(value in (None, "fp32") for value in dtypes)


_NOT_FULL = Idle("recompute_granularity is not full", lambda run, own: _granularity(run, own) != "full")
_NOT_SELECTIVE = Idle("recompute_granularity is not selective", lambda run, own: _granularity(run, own) != "selective")
_NO_MTP = Idle("mtp_num_layers is 0", lambda run, own: not own.override_transformer_config.get("mtp_num_layers"))
_NO_BALANCE = Idle(
    "moe_router_load_balancing_type is none", lambda run, own: _balance(own)[0] == "none" and _balance(own)[1]
)
_NO_WEIGHT = Idle("moe_aux_loss_coeff is 0", lambda run, own: not _balance(own)[1] and _balance(own)[0] != "none")
_ON_DEVICE = Idle(
    "optimizer_cpu_offload is not True", lambda run, own: not own.override_optimizer_config.get("optimizer_cpu_offload")
)
_ALL_FP32 = Idle("all of the optimizer's state is float32", _has_only_fp32)

# Keys that make the layout.
_LAYOUT = members(
    num_layers_in_first_pipeline_stage=_count(1),  #: layers of the first stage; the other stages share the rest evenly.
    num_layers_in_last_pipeline_stage=_count(1),  #: layers of the last stage; the other stages share the rest evenly.
    #: count the embedding as a layer of the first stage, which then has one decoder layer less than the others.
    account_for_embedding_in_pipeline_split=_FLAG,
    account_for_loss_in_pipeline_split=_FLAG,  #: count the output layer as a layer of the last stage, likewise.
    #: layers of every stage, for each of its chunks (MindSpeed's form of ``num_layer_list``).
    pipeline_num_transformer_layers=Values("expected one list of layer counts per stage, such as [[6],[8]]", _stages),
    #: layer slots that have no layer, so that stages come out even (MindSpeed).
    noop_layers=Values('expected numbers of layer slots, as a list or as text "47,62"', _slots),
    mla_down_proj_column_parallel=_FLAG,  #: split the down-projections of latent attention by their outputs over TP.
)
# Keys that are fields of the engine's TransformerConfig.
_FIELDS = members(
    #: ``full`` computes whole layers again in the backward pass, ``selective`` only the ``recompute_modules`` of each.
    recompute_granularity=one_of("full", "selective"),
    #: form of ``full``: ``uniform`` keeps the input of every group of layers, ``block`` recomputes only the first
    #: layers of a stage.
    recompute_method=(one_of("uniform", "block"), _NOT_FULL),
    #: layers of a group (``uniform``), or first layers of a stage (``block``).
    recompute_num_layers=(_count(1), _NOT_FULL),
    #: modules that ``selective`` recomputes.
    recompute_modules=(Values(f"expected a list of {', '.join(RECOMPUTE_MODULES)}", _modules), _NOT_SELECTIVE),
    #: how attention reaches the tokens of other context-parallel ranks.
    cp_comm_type=(one_of("p2p", "all_gather", "a2a"), beside("context_parallel_size", 1)),
    #: send latents instead of keys and values, which each rank then computes from them.
    cp_send_latents=(_FLAG, beside("context_parallel_size", 1)),
    mtp_num_layers=_count(0),  #: depths of multi-token prediction that are trained; 0 means none.
    mtp_loss_scaling_factor=(_number(0), _NO_MTP),  #: weight of the mean of their losses.
    #: their losses train the depths alone, and nothing that the model has without them: its update is the same to the
    #: bit. Depths are then clipped by a norm of their own, which is not in ``actor/grad_norm``.
    mtp_detach_encoder=(_FLAG, _NO_MTP),
    moe_aux_loss_coeff=(_number(0), _NO_BALANCE),  #: weight of the loss that balances experts.
    moe_z_loss_coeff=_number(0),  #: weight of the loss that keeps the router's logits small.
    #: whether that loss balances experts over the micro-batch or over each sequence.
    moe_router_load_balancing_type=(one_of("aux_loss", "seq_aux_loss", "none"), _NO_WEIGHT),
    #: change per update of the router's bias of an expert with too few or too many tokens.
    moe_router_bias_update_rate=_number(0),
    moe_router_dtype=one_of("fp32", "fp64", "bf16"),  #: dtype of the router's matmul.
    #: how tokens reach the experts of other ranks; ``flex`` is DeepEP with trainer.device=cuda, and ``alltoall``
    #: elsewhere.
    moe_token_dispatcher_type=one_of("alltoall", "allgather", "flex"),
    moe_shared_expert_overlap=_FLAG,  #: compute the shared experts while tokens travel to the routed ones.
)
_RENAMED = members(
    moe_alltoall_overlap_comm=_FLAG  #: MindSpeed's name of ``moe_shared_expert_overlap``.
)
# Forms of kernels that an op table may have; names of Megatron and of MindSpeed.
OP_CHOICES = members(
    #: on CUDA, multiply parts of tensor parallelism's tokens while others travel between its ranks.
    tp_comm_overlap=(_FLAG, beside("tensor_model_parallel_size", 1)),
    #: hand values of latent attention to Ascend's kernel as they are, not padded to the keys' head size; MindSpeed
    #: advises CANN 8.2.RC1 or newer.
    mla_fa_without_pad=_FLAG,
    #: add experts' weight gradients to their float32 sums inside the grouped product; Ascend's op table does if it is
    #: absent.
    gemm_gradient_accumulation_fusion=_FLAG,
    #: multiply blocks of e4m3 in linear layers and experts, forward and for both gradients; weights, optimizer,
    #: embedding, output layer, router, norms and attention's core keep their dtypes. NVIDIA GPUs from H100 on have it.
    fp8=one_of("e4m3"),
    #: scales of ``fp8``, given with it: ``blockwise`` has 1 x 128 for activations and gradients, 128 x 128 for weights.
    fp8_recipe=one_of("blockwise"),
)
TRANSFORMER_OVERRIDES = _LAYOUT | _FIELDS | _RENAMED | OP_CHOICES
# Fields of the engine's DistributedDataParallelConfig.
DDP_OVERRIDES = members(
    grad_reduce_in_fp32=_FLAG,  #: sum up and reduce gradients in float32.
    overlap_grad_reduce=_FLAG,  #: reduce each gradient buffer while the backward pass continues.
    overlap_param_gather=_FLAG,  #: gather each buffer of updated weights in the background.
    #: check gradients after every micro-batch, and name a micro-batch whose gradients are not finite.
    check_for_nan_in_grad=_FLAG,
    bucket_size=_count(1),  #: elements of a gradient buffer.
)
# Keys of model.override_config.
MODEL_OVERRIDES = members(
    **{
        "moe_config.freeze_moe_router": _FLAG,  #: do not train the routers and their biases.
        "max_position_embeddings": _count(1),  #: a limit of prompt and response below config.json's.
        "model_config.max_position_embeddings": _count(1),  #: the same.
    }
)
# Fields of the engine's OptimizerConfig; dtypes as Megatron's command line names them.
OPTIMIZER_OVERRIDES = members(
    optimizer_cpu_offload=_FLAG,  #: run AdamW on the CPU, on state that never leaves host memory.
    #: share of the parameters that AdamW updates on the CPU.
    optimizer_offload_fraction=(_number(0, 1), _ON_DEVICE),
    #: copy gradients and weights while the CPU computes.
    overlap_cpu_optimizer_d2h_h2d=(_FLAG, _ON_DEVICE),
    pin_cpu_grads=(_FLAG, _ON_DEVICE),  #: keep gradients on the host in page-locked memory.
    pin_cpu_params=(_FLAG, _ON_DEVICE),  #: keep weights on the host in page-locked memory.
    use_precision_aware_optimizer=(_FLAG, _ALL_FP32),  #: allow optimizer state below float32.
    main_grads_dtype=_DTYPE,  #: dtype of the gradients that the optimizer reads.
    exp_avg_dtype=_DTYPE,  #: dtype of the first moment.
    exp_avg_sq_dtype=_DTYPE,  #: dtype of the second moment.
    #: what happens if the gradient norm or the loss is NaN or infinite: ``skip`` the step, where the third in a row
    #: stops the run, or ``stop`` it at the first; the error names step, rank and parameter.
    on_non_finite_grads=one_of("skip", "stop"),
)


def transformer_fields(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the engine's TransformerConfig that ``override_transformer_config`` sets."""
    fields = {key: overrides[key] for key in _FIELDS if overrides.get(key) is not None}
    if "recompute_modules" in fields:
        fields["recompute_modules"] = tuple(fields["recompute_modules"])
    if overrides.get("moe_alltoall_overlap_comm"):
        fields["moe_shared_expert_overlap"] = True
    return fields


def layer_numbers(value: Any) -> tuple[int, ...]:
    """Whole numbers given as a list or as text such as "7,7,8"."""
    parts = [part for part in value.strip("[] ").split(",") if part.strip()] if isinstance(value, str) else value
    return tuple(int(part) for part in parts)
