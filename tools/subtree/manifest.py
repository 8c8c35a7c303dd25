"""The manifests of third_party: which upstream a subtree mirrors, at which tag, and which of its modules."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "third_party"
REQUIRED = ("name", "url", "licence", "subtree", "upstream_root")
OPTIONAL = ("tag", "commit", "why", "mirrored", "recipes_pin")


@dataclass(frozen=True)
class Manifest:
    """One upstream."""

    name: str
    url: str
    licence: str  # SPDX identifier of the upstream
    subtree: str  # our folder; "" when only facts were taken
    upstream_root: str  # the folder of the upstream's checkout that our folder mirrors
    tag: str
    commit: str
    why: str
    recipes_pin: str  # what the published Ascend recipes pin, when that is another version
    mirrored: tuple[str, ...]  # module paths below the subtree whose path and public names are the upstream's

    @property
    def version(self) -> str:
        return self.tag or self.commit


def load_all(folder: Path = MANIFESTS) -> list[Manifest]:
    """Every manifest of ``folder``, by name; ValueError lists all that is wrong with them."""
    problems: list[str] = []
    found: list[Manifest] = []
    for path in sorted(folder.glob("*.toml")):
        try:
            found.append(_parse(path))
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


def _parse(path: Path) -> Manifest:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    wrong = [f"missing key '{key}'" for key in REQUIRED if key not in table]
    wrong += [f"unknown key '{key}'" for key in table if key not in REQUIRED + OPTIONAL]
    if not table.get("tag") and not table.get("commit"):
        wrong.append("neither 'tag' nor 'commit': a manifest pins one version")
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    texts = {key: str(table.get(key, "")) for key in (*REQUIRED, *OPTIONAL) if key != "mirrored"}
    return Manifest(**texts, mirrored=tuple(table.get("mirrored", ())))
