"""Load YAML files and command-line overrides into one typed, frozen tree, with every mistake in one message."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.trainer.config.config import PPOTrainerConfig
from verl.trainer.config.declared import declared_keys, idle_keys, other_names
from verl.trainer.config.engine_keys import rename_sections
from verl.trainer.config.fixed_keys import FIXED_KEYS, GIVEN_EMPTY, Given, WithoutEffect, take_fixed_keys
from verl.trainer.config.model_keys import config_json, take_model_keys
from verl.trainer.config.override_text import in_quotes, literal, override, quoted
from verl.trainer.config.upstream_keys import ASYNC_KEYS, list_of_names, translate_upstream_keys
from verl.workers.config.keys import flat

CONFIG_DIR = Path(__file__).resolve().parent
DEFAULT_CONFIG_NAME = "base"  # of this repository; without --config-name the program takes upstream's
_EXPERT_PARALLEL = "actor_rollout_ref.rollout.enable_expert_parallel"
_PROFILER = "actor_rollout_ref.actor.profiler."
_EXTERNAL_LIB, _MODEL_PATH = "actor_rollout_ref.model.external_lib", "actor_rollout_ref.model.path"
_ACTOR, _REF = "actor_rollout_ref.actor.megatron.", "actor_rollout_ref.ref.megatron."
_ROUTER_REPLAY = "actor_rollout_ref.actor.router_replay.mode"
_UPSTREAM, _UPSTREAM_CONFIG = "upstream_defaults", "ppo_megatron_trainer"
_SEARCH_PATH = "hydra.searchpath="
_KEY = re.compile(r"[\w+./@-]+")
_GROUP = re.compile(r"\+*\w+@([\w.]+)=(\w+)_(?:actor|ref|critic)")  # upstream's config group of an engine
_NEAR = 0.6  # likeness of keys, 1 for equal ones, from which one may be a slip for the other
_TELLING = 5  # letters of a last part that names a key whatever stands before it


class ConfigError(ValueError):
    """The configuration cannot be used; the message lists every problem.

    ``config`` is the tree of what can be used, for the checks of the rest; None where there is no tree. ``taken``: keys
    without effect.
    """

    def __init__(
        self, problems: Sequence[str], config: PPOTrainerConfig | None = None, taken: Sequence[WithoutEffect] = ()
    ) -> None:
        self.problems, self.config, self.taken = list(problems), config, list(taken)
        count = len(self.problems)
        head = f"{count} problem{'s' if count > 1 else ''} in the configuration:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


def load_config(
    overrides: Sequence[str] = (), *, config_name: str = DEFAULT_CONFIG_NAME, config_dir: str | Path | None = None
) -> PPOTrainerConfig:
    """Compose ``config_name`` with ``key=value`` overrides and return the typed tree.

    ``config_dir`` is the folder of a recipe's own YAML files; verl's are always on the search path. Raises
    ConfigError with every unknown key (the nearest known one beside it) and every value of a wrong type.
    """
    return typed_config(compose_config(overrides, config_name=config_name, config_dir=config_dir))


def compose_config(
    overrides: Sequence[str] = (), *, config_name: str = DEFAULT_CONFIG_NAME, config_dir: str | Path | None = None
) -> DictConfig:
    """The Hydra composition, not yet typed."""
    directory = Path(config_dir).resolve() if config_dir else CONFIG_DIR
    if not (directory / f"{config_name}.yaml").is_file():
        known = sorted(path.stem for path in directory.glob("*.yaml"))
        raise ConfigError([f"no config {config_name!r} in {directory}; there are {', '.join(known) or 'none'}"])
    try:
        search_path = [quoted(f"file://{CONFIG_DIR}")]
        for given in (text for text in overrides if text.startswith(_SEARCH_PATH)):
            folders: Any = OverridesParser.create().parse_override(given).value()
            search_path += map(in_quotes, folders)
        forced = _forced([text for text in overrides if not text.startswith(_SEARCH_PATH)])
        GlobalHydra.instance().clear()
        with initialize_config_dir(version_base=None, config_dir=str(directory)):
            return compose(config_name=config_name, overrides=[f"{_SEARCH_PATH}[{','.join(search_path)}]", *forced])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([str(error).strip().replace("\n", " ")]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError([f"{directory / config_name}.yaml is not YAML: {text}"]) from error


def typed_config(composed: DictConfig) -> PPOTrainerConfig:
    """Check every key and value of ``composed`` against the schema and build the frozen dataclasses."""
    return resolve_config(composed)[0]


def resolve_config(composed: DictConfig) -> tuple[PPOTrainerConfig, list[WithoutEffect]]:
    """The typed tree of ``composed``, and the keys in it that have no effect here, each with its reason."""
    keys = declared_keys()
    whole = frozenset(key for key, item in keys.items() if item.key.takes_names)
    try:
        taken = _restore_followers(composed)
        raw: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([str(error).strip().replace("\n", " ")]) from error
    # An empty section sets nothing.
    given = Given({k: v for k, v in flat(raw, whole=whole) if v != {} or (k in keys and keys[k].is_free)}, taken)
    given.defaults = _upstream_defaults() if given.values.pop(_UPSTREAM, None) else {}
    for key in [key for key, value in given.values.items() if value == MISSING]:
        given.problems.append(f"{key} has no value ({MISSING}); give it one")
        del given.values[key]
    rename_sections(given)
    take_model_keys(given, str(given.values.get(_MODEL_PATH) or keys[_MODEL_PATH].default))
    translate_upstream_keys(given, other_names())
    take_fixed_keys(given)
    leaves = _leaves(given)
    # ref.megatron is the actor's with the given keys replaced.
    values = {_REF + key.removeprefix(_ACTOR): value for key, value in leaves.items() if key.startswith(_ACTOR)}
    values |= {  # and ranks that only generate are profiled like those that train
        key.replace(".actor.", ".rollout.", 1): value for key, value in leaves.items() if key.startswith(_PROFILER)
    }
    values |= leaves
    # A leading ~ is expanded once, here, so that every reader of the tree opens the same file.
    for key, item in keys.items():
        if item.key.is_path:
            values[key] = _each_text(values.get(key, item.default), os.path.expanduser)
    values[_EXTERNAL_LIB] = _each_text(values.get(_EXTERNAL_LIB), _absolute_file)
    schema = deepcopy(_writable_schema())  # an eighth of the time of making it
    for key, value in values.items():
        try:
            OmegaConf.update(schema, key, literal(value))
        except OmegaConfBaseException as error:
            given.problems.append(f"{key} is {value!r}; {str(error).splitlines()[0]}")
    config = _with_followers(OmegaConf.to_object(schema), leaves, taken)
    if given.problems:
        raise ConfigError(given.problems, config, taken)
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    written = dict(flat(unresolved, whole=whole))
    # Keys that only follow others, as the base YAML file says, are not given.
    themselves = {
        key: value
        for key, value in leaves.items()
        if not str(written.get(key)).startswith("${") and (key not in given.defaults or given.defaults[key] != value)
    }
    reported = {item.key for item in taken}
    for idle in idle_keys(config, themselves):
        name = given.renamed.get(idle.key, idle.key)
        if name not in reported:
            taken.append(dataclasses.replace(idle, key=name))
    return config, taken


@cache
def _upstream_defaults() -> dict[str, Any]:
    """The values of upstream's config that differ from this repository's."""
    raw = yaml.safe_load((CONFIG_DIR / f"{_UPSTREAM_CONFIG}.yaml").read_text(encoding="utf-8"))
    return {key: value for key, value in flat(raw) if key not in ("defaults", _UPSTREAM)}


def other_defaults(composed: DictConfig) -> list[str]:
    """Upstream's defaults that ``composed`` has where this repository's configs have others, one line each."""
    if OmegaConf.select(composed, _UPSTREAM) is None:
        return []
    keys = declared_keys()
    return [
        f"{key}={value} (here {keys[key].default})"
        for key, value in _upstream_defaults().items()
        if OmegaConf.select(composed, key) == value
    ]


def _with_followers(config: Any, leaves: dict[str, Any], taken: list[WithoutEffect]) -> PPOTrainerConfig:
    """``config`` with what follows from the model and from other keys; adds keys without effect to ``taken``."""
    model = config_json(config.actor_rollout_ref.model.path)
    num_experts = (model or {}).get("n_routed_experts") or 0
    if model is not None and not _can_split_experts(config, num_experts):
        if leaves.get(_EXPERT_PARALLEL) and not num_experts:
            taken.append(WithoutEffect(_EXPERT_PARALLEL, True, "the model has no experts"))
        if not num_experts or _EXPERT_PARALLEL not in leaves:
            config = replaced(config, _EXPERT_PARALLEL, False)
    if config.actor_rollout_ref.actor.router_replay.mode == "auto":
        has_experts = model is None or num_experts > 0
        config = replaced(config, _ROUTER_REPLAY, config.automatic_router_replay if has_experts else "disabled")
    return config


def replaced(node: Any, key: str, value: Any) -> Any:
    """``node`` with another value of a dotted key."""
    name, _, inner = key.partition(".")
    return dataclasses.replace(node, **{name: replaced(getattr(node, name), inner, value) if inner else value})


def _can_split_experts(config: PPOTrainerConfig, num_experts: int) -> bool:
    """Whether the ranks of a rollout engine can own whole experts, as many each."""
    rollout, world = config.actor_rollout_ref.rollout, config.rollout_world_size
    sizes = (rollout.tensor_model_parallel_size, rollout.data_parallel_size or 1, world)
    if min(sizes) < 1:
        return True  # validation says what is wrong with them
    ranks = max(1, rollout.experts_over(world))
    return num_experts > 0 and num_experts % ranks == 0


def _restore_followers(composed: DictConfig) -> list[WithoutEffect]:
    """Let paths that are given empty follow others again as the base YAML file says; returns their keys."""
    base = dict(flat(yaml.safe_load((CONFIG_DIR / f"{DEFAULT_CONFIG_NAME}.yaml").read_text(encoding="utf-8"))))
    paths = ("trainer.default_local_dir", "trainer.report_dir")
    empty = [key for key in paths if OmegaConf.select(composed, key) == ""]
    for key in empty:
        OmegaConf.update(composed, key, base[key])
    return [WithoutEffect(key, "", GIVEN_EMPTY) for key in empty]


def _leaves(given: Given) -> dict[str, Any]:
    """The keys of the schema that set something, free sections as one value; reports the others.

    Null and "" are how upstream's scripts leave a key unset whose variable is empty; where "absent" is no value of
    the key, it keeps its default.
    """
    keys, found = declared_keys(), dict[str, Any]()
    for name, value in list(given.values.items()):
        item = keys.get(name)
        free = next((key for key in keys if keys[key].is_free and name.startswith(f"{key}.")), None)
        if free is not None:
            *sections, leaf = name.removeprefix(f"{free}.").split(".")
            node = found.setdefault(free, {})
            for section in sections:
                node = node.setdefault(section, {})
            node[leaf] = value
        elif item is None:
            inside = next((key for key in keys if key.startswith(f"{name}.")), None)
            if inside is None:
                given.problems.append(_unknown(name))
            elif value is not None:
                given.problems.append(f"{name} is {value!r}; expected a section, with keys like {inside}")
        elif value in (None, "") and item.type != "Any" and "None" not in item.type:
            given.take(name, GIVEN_EMPTY)
        elif value == "" and "None" in item.type:
            found |= {} if name.startswith(_REF) else {name: None}  # the reference's keys follow the actor's
        else:
            found[name] = list_of_names(value) if item.type == "list[str]" else value
    for name in [name for name in found if name.startswith(_REF) and keys[name].key.not_of_reference]:
        given.values[name] = found.pop(name)
        given.take(name, keys[name].key.not_of_reference)
    return found


def to_yaml(config: PPOTrainerConfig) -> str:
    """The whole tree as YAML, for --print-config and for the record beside a run's outputs."""
    return OmegaConf.to_yaml(OmegaConf.create(literal(dataclasses.asdict(config))))


