"""Sections that upstream's v0.9.0 has for its other training engines, and for rewards: their keys under our names.

FSDP, torchtitan, VeOmni and AutoModel shard weights over data-parallel ranks and MindSpeed is Megatron with other
names; here one engine trains for all of them. What a script's mini-batch, loss and token budget mean stays: Ulysses is
context parallelism, and a budget of tokens is that of a device, times the ranks that split a sequence.
"""

from __future__ import annotations

import re
from typing import Any

from verl.trainer.config.fixed_keys import SHARDING_ENGINES, Given
from verl.workers.config.overrides import DDP_OVERRIDES, OPTIMIZER_OVERRIDES

_MODEL, _ROLLOUT, _ACTOR = (f"actor_rollout_ref.{name}" for name in ("model", "rollout", "actor"))
_ENGINE, _OPTIM = f"{_ACTOR}.megatron", f"{_ACTOR}.optim"
_OVERRIDE = f"{_ENGINE}.override_transformer_config"
_ROLE = r"actor_rollout_ref\.(?:actor|ref)\."
# Arguments of vLLM's engine that the rollout has by the same name.
_ENGINE_ARGUMENTS = (
    "block_size",
    "cudagraph_capture_sizes",
    "dtype",
    "enable_chunked_prefill",
    "enable_expert_parallel",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_gpu_blocks_override",
    "quantization",
    "seed",
)
# Sections and keys by their beginning -> where they are here; the first that matches counts.
_RENAMED = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (rf"({_ROLE})mindspeed\.mcore_kwargs\.fix_router$", r"\1megatron.fix_router"),
        (rf"({_ROLE})mindspeed\.mcore_kwargs\.({'|'.join(DDP_OVERRIDES)})$", r"\1megatron.override_ddp_config.\2"),
        (rf"({_ROLE})mindspeed\.mcore_kwargs\.", r"\1megatron.override_transformer_config."),
        (rf"({_ROLE})mindspeed\.", r"\1megatron."),
        (rf"({_ROLE}optim\.)({'|'.join(OPTIMIZER_OVERRIDES)})$", r"\1override_optimizer_config.\2"),
        (rf"({_ROLE}optim\.override_optimizer_config\.)offload_fraction$", r"\1optimizer_offload_fraction"),
        (rf"({_ROLLOUT})\.engine_kwargs\.vllm\.({'|'.join(_ENGINE_ARGUMENTS)})$", r"\1.\2"),
        (r"rollout\.n$", "actor_rollout_ref.rollout.n"),
        (r"actor_rollout_ref\.model\.custom_(chat_template)$", r"data.apply_chat_template_kwargs.\1"),
        (rf"({_ROLE})(?:mindspeed|veomni)\.router_replay\.", r"\1router_replay."),
        (r"reward\.custom_reward_function\.", "custom_reward_function."),
        (r"(?:reward\.)?reward_manager\.name$", "reward_model.reward_manager"),
        (r"reward_manager\.", "reward.reward_manager."),  # v0.7.0's place
        (r"reward\.(num_workers$|reward_kwargs\.)", r"reward_model.\1"),
    )
)
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# MindSpeed's names of the ways in which ranks of context parallelism reach each other's tokens -> Megatron's.
_CP_TYPES = {"megatron_cp_algo": "p2p", "ulysses_cp_algo": "a2a", "kvallgather_cp_algo": "all_gather"}
_STAGE = re.compile(r"E?(?:t(?:\*(\d+))?)+L?")
_NO_CHANGE = "it asks for nothing more than what the other keys say"


def rename_sections(given: Given) -> None:
    """Give every key of such a section its name here."""
    for old in list(given.values):
        for pattern, replacement in _RENAMED:
            new, count = pattern.subn(replacement, old, count=1)
            if count and pattern.match(old):
                given.rename(old, new)
                break


def translate_engine_keys(given: Given) -> None:
    """Keys of other engines that are more than another name; ``rename_sections`` and other names come first."""
    values = given.values
    for role in (_ACTOR, "actor_rollout_ref.ref"):
        _translate_role(given, role)
    engine = values.get(f"{_ACTOR}.model_engine") or values.get(f"{_ACTOR}.strategy") or values.get("model_engine")
    sections = (f"{_ACTOR}.{name}." for name in ("fsdp_config", "torchtitan", "veomni"))
    is_sharded = engine in SHARDING_ENGINES if engine else any(key.startswith(tuple(sections)) for key in values)
    if is_sharded:
        _set_default(given, f"{_ENGINE}.fit_layout", True)
    if is_sharded and values.get(f"{_MODEL}.enable_gradient_checkpointing"):
        _recompute(given, _ACTOR, "full")
        given.take(f"{_MODEL}.enable_gradient_checkpointing", "sets recompute_granularity=full, unless that is given")
    _translate_mtp(given)
    _translate_experts(given)
    ratio = [values.pop(f"{_OPTIM}.{name}", None) for name in ("min_lr_ratio", "min_lr_factor")]
    if shares := [share for share in ratio if share is not None]:
        _set_default(given, f"{_OPTIM}.min_lr", shares[0] * float(values.get(f"{_OPTIM}.lr") or 1e-6))


