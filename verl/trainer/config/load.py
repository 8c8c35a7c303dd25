"""Load YAML files and command-line overrides into one typed, frozen tree, with every mistake in one message."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.trainer.config.config import PPOTrainerConfig
from verl.trainer.config.data import TAKES_NAMES
from verl.trainer.config.fixed_keys import FIXED_KEYS, GIVEN_EMPTY, WithoutEffect, take_fixed_keys
from verl.trainer.config.idle_keys import idle_keys
from verl.trainer.config.model_keys import compare_model_keys, config_json, take_model_keys
from verl.trainer.config.override_text import in_quotes, literal, override, quoted
from verl.trainer.config.upstream_keys import ASYNC_KEYS, MOVED_KEYS, list_of_names, translate_upstream_keys, value_at

CONFIG_DIR = Path(__file__).resolve().parent
DEFAULT_CONFIG_NAME = "ppo_megatron_trainer"
# A leading ~ is expanded once, here, so that every reader of the tree opens the same file.
_PATH_KEYS = (
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.actor.megatron.dist_checkpointing_path",
    "actor_rollout_ref.ref.megatron.dist_checkpointing_path",
    "custom_reward_function.path",
    "data.custom_cls.path",
    "data.sampler.class_path",
    "trainer.default_local_dir",
    "trainer.report_dir",
    "trainer.resume_from_path",
)
_EXPERT_PARALLEL = "actor_rollout_ref.rollout.enable_expert_parallel"
_PROFILER = "actor_rollout_ref.actor.profiler."
_EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"
_ACTOR, _REF = "actor_rollout_ref.actor.megatron.", "actor_rollout_ref.ref.megatron."
_ROUTER_REPLAY = "actor_rollout_ref.actor.router_replay.mode"
# Keys of the engine that the reference has and does not use, and why.
_NOT_OF_REFERENCE = {
    **dict.fromkeys(
        ("grad_offload", "optimizer_offload", "swap_optimizer", "override_ddp_config"), "the reference is not trained"
    ),
    "param_offload": "the reference is in host memory but for its own pass",
    "sequence_parallel": "the actor's value counts for both",
}
_SEARCH_PATH = "hydra.searchpath="
_KEY = re.compile(r"[\w+./@-]+")
_NEAR = 0.6  # likeness of keys, 1 for equal ones, from which one may be a slip for the other
_TELLING = 5  # letters of a last part that names a key whatever stands before it


class ConfigError(ValueError):
    """The configuration cannot be used; the message lists every problem.

    ``config`` is the tree of what can be used, for the checks of the rest; None where there is no tree.
    """

    def __init__(self, problems: Sequence[str], config: PPOTrainerConfig | None = None) -> None:
        self.problems, self.config = list(problems), config
        count = len(self.problems)
        head = f"{count} problem{'s' if count > 1 else ''} in the configuration:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


def load_config(
    overrides: Sequence[str] = (),
    *,
    config_name: str = DEFAULT_CONFIG_NAME,
    config_dir: str | Path | None = None,
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
    taken = _restore_followers(composed)
    try:
        raw: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([str(error).strip().replace("\n", " ")]) from error
    assert isinstance(raw, dict)
    known = known_keys()
    of_model, problems = take_model_keys(raw), list[str]()
    for found in (translate_upstream_keys(raw), take_fixed_keys(raw), compare_model_keys(of_model, _model_path(raw))):
        taken, problems = taken + found[0], problems + found[1]
    leaves = _given(dict(_leaves(raw, known, problems)), taken)
    # ref.megatron is the actor's with the given keys replaced.
    inherited = {_REF + key.removeprefix(_ACTOR): value for key, value in leaves.items() if key.startswith(_ACTOR)}
    inherited |= {  # and ranks that only generate are profiled like those that train
        key.replace(".actor.", ".rollout.", 1): value for key, value in leaves.items() if key.startswith(_PROFILER)
    }
    schema = deepcopy(_writable_schema())  # an eighth of the time of making it
    for key, value in (inherited | leaves).items():
        try:
            OmegaConf.update(schema, key, literal(value))
        except OmegaConfBaseException as error:
            problems.append(f"{key} is {value!r}; {str(error).splitlines()[0]}")
    config = _typed(schema, leaves, taken)
    if problems:
        raise ConfigError(problems, config)
    taken += _unused_profiler_keys(config, leaves)
    reported = {item.key for item in taken}
    idle = idle_keys(config, _without_followers(leaves, composed))
    return config, taken + [item for item in idle if item.key not in reported]


def _typed(schema: DictConfig, leaves: dict[str, Any], taken: list[WithoutEffect]) -> PPOTrainerConfig:
    """The dataclasses of ``schema`` with what follows from other keys; adds those without effect to ``taken``."""
    for key in _PATH_KEYS:
        OmegaConf.update(schema, key, literal(_expand_home(OmegaConf.select(schema, key))))
    OmegaConf.update(schema, _EXTERNAL_LIB, literal(_absolute_files(OmegaConf.select(schema, _EXTERNAL_LIB))))
    config = OmegaConf.to_object(schema)
    assert isinstance(config, PPOTrainerConfig)
    experts = config_json(config.actor_rollout_ref.model.path)
    if experts is not None and not _can_split_experts(config, experts.get("n_routed_experts") or 0):
        has_none = not experts.get("n_routed_experts")
        if leaves.get(_EXPERT_PARALLEL) and has_none:
            taken.append(WithoutEffect(_EXPERT_PARALLEL, True, "the model has no experts"))
        if has_none or _EXPERT_PARALLEL not in leaves:
            OmegaConf.update(schema, _EXPERT_PARALLEL, False)
            config = OmegaConf.to_object(schema)
            assert isinstance(config, PPOTrainerConfig)
    if config.actor_rollout_ref.actor.router_replay.mode == "auto":
        OmegaConf.update(schema, _ROUTER_REPLAY, config.automatic_router_replay)
        config = OmegaConf.to_object(schema)
        assert isinstance(config, PPOTrainerConfig)
    return config


def _without_followers(leaves: dict[str, Any], composed: DictConfig) -> dict[str, Any]:
    """The leaves that are given themselves; the others follow other keys, as the base YAML file says."""
    written: Any = OmegaConf.to_container(composed, resolve=False)
    return {key: value for key, value in leaves.items() if not str(value_at(written, key)).startswith("${")}


def _unused_profiler_keys(config: PPOTrainerConfig, leaves: dict[str, Any]) -> list[WithoutEffect]:
    """Given keys of profilers that record nothing."""
    if not config.is_profiled:
        unused = {key: "no profiler is enabled" for key in leaves if "profiler." in key}
    elif not config.has_rollout_ranks:
        why = "actor and rollout share their processes: actor.profiler decides"
        unused = {key: why for key in leaves if key.startswith("actor_rollout_ref.rollout.profiler.")}
    else:
        unused = {}
    return [WithoutEffect(key, leaves[key], reason) for key, reason in unused.items()]


def _can_split_experts(config: PPOTrainerConfig, num_experts: int) -> bool:
    """Whether the ranks of a rollout engine can own whole experts, as many each."""
    rollout, world = config.actor_rollout_ref.rollout, config.rollout_world_size
    sizes = (rollout.tensor_model_parallel_size, rollout.data_parallel_size or 1, world)
    if min(sizes) < 1:
        return True  # validation says what is wrong with them
    ranks = max(1, rollout.experts_over(world))
    return num_experts > 0 and num_experts % ranks == 0


def known_keys(cls: type = PPOTrainerConfig, prefix: str = "") -> dict[str, bool]:
    """Every dotted leaf key of the schema, and whether it may hold keys of the user's own."""
    keys: dict[str, bool] = {}
    for field in dataclasses.fields(cls):
        default = field.default_factory() if callable(field.default_factory) else field.default
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(default):
            keys.update(known_keys(type(default), f"{name}."))
        else:
            keys[name] = isinstance(default, dict) or TAKES_NAMES in field.metadata
    return keys