def _forced(overrides: Sequence[str]) -> list[str]:
    """The overrides in the form that also adds a key which the YAML lacks; ``typed_config`` finds unknown keys."""
    forced, problems = [], []
    for given in overrides:
        try:
            text = _with_home(_GROUP.sub(r"\1.model_engine=\2", given))
            parsed = OverridesParser.create().parse_override(text)
        except (HydraException, RuntimeError) as error:  # RuntimeError: this user has no home
            why = str(error).strip().splitlines()[0]
            key, _, value = given.partition("=")
            advice = (
                f"; other characters stand in quotes, in a shell {shlex.quote(override(key, value))}" if value else ""
            )
            problems.append(f"{given!r} is not an override: {why}; expected key=value, in Hydra's grammar{advice}")
        else:
            forced.append(text if parsed.is_delete() or text.startswith("+") else f"++{text}")
    if problems:
        raise ConfigError(problems)
    return forced


def _with_home(given: str) -> str:
    """The override with a leading ~ of its value expanded, which neither shells nor Hydra do."""
    key, _, path = given.partition("=~/")
    if not path or not _KEY.fullmatch(key):
        return given
    below: Any = OverridesParser.create().parse_override(f"{key}=/{path}").value()
    return f"{key}={in_quotes(literal(str(Path.home())) + below)}" if isinstance(below, str) else given


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with every text of it changed: itself, or those of a list or a dict."""
    if isinstance(value, list):
        return [_each_text(entry, change) for entry in value]
    if isinstance(value, dict):
        return {name: _each_text(entry, change) for name, entry in value.items()}
    return change(value) if isinstance(value, str) else value


def _absolute_file(library: str) -> str:
    """A module as it is, and a Python file with its whole path: workers may run in another folder."""
    return os.path.abspath(os.path.expanduser(library)) if library.endswith(".py") else library


def _unknown(key: str) -> str:
    """The sentence about an unknown key, with the known one that it may have meant, if any is near."""
    leaf = key.rpartition(".")[2]
    leaves = {name: name.rpartition(".")[2] for name in (*declared_keys(), *FIXED_KEYS, *other_names(), *ASYNC_KEYS)}
    same_leaf = [name for name in leaves if leaves[name] == leaf]
    near = same_leaf or [name for name in leaves if _likeness(leaf, leaves[name]) >= _NEAR]
    best = max(near, key=lambda name: _likeness(key, name), default="")
    if best and (_likeness(key, best) >= _NEAR or (same_leaf and len(leaf) >= _TELLING)):
        return f"unknown key {key}; the nearest known key is {best}"
    return f"unknown key {key}, and none is like it; docs/parameters.md has them all"


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


@cache
def _writable_schema() -> DictConfig:
    schema = OmegaConf.structured(PPOTrainerConfig)
    assert isinstance(schema, DictConfig)
    unlock(schema)
    return schema


def unlock(node: DictConfig) -> None:
    """Make a copy of the schema writable: OmegaConf makes the nodes of frozen dataclasses read-only."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            unlock(child)
