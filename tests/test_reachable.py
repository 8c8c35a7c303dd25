"""Everything public is reached from a command, a recipe, a page's code or a plug-in's names: no code is for nobody."""

from __future__ import annotations

import ast
import os
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.reachability import Reachability, nodes, statements

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
    "tools.workshop.bench.engines.rollout_engines": (),
    "tools.workshop.bench.engines.step_engines": (),
    "tools.workshop.bench.engines.train_engines": (),
    "recipes.r1_tools.with_example": ("WithExample",),  # EXAMPLE=yes, by its path
    "verl.experimental.agent_loop.environment": ("Environment",),  # a user's base class, which docs/turns.md shows
    "verl.experimental.agent_loop.tool_environment": ("ToolEnvironment",),  # tools.yaml's, by its path
    "verl.utils.reward_score.environment": ("compute_score",),  # a run's custom_reward_function.path
    "tools.no_wheel": (),  # pip's hook in pyproject.toml
    "verl.utils.reward_score.sandbox.inside.jail": (),  # a graded program's own process
    "verl.utils.reward_score.sandbox.inside.privileges": (),
    "verl.utils.reward_score.sandbox.inside.seccomp": (),
}


@cache
def texts(root: Path) -> list[Path]:
    """Scripts, configs and pages, without what only records others' names."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        is_top = Path(folder) == root
        folders[:] = [name for name in folders if name[0] != "." and not (is_top and name in ("tests", "outputs"))]
        found += (Path(folder, name) for name in files if name[0] != ".")
    return [
        path
        for path in sorted(found)
        if path.suffix in (".sh", ".md", ".yaml", ".toml") or path.name.startswith("Dockerfile")
        if path.name != "CHANGELOG.md" and path.relative_to(root).parts[:2] != ("third_party", "api")
    ]


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


@pytest.fixture(scope="module", autouse=True)
def sources_are_read_once() -> Iterator[None]:
    """The trees of all our code, which these tests share, are freed after them."""
    yield
    statements.cache_clear()
    nodes.cache_clear()


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
