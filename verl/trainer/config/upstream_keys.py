"""Upstream's keys that are acted on under another name or in another form here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import yaml

from verl.trainer.config.fixed_keys import WithoutEffect

_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_OVERRIDES = "megatron.override_transformer_config"
# upstream's key -> the key that acts on it
MOVED_KEYS: dict[str, str] = {
    f"{_ACTOR}.{_OVERRIDES}.swap_optimizer": f"{_ACTOR}.megatron.swap_optimizer",
    f"{_REF}.{_OVERRIDES}.swap_optimizer": f"{_REF}.megatron.swap_optimizer",
    f"{_REF}.load_weight": f"{_REF}.megatron.load_weight",
}
# key -> value of upstream's -> (what it means here, what is different)
REPLACED_VALUES: dict[str, dict[str, tuple[str, str]]] = {
    "actor_rollout_ref.rollout.mode": {
        "async": ("sync", "engines take requests as they have room in every schedule, and no server stands between")
    },
}
# The same, but with trainer.device=cuda, which has what the value names.
REPLACED_WITHOUT_CUDA: dict[str, dict[str, tuple[str, str]]] = {
    f"{role}.{_OVERRIDES}.moe_token_dispatcher_type": {
        "flex": ("alltoall", "DeepEP needs trainer.device=cuda; the same tokens travel by all-to-all")
    }
    for role in (_ACTOR, _REF)
}
_SCHEDULE, _BATCH, _MINI = "trainer.schedule", "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"
# Keys of upstream's fully_async_policy that become other keys here.
ASYNC_KEYS = (
    "rollout.total_epochs",
    "rollout.total_rollout_steps",
    "rollout.test_freq",
    "async_training.compute_prox_log_prob",
    "async_training.use_rollout_log_probs",
)


def translate_upstream_keys(tree: dict[str, Any]) -> tuple[list[WithoutEffect], list[str]]:
    """Replace upstream's keys and values in ``tree``; what has no effect, and a sentence for each contradiction."""
    taken: list[WithoutEffect] = []
    problems: list[str] = []
    for old, new in MOVED_KEYS.items():
        value = _pop(tree, old)
        if value is not None:
            problems += _put(tree, new, value, old)
    is_cuda = value_at(tree, "trainer.device") == "cuda"
    for key, values in (REPLACED_VALUES | ({} if is_cuda else REPLACED_WITHOUT_CUDA)).items():
        given = value_at(tree, key)
        if isinstance(given, str) and given in values:
            meaning, reason = values[given]
            _set(tree, key, meaning)
            taken.append(WithoutEffect(key, given, reason))
    if value_at(tree, f"{_REF}.megatron.load_weight") and value_at(tree, f"{_ACTOR}.load_weight") is False:
        problems.append(
            f"{_REF}.load_weight is True, but {_ACTOR}.load_weight is False: the reference starts from the actor's "
            "weights; give both the same value"
        )
    found = _translate_async(tree)
    return taken + found[0], problems + found[1]


def _translate_async(tree: dict[str, Any]) -> tuple[list[WithoutEffect], list[str]]:
    """The lengths and log-probs of ``fully_async_policy``, whose scripts count prompts and weight syncs."""
    given = {key: _pop(tree, key) for key in ASYNC_KEYS}
    given = {key: value for key, value in given.items() if value is not None}
    is_fully_async = value_at(tree, _SCHEDULE) == "fully_async"
    if given and not is_fully_async:
        return [], [f"{', '.join(given)}: only {_SCHEDULE}=fully_async has such keys; leave them out"]
    if not is_fully_async:
        return [], []
    required, mini = value_at(tree, "async_training.require_batches"), value_at(tree, _MINI)
    if value_at(tree, _BATCH) == 0:  # upstream: a step trains on the mini-batches that it waits for
        _set(tree, _BATCH, (required or 1) * (mini or 256))
    every = value_at(tree, "async_training.trigger_parameter_sync_step") or 1
    taken = []
    for key, trained, steps in (
        ("rollout.total_epochs", "trainer.total_epochs", lambda epochs: epochs),
        ("rollout.test_freq", "trainer.test_freq", lambda syncs: syncs * every if syncs > 0 else -1),
        (
            "rollout.total_rollout_steps",
            "trainer.total_training_steps",
            lambda prompts: math.ceil(prompts / (value_at(tree, _BATCH) or 1024)),
        ),
    ):
        if key in given:
            if value_at(tree, trained) is not None:
                taken.append(WithoutEffect(trained, value_at(tree, trained), f"{key} is given, and decides"))
            _set(tree, trained, steps(given[key]))
    save_freq = value_at(tree, "trainer.save_freq")
    if given and isinstance(save_freq, int) and save_freq > 0 and save_freq % every:
        _set(tree, "trainer.save_freq", -(-save_freq // every) * every)
        taken.append(
            WithoutEffect("trainer.save_freq", save_freq, f"rounded up to whole weight syncs of {every} steps")
        )
    trains = given.get("async_training.compute_prox_log_prob")
    generated = given.get("async_training.use_rollout_log_probs")
    if trains or generated is False:
        _set(tree, f"{_ACTOR}.recompute_old_log_prob", "True")
    elif generated:
        _set(tree, "algorithm.rollout_correction.bypass_mode", True)
    return taken, []


def list_of_names(value: Any) -> Any:
    """``console`` and ``["console","wandb"]`` as shells hand them over: a name, or a list inside of a text."""
    if not isinstance(value, str):
        return value
    found = yaml.safe_load(value) if value.lstrip().startswith("[") else value.split(",")
    return [str(name).strip() for name in found]


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None where it is not there."""
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def _pop(tree: dict[str, Any], key: str) -> Any:
    section, _, leaf = key.rpartition(".")
    node = value_at(tree, section)
    return node.pop(leaf, None) if isinstance(node, dict) else None


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, leaf = key.split(".")
    for part in sections:
        tree = tree.setdefault(part, {})
    tree[leaf] = value


def _put(tree: dict[str, Any], key: str, value: Any, source: str) -> list[str]:
    """Set ``key`` unless it has another value already, which is returned as a problem."""
    there = value_at(tree, key)
    if there not in (None, value):
        return [f"{source} is {value!r} and {key} is {there!r}, which mean the same; give one of them"]
    _set(tree, key, value)
    return []