def _restore_followers(composed: DictConfig) -> list[WithoutEffect]:
    """Let keys that are given empty follow others again as the base YAML file says; returns these keys."""
    base = yaml.safe_load((CONFIG_DIR / f"{DEFAULT_CONFIG_NAME}.yaml").read_text(encoding="utf-8"))
    taken = []
    for key in ("trainer.default_local_dir", "trainer.report_dir"):
        if OmegaConf.select(composed, key) == "":
            OmegaConf.update(composed, key, value_at(base, key))
            taken.append(WithoutEffect(key, "", GIVEN_EMPTY))
    return taken


def _given(leaves: dict[str, Any], taken: list[WithoutEffect]) -> dict[str, Any]:
    """The leaves that set something, lists of names as lists; adds those without effect to ``taken``.

    Null and "" are how upstream's scripts leave a key unset whose variable is empty; where "absent" is no value of
    the key, it keeps its default.
    """
    types = _field_types()
    kept: dict[str, Any] = {}
    for key, value in leaves.items():
        kind = types[key]
        if value in (None, "") and kind != "Any" and "None" not in kind:
            taken.append(WithoutEffect(key, value, GIVEN_EMPTY))
        elif key.startswith(_REF) and (reason := _NOT_OF_REFERENCE.get(key.removeprefix(_REF))):
            taken.append(WithoutEffect(key, value, reason))
        elif value == "" and "None" in kind:
            kept |= {} if key.startswith(_REF) else {key: None}  # the reference's keys follow the actor's
        else:
            kept[key] = list_of_names(value) if kind == "list[str]" else value
    return kept


