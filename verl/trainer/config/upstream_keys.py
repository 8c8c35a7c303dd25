"""Upstream's keys that are acted on under another name or in another form here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import yaml

from verl.trainer.config.engine_keys import translate_engine_keys
from verl.trainer.config.fixed_keys import Given, WithoutEffect

_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_OVERRIDES = "megatron.override_transformer_config"
_NO_SERVER = "engines take requests as they have room in every schedule, and no server stands between"
_FLEX = (("flex",), "alltoall", "DeepEP needs trainer.device=cuda; the same tokens travel by all-to-all")
_OUR_ENGINE = "this repository's engine takes its place"
# key -> (values of upstream's, what they mean here, what is different)
REPLACED_VALUES = {
    "actor_rollout_ref.rollout.mode": (("async",), "sync", _NO_SERVER),
    "actor_rollout_ref.rollout.name": (("sglang", "trtllm"), "vllm", _OUR_ENGINE),
}
# The same, but with trainer.device=cuda, which has what the value names.
REPLACED_WITHOUT_CUDA = {f"{role}.{_OVERRIDES}.moe_token_dispatcher_type": _FLEX for role in (_ACTOR, _REF)}
_BATCH = "data.train_batch_size"
# Keys of upstream's fully_async_policy that become other keys here.
ASYNC_KEYS = (
    "rollout.total_epochs",
    "rollout.total_rollout_steps",
    "rollout.test_freq",
    "async_training.compute_prox_log_prob",
    "async_training.use_rollout_log_probs",
)


def translate_upstream_keys(given: Given, names: Mapping[str, str]) -> None:
    """Replace upstream's keys and values; ``names``: upstream's names of keys -> the key."""
    values = given.values
    for old in [name for name in names if name in values]:
        given.rename(old, names[old])
    translate_engine_keys(given)
    is_cuda = values.get("trainer.device") == "cuda"
    for key, (replaced, meaning, reason) in (REPLACED_VALUES | ({} if is_cuda else REPLACED_WITHOUT_CUDA)).items():
        if (value := values.get(key)) in replaced:
            values[key] = meaning
            given.taken.append(WithoutEffect(key, value, reason))
    if values.get(f"{_REF}.megatron.load_weight") and values.get(f"{_ACTOR}.load_weight") is False:
        given.problems.append(
            f"{_REF}.load_weight is True, but {_ACTOR}.load_weight is False: the reference starts from the actor's "
            "weights; give both the same value"
        )
    _translate_async(given)


def _translate_async(given: Given) -> None:
    """The lengths and log-probs of ``fully_async_policy``, whose scripts count prompts and weight syncs."""
    values = given.values
    asked = {key: value for key in ASYNC_KEYS if (value := values.pop(key, None)) is not None}
    if values.get("trainer.schedule") != "fully_async":
        if asked:
            given.problems.append(
                f"{', '.join(asked)}: only trainer.schedule=fully_async has such keys; leave them out"
            )
        return
    if values.get("data.gen_batch_size") == 1 and not values.get("algorithm.filter_groups.enable"):
        given.take("data.gen_batch_size", "prompts are handed out as samples end, in every case")
    if values.get(_BATCH) == 0:  # upstream: a step trains on the mini-batches that it waits for
        required, mini = values.get("async_training.require_batches"), values.get(f"{_ACTOR}.ppo_mini_batch_size")
        values[_BATCH] = (required or 1) * (mini or 256)
    every = values.get("async_training.trigger_parameter_sync_step") or 1
    for key, trained, steps in (
        ("rollout.total_epochs", "trainer.total_epochs", lambda epochs: epochs),
        ("rollout.test_freq", "trainer.test_freq", lambda syncs: syncs * every if syncs > 0 else -1),
        (
            "rollout.total_rollout_steps",
            "trainer.total_training_steps",
            lambda prompts: math.ceil(prompts / (values.get(_BATCH) or 1024)),
        ),
    ):
        if key in asked:
            if values.get(trained) is not None:
                given.take(trained, f"{key} is given, and decides")
            values[trained] = steps(asked[key])
    save_freq = values.get("trainer.save_freq")
    if asked and isinstance(save_freq, int) and save_freq > 0 and save_freq % every:
        given.take("trainer.save_freq", f"rounded up to whole weight syncs of {every} steps")
        values["trainer.save_freq"] = -(-save_freq // every) * every
    uses_rollouts = asked.get("async_training.use_rollout_log_probs")
    if asked.get("async_training.compute_prox_log_prob") or uses_rollouts is False:
        values[f"{_ACTOR}.recompute_old_log_prob"] = "True"
    elif uses_rollouts:
        values["algorithm.rollout_correction.bypass_mode"] = True


def list_of_names(value: Any) -> Any:
    """``console`` and ``["console","wandb"]`` as shells hand them over: a name, or a list inside of a text."""
    if not isinstance(value, str):
        return value
    found = yaml.safe_load(value) if value.lstrip().startswith("[") else value.split(",")
    return [str(name).strip() for name in found]