def _translate_role(given: Given, role: str) -> None:
    values = given.values
    for name in ("megatron.dtype", "fsdp_config.dtype", "torchtitan.dtype", "fsdp_config.mixed_precision.param_dtype"):
        key = f"{role}.{name}"
        if key in values and (value := values.pop(key)) is not None:
            values[f"{role}.megatron.dtype"] = _DTYPES.get(value, value)
    if (reduced := values.pop(f"{role}.fsdp_config.mixed_precision.reduce_dtype", None)) is not None:
        in_fp32 = _DTYPES.get(reduced, reduced) == "float32"
        values[f"{role}.megatron.override_ddp_config.grad_reduce_in_fp32"] = in_fp32
    offloads = [f"{role}.megatron.{name}_offload" for name in ("param", "grad", "optimizer")]
    if f"{role}.fsdp_config.offload_policy" in values:
        if values[f"{role}.fsdp_config.offload_policy"]:
            for name in ("offload_policy", "param_offload"):  # it decides, whatever the other says
                values.pop(f"{role}.fsdp_config.{name}", None)
            values |= dict.fromkeys(offloads, True)
        else:
            given.take(f"{role}.fsdp_config.offload_policy", _NO_CHANGE)
    if (moves := values.get(f"{role}.fsdp_config.param_offload")) is not None:
        given.rename(f"{role}.fsdp_config.param_offload", offloads[0])
        if moves and role == _ACTOR:  # FSDP's weights and gradients move together
            _set_default(given, offloads[1], True)
    recompute = values.pop(f"{role}.torchtitan.activation_checkpoint", None)
    if "full" in (values.pop(f"{role}.engine.impl_cfg.recompute", None) or ()):
        recompute = "full"
    if recompute in ("full", "selective"):
        _recompute(given, role, recompute)
    override = f"{role}.megatron.override_transformer_config"
    if (algorithm := values.pop(f"{override}.context_parallel_algo", None)) is not None:
        values[f"{override}.cp_comm_type"] = _CP_TYPES.get(algorithm, algorithm)
    layout = values.pop(f"{override}.pipeline_model_parallel_layout", None)
    if layout is not None:
        stages = str(layout).split("|" if "|" in str(layout) else "/")
        if not all(_STAGE.fullmatch(stage) for stage in stages):
            given.problems.append(
                f"{override}.pipeline_model_parallel_layout is {layout!r}; expected stages like 'Et*6/t*6/t*5L', with "
                "the embedding E first, layers t, and the loss L last"
            )
            return
        values[f"{role}.megatron.num_layer_list"] = [
            sum(int(count or 1) for count in re.findall(r"t(?:\*(\d+))?", stage)) for stage in stages
        ]


def _translate_mtp(given: Given) -> None:
    """``model.mtp``: a depth of multi-token prediction that is trained, that drafts for the rollout, or both.

    Unlike verl's, its loss is detached unless ``detach_encoder`` is False: it keeps drafts current, and the policy
    learns from its own loss alone. Without ``enable_train`` it weighs nothing.
    """
    values = given.values
    names = ("enable", "enable_train", "enable_rollout", "detach_encoder", "num_speculative_tokens")
    asked = {name: values.pop(f"{_MODEL}.mtp.{name}", None) for name in names}
    factor = values.pop(f"{_MODEL}.mtp.mtp_loss_scaling_factor", None)
    if not (asked["enable"] and (asked["enable_train"] or asked["enable_rollout"])):
        return
    _set_default(given, f"{_OVERRIDE}.mtp_num_layers", 1)
    if asked["enable_rollout"]:
        _set_default(given, f"{_ROLLOUT}.speculative_config.method", "mtp")
        _set_default(
            given, f"{_ROLLOUT}.speculative_config.num_speculative_tokens", asked["num_speculative_tokens"] or 1
        )
    factor = factor if asked["enable_train"] else 0.0
    if factor is not None:
        _set_default(given, f"{_OVERRIDE}.mtp_loss_scaling_factor", factor)
    _set_default(given, f"{_OVERRIDE}.mtp_detach_encoder", asked["detach_encoder"] is not False)


def _translate_experts(given: Given) -> None:
    """``rollout.expert_parallel_size``: whole experts over all ranks of an engine, or each split over a replica's."""
    values = given.values
    size = values.pop(f"{_ROLLOUT}.expert_parallel_size", None)
    if size in (None, ""):
        return
    tp, dp = values.get(f"{_ROLLOUT}.tensor_model_parallel_size") or 1, values.get(f"{_ROLLOUT}.data_parallel_size")
    if size > 1 and dp in (None, "", 1) and size % tp == 0:
        dp = values[f"{_ROLLOUT}.data_parallel_size"] = size // tp
    _set_default(given, f"{_ROLLOUT}.enable_expert_parallel", size > 1)
    if size > 1 and size != tp * (dp or 1):
        given.problems.append(
            f"{_ROLLOUT}.expert_parallel_size is {size}; the experts of an engine are over its "
            f"tensor_model_parallel_size x data_parallel_size = {tp} x {dp} ranks: give {tp * (dp or 1)} or 1"
        )


def _recompute(given: Given, role: str, granularity: str) -> None:
    """Compute activations again, unless the script says itself which."""
    override = f"{role}.megatron.override_transformer_config"
    if given.values.get(f"{override}.recompute_granularity") is None:
        given.values[f"{override}.recompute_granularity"] = granularity
        if granularity == "full":
            _set_default(given, f"{override}.recompute_method", "uniform")
            _set_default(given, f"{override}.recompute_num_layers", 1)


def _set_default(given: Given, key: str, value: Any) -> None:
    if given.values.get(key) is None:
        given.values[key] = value
