"""Every key of the typed config: type, default, meaning and accepted values.

Meanings stand behind ``#:`` above the config's keys or in their lines. Accepted values are taken from the messages of
the config's own validation for values that cannot be right, so that the two cannot differ.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import OmegaConf

from megatron.core.transformer.transformer_config import TransformerConfig
from verl.trainer.config import PPOTrainerConfig, validate_config
from verl.trainer.config.declared import declared_keys
from verl.trainer.config.load import CONFIG_DIR, DEFAULT_CONFIG_NAME, replaced
from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig, overrides
from verl.workers.engine_setup import ddp_config, optimizer_config

REFERENCE_ENGINE = "actor_rollout_ref.ref.megatron"  # begins as a copy of the actor's
ACTOR_ENGINE = "actor_rollout_ref.actor.megatron"
FREE_SECTIONS = {
    name: item.key.members
    for name, item in declared_keys().items()
    if item.key.members and not item.key.takes_names and not name.startswith(REFERENCE_ENGINE)
}
# Sections that are validated only when they are on.
_SWITCHED_ON = {
    "reward_model.overlong_buffer.enable": True,
    "reward_model.overlong_buffer.len": 1,
    "algorithm.kl_ctrl.type": "adaptive",
}
_PROBES: dict[str, tuple[Any, ...]] = {
    "str": ("?",),
    "int": (-7, 0),
    "float": (-7.0, 0.0, 7.0),
    "list[str]": (["?"],),
    "list[int]": ([-7],),
    "list[float]": ([],),
}
# Text behind the value in a sentence of validation -> text on the page.
_FORMS: tuple[tuple[str, str], ...] = (
    (r"expected (?:one of )?(.+?)(?:, or leave it out)?(?: \(no .*\))?$", r"\1"),
    (r"give ((?:a number|seconds|numbers)\b.+?)(?:, or leave it out)?$", r"\1"),
    (r"(?:it|bound|[a-z_]+) must be (at least|above) ([\d.]+).*$", r"\1 \2"),
    (r"it must not be negative.*$", "0 or more"),
    (r"it must be between (.+) and (.+)$", r"\1 to \2"),
    (r"it must divide the (?:\d+ )?([a-z]+).*$", r"divides the \1"),
    (r"[a-z_]+ must lie in (.+)$", r"\1"),
    (r"only '(\w+)' is supported.*$", r"\1"),
    (r"use -1 for never$", "above 0, or -1 for never"),
    (r".* need a temperature above 0$", "above 0"),
)
_SIZES = re.compile(r"(?<=max_num_seqs) \d+| \(\d+\)")  # sizes of the config that was probed, left out of the page


@dataclass(frozen=True)
class Parameter:
    """A key of the config; ``meaning`` is empty where nothing says it."""

    key: str
    type: str
    default: str
    meaning: str
    allowed: str


@dataclass(frozen=True)
class Section:
    """A class of the config, or a free section, and its keys in order."""

    key: str
    summary: str
    parameters: tuple[Parameter, ...]


def sections() -> list[Section]:
    """The whole tree, a section for every class, free sections behind the class that has them."""
    return list(_sections(PPOTrainerConfig(), "", _followed()))


def meanings_in(source: str) -> dict[str, str]:
    """Name -> text behind ``#:`` above a key or in its line, in the source of a section or of free sections' tables."""
    found: dict[str, str] = {}
    text: list[str] = []
    for line in source.splitlines():
        code, _, comment = line.partition("#: ")
        if comment:
            text.append(comment)
        if text and (name := re.match(r' +"?([\w.]+)"?[:=]', code)):
            found[name[1]] = " ".join(text)
            text = []
    return found


def _sections(node: Any, prefix: str, followed: dict[str, str]) -> Iterator[Section]:
    where = prefix.rstrip(".")
    values = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    types = {field.name: str(field.type) for field in dataclasses.fields(node)}
    meanings = meanings_in(inspect.getsource(type(node)))
    leaves = [name for name, value in values.items() if not dataclasses.is_dataclass(value)]
    if leaves:
        yield Section(
            where,
            inspect.cleandoc(type(node).__doc__ or ""),
            tuple(
                Parameter(
                    prefix + name,
                    types[name].replace(" | None", " or absent"),
                    followed.get(prefix + name, _shown(values[name])),
                    meanings.get(name, ""),
                    _allowed(prefix + name, types[name]),
                )
                for name in leaves
            ),
        )
    for key in FREE_SECTIONS:
        if any(key.startswith(prefix + name) and not dataclasses.is_dataclass(values[name]) for name in values):
            yield _free_section(key)
    for name, value in values.items():
        if dataclasses.is_dataclass(value) and prefix + name != REFERENCE_ENGINE:
            yield from _sections(value, f"{prefix}{name}.", followed)


def _free_section(key: str) -> Section:
    meanings, defaults = meanings_in(inspect.getsource(overrides)), _engine_defaults()
    return Section(
        key,
        "A free section: a key counts when it is given; the defaults are the engine's.",
        tuple(
            Parameter(
                f"{key}.{name}",
                "",
                _shown(defaults.get(name.rpartition(".")[2])),
                meanings.get(name, ""),
                "".join(check.expected.removeprefix("expected ") for check in member.checks),
            )
            for name, member in FREE_SECTIONS[key].items()
        ),
    )


def _engine_defaults() -> dict[str, Any]:
    """The training engine's defaults of the free sections, with the config's names of dtypes."""
    engine = McoreEngineConfig()
    made = (ddp_config(engine), optimizer_config(McoreOptimizerConfig(), engine))
    found = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    found |= {field.name: getattr(config, field.name) for config in made for field in dataclasses.fields(config)}
    found["moe_alltoall_overlap_comm"] = found["moe_shared_expert_overlap"]
    return found


def _followed() -> dict[str, str]:
    """Keys whose default is another key's value, in words."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / f"{DEFAULT_CONFIG_NAME}.yaml"), resolve=False)
    found = {}
    for key, value in _leaves(tree, ""):
        other = re.fullmatch(r"\$\{oc\.select:([\w.]+),.*\}", str(value))
        found[key] = f"that of `{other[1]}`" if other else f"`{value}`"
    return found


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(value: Any) -> str:
    if value is None:
        return "absent"
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    return f"`{names.get(value, value) if isinstance(value, torch.dtype) else value}`"


def _allowed(key: str, type_name: str) -> str:
    """The values that validation accepts for ``key``; empty if it accepts all of its type."""
    parent, _, name = key.rpartition(".")
    config = PPOTrainerConfig()
    for switch, value in _SWITCHED_ON.items():
        config = replaced(config, switch, value)
    pattern = rf"(?:{re.escape(key)}|{re.escape(parent)}: {name}) (?:is|names) [^;]*; (?P<rest>.*)|"
    pattern += rf"{re.escape(parent)}: (?P<pair>{name} must .*)"
    found: dict[str, None] = {}
    for probe in _PROBES.get(type_name.removesuffix(" | None"), ()):
        for problem in validate_config(replaced(config, key, probe)):
            if about := re.fullmatch(pattern, problem):
                found |= dict.fromkeys(_plain(about["rest"] or about["pair"]))
    return "; ".join(found)


def _plain(sentence: str) -> Iterator[str]:
    """The values that a sentence of validation asks for, if it does."""
    for form, plain in _FORMS:
        if found := re.search(form, sentence):
            yield _SIZES.sub("", found.expand(plain))
            return
