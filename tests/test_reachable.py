"""Everything public is reached from a command, a recipe, a page's code or a plug-in's names: no code is for nobody."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.reachability import Reachability

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("verl", "vllm", "vllm_ascend", "megatron", "mindspeed", "mindspeed_llm", "hf_formats", "recipes", "third_party"),
    "tools",
)
# What our own code calls by a name that it puts together, or runs as a file.
BY_STRING = {
    "megatron.core.dist_checkpointing.write_process": ("main",),  # in a new process
    "hf_formats.parent_death": ("main",),
    "recipes.r1_zero.deepscaler": (),  # the reward of the recipe's config
    "tools.workshop.bench.engines.engine_server": (),
    "tools.workshop.bench.engines.op_profile": (),
    "tools.workshop.bench.engines.rollout_engines": (),
    "tools.workshop.bench.engines.step_engines": (),
    "tools.workshop.bench.engines.train_engines": (),
    "tools.no_wheel": (),  # pip's hook in pyproject.toml
    "verl.utils.reward_score.sandbox.inside.jail": (),  # a graded program's own process
    "verl.utils.reward_score.sandbox.inside.privileges": (),
    "verl.utils.reward_score.sandbox.inside.seccomp": (),
}


def texts(root: Path) -> Iterator[Path]:
    """Scripts, configs and pages, without what only records others' names."""
    for path in sorted(root.rglob("*")):
        inner = path.relative_to(root)
        is_text = path.suffix in (".sh", ".md", ".yaml", ".toml") or path.name.startswith("Dockerfile")
        is_ours = inner.parts[0] not in ("tests", "outputs") and not any(part.startswith(".") for part in inner.parts)
        if is_text and is_ours and inner.name != "CHANGELOG.md" and inner.parts[:2] != ("third_party", "api"):
            yield path


def reachability(root: Path, planted: Mapping[str, str] = MappingProxyType({})) -> Reachability:
    """``planted``: module -> code at its end."""
    found = Reachability(root, PACKAGES)
    for module, code in planted.items():
        found.modules[module].read(ast.parse(code).body)
    for path in texts(root):
        found.use_text(path.read_text(encoding="utf-8"), names_code=path.suffix in (".sh", ".yaml", ".toml"))
    for recipe in sorted(path.parent.name for path in (root / "recipes").glob("*/recipe.py")):
        for module in ("recipe", "reward"):
            if f"recipes.{recipe}.{module}" in found.modules:
                found.use(f"recipes.{recipe}.{module}")
    for module, names in BY_STRING.items():
        found.use(module, *names)
    listed = tomllib.loads((root / "third_party" / "api" / "plug_ins.toml").read_text(encoding="utf-8"))
    for modules in listed.values():
        for module, names in modules.items():
            found.use(module, *names)
    return found


def test_nothing_public_is_for_nobody() -> None:
    assert reachability(ROOT).unused() == []


def test_what_is_planted_is_found() -> None:
    """A function that nobody calls, one that a package re-exports, and one that has the name of a living method."""
    planted = {
        "hf_formats.files": "def for_nobody(): ...\ndef passed_on(): return for_a_friend()\ndef for_a_friend(): ...",
        "hf_formats.fp8": "from hf_formats.files import passed_on",
        "hf_formats": "from hf_formats.fp8 import passed_on\n__all__ = ['passed_on']",
        "verl.protocol": "def concat(): ...",
    }
    assert sorted(reachability(ROOT, planted).unused()) == [
        "hf_formats.files.for_a_friend",
        "hf_formats.files.for_nobody",
        "hf_formats.files.passed_on",
        "verl.protocol.concat",
    ]
    planted["verl.trainer.main_ppo"] = "import hf_formats\nhf_formats.passed_on()"
    assert sorted(reachability(ROOT, planted).unused()) == ["hf_formats.files.for_nobody", "verl.protocol.concat"]