def _field_types(cls: type = PPOTrainerConfig, prefix: str = "") -> dict[str, str]:
    """The annotation of every leaf key, as it is written."""
    types: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        default = field.default_factory() if callable(field.default_factory) else field.default
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(default):
            types |= _field_types(type(default), f"{name}.")
        else:
            types[name] = str(field.type)
    return types


def _model_path(raw: dict[str, Any]) -> str:
    return str(value_at(raw, "actor_rollout_ref.model.path") or PPOTrainerConfig().actor_rollout_ref.model.path)


def to_yaml(config: PPOTrainerConfig) -> str:
    """The whole tree as YAML, for --print-config and for the record beside a run's outputs."""
    return OmegaConf.to_yaml(OmegaConf.create(literal(dataclasses.asdict(config))))


def _forced(overrides: Sequence[str]) -> list[str]:
    """The overrides in the form that also adds a key which the YAML lacks; ``typed_config`` finds unknown keys."""
    forced, problems = [], []
    for given in overrides:
        try:
            text = _with_home(given)
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


def _leaves(
    tree: dict[str, Any], known: dict[str, bool], problems: list[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The keys of the schema in ``tree`` with their values; adds a sentence for everything else to ``problems``.

    A free-form dict is one value, and an empty section sets nothing.
    """
    for key, value in tree.items():
        name = f"{prefix}{key}"
        inside = next((leaf for leaf in known if leaf.startswith(f"{name}.")), None)
        if known.get(name, False) or (name in known and not isinstance(value, dict)):
            yield name, value
        elif isinstance(value, dict):
            yield from _leaves(value, known, problems, f"{name}.")
        elif inside is None:
            problems.append(_unknown(name, known))
        elif value is not None:
            problems.append(f"{name} is {value!r}; expected a section, with keys like {inside}")


def _expand_home(value: Any) -> Any:
    if isinstance(value, ListConfig):
        return [_expand_home(path) for path in value]
    if isinstance(value, DictConfig):
        return {name: _expand_home(value[name]) for name in value}
    return os.path.expanduser(value) if isinstance(value, str) else value


def _absolute_files(libraries: Any) -> Any:
    """Modules as they are, and Python files with whole paths: workers may run in another folder."""
    if isinstance(libraries, ListConfig):
        return [_absolute_files(library) for library in libraries]
    is_file = isinstance(libraries, str) and libraries.endswith(".py")
    return os.path.abspath(os.path.expanduser(libraries)) if is_file else libraries


def _unknown(key: str, known: dict[str, bool]) -> str:
    """The sentence about an unknown key, with the known one that it may have meant, if any is near."""
    leaf = key.rpartition(".")[2]
    near = {
        name: _likeness(key, name)
        for name in (*known, *FIXED_KEYS, *MOVED_KEYS, *ASYNC_KEYS)
        if _likeness(leaf, name.rpartition(".")[2]) >= _NEAR
    }
    same_leaf = {name: score for name, score in near.items() if name.rpartition(".")[2] == leaf}
    near = same_leaf or near
    best = max(near, key=lambda name: near[name], default=None)
    if best is None or (near[best] < _NEAR and (not same_leaf or len(leaf) < _TELLING)):
        return f"unknown key {key}, and none is like it; docs/parameters.md has them all"
    return f"unknown key {key}; the nearest known key is {best}"


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
