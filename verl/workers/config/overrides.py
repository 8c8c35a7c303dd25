"""Keys of the free sections, such as ``override_transformer_config``, and the values that each accepts.

Attributes:
    num_layers_in_first_pipeline_stage: layers of the first stage; the other stages share the rest evenly.
    num_layers_in_last_pipeline_stage: layers of the last stage; the other stages share the rest evenly.
    account_for_embedding_in_pipeline_split: count the embedding as a layer of the first stage, which then has one
        decoder layer less than the others.
    account_for_loss_in_pipeline_split: count the output layer as a layer of the last stage, likewise.
    pipeline_num_transformer_layers: layers of every stage, for each of its chunks (MindSpeed's form of
        ``num_layer_list``).
    noop_layers: layer slots that have no layer, so that stages come out even (MindSpeed).
    mla_down_proj_column_parallel: split the down-projections of latent attention by their outputs over TP.
    recompute_granularity: ``full`` computes whole layers again in the backward pass, ``selective`` only the
        ``recompute_modules`` of each.
    recompute_method: form of ``full``: ``uniform`` keeps the input of every group of layers, ``block`` recomputes only
        the first layers of a stage.
    recompute_num_layers: layers of a group (``uniform``), or first layers of a stage (``block``).
    recompute_modules: modules that ``selective`` recomputes.
    cp_comm_type: how attention reaches the tokens of other context-parallel ranks.
    cp_send_latents: send latents instead of keys and values, which each rank then computes from them.
    microbatch_group_size_per_vp_stage: micro-batches that a stage runs through one chunk before the next chunk; absent
        means the number of stages.
    mtp_num_layers: depths of multi-token prediction that are trained; 0 means none.
    mtp_loss_scaling_factor: weight of the mean of their losses.
    moe_aux_loss_coeff: weight of the loss that balances experts.
    moe_z_loss_coeff: weight of the loss that keeps the router's logits small.
    moe_router_load_balancing_type: whether that loss balances experts over the micro-batch or over each sequence.
    moe_router_bias_update_rate: change per update of the router's bias of an expert with too few or too many tokens.
    moe_router_dtype: dtype of the router's matmul.
    moe_token_dispatcher_type: how tokens reach the experts of other ranks; ``flex`` is DeepEP with trainer.device=cuda,
        and ``alltoall`` elsewhere.
    moe_shared_expert_overlap: compute the shared experts while tokens travel to the routed ones.
    moe_alltoall_overlap_comm: MindSpeed's name of ``moe_shared_expert_overlap``.
    tp_comm_overlap: on CUDA, multiply parts of tensor parallelism's tokens while others travel between its ranks.
    mla_fa_without_pad: hand values of latent attention to Ascend's kernel as they are, not padded to the keys' head
        size; MindSpeed advises CANN 8.2.RC1 or newer.
    gemm_gradient_accumulation_fusion: add experts' weight gradients to their float32 sums inside the grouped product;
        Ascend's op table does if it is absent.
    fp8: multiply blocks of e4m3 in linear layers and experts, forward and for both gradients; weights, optimizer,
        embedding, output layer, router, norms and attention's core keep their dtypes. NVIDIA GPUs from H100 on have it.
    fp8_recipe: scales of ``fp8``, given with it: ``blockwise`` has 1 x 128 for activations and gradients, 128 x 128 for
        weights.
    grad_reduce_in_fp32: sum up and reduce gradients in float32.
    overlap_grad_reduce: reduce each gradient buffer while the backward pass continues.
    overlap_param_gather: gather each buffer of updated weights in the background.
    check_for_nan_in_grad: check gradients after every micro-batch, and name a micro-batch whose gradients are not
        finite.
    bucket_size: elements of a gradient buffer.
    freeze_moe_router: do not train the routers and their biases.
    optimizer_cpu_offload: run AdamW on the CPU, on state that never leaves host memory.
    optimizer_offload_fraction: share of the parameters that AdamW updates on the CPU.
    overlap_cpu_optimizer_d2h_h2d: copy gradients and weights while the CPU computes.
    pin_cpu_grads: keep gradients on the host in page-locked memory.
    pin_cpu_params: keep weights on the host in page-locked memory.
    use_precision_aware_optimizer: allow optimizer state below float32.
    main_grads_dtype: dtype of the gradients that the optimizer reads.
    main_params_dtype: dtype of the master weights.
    exp_avg_dtype: dtype of the first moment.
    exp_avg_sq_dtype: dtype of the second moment.
    on_non_finite_grads: what happens if the gradient norm or the loss is NaN or infinite: ``skip`` the step, where the
        third in a row stops the run, or ``stop`` it at the first; the error names step, rank and parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.workers.config.values import Values, one_of, value_problems

# The modules of megatron.core.transformer.transformer_config, which needs torch.
RECOMPUTE_MODULES = ("mla_up_proj", "core_attn", "moe_act", "layernorm", "mlp", "moe")


def _count(least: int) -> Values:
    return Values(
        f"expected a whole number, at least {least}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
    )


def _number(least: float, most: float | None = None) -> Values:
    return Values(
        f"expected a number, at least {least:g}" + ("" if most is None else f" and at most {most:g}"),
        lambda value: (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and least <= value <= (float("inf") if most is None else most)
        ),
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

# Keys that make the layout.
_LAYOUT: dict[str, Values] = {
    "num_layers_in_first_pipeline_stage": _count(1),
    "num_layers_in_last_pipeline_stage": _count(1),
    "account_for_embedding_in_pipeline_split": _FLAG,
    "account_for_loss_in_pipeline_split": _FLAG,
    "pipeline_num_transformer_layers": Values(
        "expected one list of layer counts per stage, such as [[6],[8]]", _stages
    ),
    "noop_layers": Values('expected numbers of layer slots, as a list or as text "47,62"', _slots),
    "mla_down_proj_column_parallel": _FLAG,
}
# Keys that are fields of the engine's TransformerConfig.
_FIELDS: dict[str, Values] = {
    "recompute_granularity": one_of("full", "selective"),
    "recompute_method": one_of("uniform", "block"),
    "recompute_num_layers": _count(1),
    "recompute_modules": Values(f"expected a list of {', '.join(RECOMPUTE_MODULES)}", _modules),
    "cp_comm_type": one_of("p2p", "all_gather", "a2a"),
    "cp_send_latents": _FLAG,
    "microbatch_group_size_per_vp_stage": _count(1),
    "mtp_num_layers": _count(0),
    "mtp_loss_scaling_factor": _number(0),
    "moe_aux_loss_coeff": _number(0),
    "moe_z_loss_coeff": _number(0),
    "moe_router_load_balancing_type": one_of("aux_loss", "seq_aux_loss", "none"),
    "moe_router_bias_update_rate": _number(0),
    "moe_router_dtype": one_of("fp32", "fp64", "bf16"),
    "moe_token_dispatcher_type": one_of("alltoall", "allgather", "flex"),
    "moe_shared_expert_overlap": _FLAG,
}
_RENAMED: dict[str, tuple[str, Values]] = {
    "moe_alltoall_overlap_comm": ("moe_shared_expert_overlap", _FLAG)  # MindSpeed's name
}
# Forms of kernels that an op table may have; names of Megatron and of MindSpeed.
OP_CHOICES: dict[str, Values] = {
    "tp_comm_overlap": _FLAG,
    "mla_fa_without_pad": _FLAG,
    "gemm_gradient_accumulation_fusion": _FLAG,
    "fp8": one_of("e4m3"),
    "fp8_recipe": one_of("blockwise"),
}
TRANSFORMER_OVERRIDES: dict[str, Values] = (
    _LAYOUT | _FIELDS | {key: values for key, (_, values) in _RENAMED.items()} | OP_CHOICES
)
# Fields of the engine's DistributedDataParallelConfig.
DDP_OVERRIDES: dict[str, Values] = {
    "grad_reduce_in_fp32": _FLAG,
    "overlap_grad_reduce": _FLAG,
    "overlap_param_gather": _FLAG,
    "check_for_nan_in_grad": _FLAG,
    "bucket_size": _count(1),
}
# Keys of model.override_config.moe_config.
MODEL_OVERRIDES: dict[str, Values] = {"freeze_moe_router": _FLAG}
# Keys of model.override_config, and of model_config in it.
LIMIT_OVERRIDES: dict[str, Values] = {"max_position_embeddings": _count(1)}
# Fields of the engine's OptimizerConfig; dtypes as Megatron's command line names them.
OPTIMIZER_OVERRIDES: dict[str, Values] = {
    "optimizer_cpu_offload": _FLAG,
    "optimizer_offload_fraction": _number(0, 1),
    "overlap_cpu_optimizer_d2h_h2d": _FLAG,
    "pin_cpu_grads": _FLAG,
    "pin_cpu_params": _FLAG,
    "use_precision_aware_optimizer": _FLAG,
    "main_grads_dtype": _DTYPE,
    "main_params_dtype": one_of("fp32"),
    "exp_avg_dtype": _DTYPE,
    "exp_avg_sq_dtype": _DTYPE,
    "on_non_finite_grads": one_of("skip", "stop"),
}


def override_problems(where: str, overrides: Mapping[str, Any], known: Mapping[str, Values]) -> list[str]:
    """One sentence for every key that is not ``known`` and every value it does not accept; None means "unset"."""
    names = f"known: {', '.join(sorted(known))}"
    return [
        problem
        for key in overrides
        for problem in (
            value_problems(where, {key: overrides[key]}, known)
            if key in known
            else [f"{where}.{key} is not known here; {names}"]
        )
    ]


def transformer_fields(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the engine's TransformerConfig that ``override_transformer_config`` sets."""
    fields = {key: overrides[key] for key in _FIELDS if overrides.get(key) is not None}
    if "recompute_modules" in fields:
        fields["recompute_modules"] = tuple(fields["recompute_modules"])
    for key, (ours, _) in _RENAMED.items():
        if overrides.get(key):
            fields[ours] = True
    return fields


def layer_numbers(value: Any) -> tuple[int, ...]:
    """Whole numbers given as a list or as text such as "7,7,8"."""
    parts = [part for part in value.strip("[] ").split(",") if part.strip()] if isinstance(value, str) else value
    return tuple(int(part) for part in parts)
