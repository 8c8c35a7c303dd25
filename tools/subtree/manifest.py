"""The manifests of third_party: which upstream a subtree mirrors, at which tag, and which of its modules."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "third_party"
MANIFESTS = ROOT / FOLDER
NAME = re.compile(r"[a-z0-9_]+")
_LISTS = ("mirrored", "older", "configs", "options")


@dataclass(frozen=True)
class Manifest:
    """One upstream."""

    name: str
    url: str
    licence: str  # SPDX identifier of the upstream
    subtree: str  # our folder; "" when only facts were taken
    upstream_root: str  # the folder of the upstream's checkout that our folder mirrors; "" = all of it
    licence_note: str = ""  # what to know before taking one of its files
    tag: str = ""
    commit: str = ""
    why: str = ""
    recipes_pin: str = ""  # what the published Ascend recipes pin, when that is another version
    mirrored: tuple[str, ...] = ()  # module paths below the subtree, or patterns, with the upstream's path and names
    older: tuple[str, ...] = ()  # modules that the pinned version no longer has, kept with the API of ``older_tag``
    older_tag: str = ""
    package: str = ""  # the name under which versions are released, for where the url cannot be reached
    configs: tuple[str, ...] = ()  # patterns of its main Hydra configs, whose keys ours accepts
    options: tuple[str, ...] = ()  # the upstream's options that a key or flag of ours has with its meaning

    @property
    def version(self) -> str:
        return self.tag or self.commit

    @property
    def mirrored_paths(self) -> tuple[str, ...]:
        """The mirrored modules that are named one by one."""
        return tuple(module for module in self.mirrored if "*" not in module)

    @property
    def path(self) -> str:
        """The manifest's file below the repository's root."""
        return f"{FOLDER}/{self.name}.toml"

    def mirrors(self, modules: Iterable[str]) -> list[str]:
        """Those of ``modules`` that are mirrored, of the older tag too; ``*`` in a pattern also crosses folders."""
        patterns = (*self.mirrored, *self.older)
        return [module for module in modules if any(fnmatchcase(module, pattern) for pattern in patterns)]


def load_all(folder: Path = MANIFESTS) -> list[Manifest]:
    """Every manifest of ``folder``, by name; ValueError lists all that is wrong with them."""
    problems: list[str] = []
    found: list[Manifest] = []
    for path in sorted(folder.glob("*.toml")):
        try:
            found.append(parse(path.read_text(encoding="utf-8"), str(path)))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return sorted(found, key=lambda manifest: manifest.name)


def load(name: str, folder: Path = MANIFESTS) -> Manifest:
    """The manifest called ``name``; ValueError lists the known ones when there is none."""
    manifests = {manifest.name: manifest for manifest in load_all(folder)}
    if name not in manifests:
        raise ValueError(f"no upstream is called '{name}' in {folder}: expected one of {', '.join(manifests)}")
    return manifests[name]


def parse(text: str, source: str) -> Manifest:
    """The manifest in ``text``; ValueError names everything that is wrong with it, and ``source``."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: {error}") from error
    known = {field.name: field.default for field in fields(Manifest)}
    wrong = [f"missing key '{key}'" for key in known if known[key] is MISSING and key not in table]
    wrong += [f"unknown key '{key}'" for key in table if key not in known]
    if not table.get("tag") and not table.get("commit"):
        wrong.append("neither 'tag' nor 'commit': a manifest pins one version")
    if "name" in table and not NAME.fullmatch(str(table["name"])):
        wrong.append(f"name = '{table['name']}': expected lower-case letters, digits and _")
    if wrong:
        raise ValueError(f"{source}: {'; '.join(wrong)}")
    values: dict[str, Any] = {key: str(value) for key, value in table.items()}
    return Manifest(**values | {key: tuple(table.get(key, ())) for key in _LISTS})


def with_pin(text: str, tag: str, commit: str) -> str:
    """A manifest's text with another pin; every other line stays as it is, comments too."""
    lines = text.splitlines()
    old = [index for index, line in enumerate(lines) if re.match(r"(tag|commit)\s*=", line)]
    first = old[0] if old else len(lines)
    others = [line for index, line in enumerate(lines) if index not in old]
    pin = [_line(key, value) for key, value in (("tag", tag), ("commit", commit)) if value]
    return "\n".join([*others[:first], *pin, *others[first:]]) + "\n"


def _line(key: str, value: str) -> str:
    if any(character in value for character in '"\\\n'):
        raise ValueError(f"{key} = {value!r}: no quote, backslash or line break can be in a manifest")
    return f'{key} = "{value}"'
