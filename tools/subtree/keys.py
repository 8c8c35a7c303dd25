"""What a new version changes in the keys of verl's configs, and what our config says when it is given each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

from omegaconf import OmegaConf

from tools.subtree.compare import Entry
from tools.subtree.configs import Defaults
from verl.trainer.config import ConfigError, resolve_config
from verl.trainer.config.declared import declared_keys

RENAMED, DEFAULTS = "Keys with another name, as far as can be guessed", "Keys with another default"
ADDED, DROPPED = "New keys", "Keys that are gone"
NOT_HERE, _ACTED_ON = "not accepted here", "acted on"
_SAME_PARTS = 2  # parts of two dotted keys, from either end, that make a new name likely
_ASYNC = "fully_async"


def changes(old: Defaults, new: Defaults) -> Iterator[Entry]:
    """Every change between the keys of two versions, in the order of the keys."""
    renamed = {key: to for key in old.keys() - new.keys() if (to := _new_name(key, new.keys() - old.keys()))}
    for key in sorted(old.keys() | new.keys()):
        what = _other_default(old.get(key, {}), new.get(key, {}))
        if key in old and key in new and not what:
            continue
        is_accepted, here = _here(key, new.get(key) or old[key])
        if key in renamed:
            is_there, there = _here(renamed[key], new[renamed[key]])
            yield RENAMED, is_there or not is_accepted, f"`{key}` -> `{renamed[key]}`; {here}; the new name is {there}"
        elif key not in new:
            yield DROPPED, True, f"`{key}`; {here}"
        elif key not in old:
            yield ADDED, is_accepted, f"`{key}` {' or '.join(_shown(_distinct(new[key])))}; {here}"
        else:
            is_done = here == NOT_HERE or (is_accepted and (not here.startswith(_ACTED_ON) or _is_ours(key, new[key])))
            yield DEFAULTS, is_done, f"`{key}` {what}; {here}"


def _is_ours(key: str, defaults: Mapping[str, Any]) -> bool:
    return all(_follows(value) or value == declared_keys()[key].default for value in defaults.values())


def _here(key: str, defaults: Mapping[str, Any]) -> tuple[bool, str]:
    """(whether our config accepts the key with each of the upstream's own defaults, what it does here)."""
    schedule = {"trainer": {"schedule": _ASYNC}} if all(name.startswith(_ASYNC) for name in defaults) else {}
    answers = [_answer(key, value, schedule) for value in _distinct(defaults)]
    return next((answer for answer in answers if not answer[0]), answers[0])


def _answer(key: str, value: Any, given: Mapping[str, Any]) -> tuple[bool, str]:
    tree = OmegaConf.create(dict(given))
    is_unknown = _follows(value) and "oc.select:" not in value  # it follows a key that must be there
    OmegaConf.update(tree, key, None if is_unknown else value, force_add=True)
    try:
        taken = resolve_config(tree)[1]
    except ConfigError as error:
        problem = error.problems[0]
        return False, NOT_HERE if problem.startswith("unknown key") else f"refused with this default: {problem}"
    if taken:
        return True, f"without effect ({taken[0].reason})"
    if key in declared_keys():
        return True, f"{_ACTED_ON}, `{declared_keys()[key].default!r}` here"
    return True, "an empty section, which sets nothing" if value == {} else "accepted, under another name"


def _new_name(key: str, candidates: Iterable[str]) -> str:
    """The new key that is most likely the old ``key``: the same last part, and one more part from either end."""

    def score(other: str) -> tuple[int, float]:
        parts, others = key.split("."), other.split(".")
        same = _num_same(parts, others) + _num_same(parts[::-1], others[::-1])
        return same, SequenceMatcher(None, key, other).ratio()

    leaf = key.rpartition(".")[2]
    best = max((other for other in candidates if other.rpartition(".")[2] == leaf), key=score, default="")
    return best if best and score(best)[0] >= _SAME_PARTS else ""


def _num_same(one: list[str], other: list[str]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def _other_default(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """From what to what, of the configs that both versions have; empty where none has another default."""
    pairs = [_shown([old[name], new[name]]) for name in old if name in new]
    return "; ".join(sorted({f"{before} -> {after}" for before, after in pairs if before != after}))


def _distinct(defaults: Mapping[str, Any]) -> list[Any]:
    return list({repr(value): value for value in defaults.values()}.values())


def _shown(values: Iterable[Any]) -> list[str]:
    return [f"`{value!r}`" for value in values]


def _follows(value: Any) -> bool:
    """Whether a default is a text that follows other keys."""
    return isinstance(value, str) and "${" in value
