"""The page of parameters in Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from tools.reference.parameters import ACTOR_ENGINE, REFERENCE_ENGINE, Section, sections
from verl.trainer.config.accepted import FIXED_KEYS
from verl.workers.config.overrides import FIXED_TRANSFORMER_OVERRIDES

COMMAND = "python -m tools.reference"
_HEAD = f"""# Parameters

Every key of a run's configuration. A key is set in a recipe's YAML file or on the command line, as
`actor_rollout_ref.rollout.n=8`; a key that is not here is an error that names the nearest one, and all problems come in
one message before anything starts. Defaults are those of the code; a recipe's file may say something else, and
`bash recipes/r1_zero/ray_start_grpo_npu.sh --print-plan` shows what a run resolves them to. "absent" means that leaving
the key out has the meaning that is told.

This page is made from the config's classes and their docstrings: `{COMMAND} --write` writes it and `{COMMAND} --check`
compares it. What a key may be set to is what validation says when it is given something wrong.
"""
_TYPES = {"Any": "text or list", "dict[str, Any]": "section"}


def render() -> str:
    """The whole page."""
    found = [_HEAD, *(_table(section) for section in sections())]
    found.append(
        f"## `{REFERENCE_ENGINE}`\n\nThe keys of `{ACTOR_ENGINE}`, whose values count where none is given here.\n"
    )
    found.append("\n".join(_fixed()) + "\n")
    return "\n".join(found)


def _table(section: Section) -> str:
    lines = [f"## `{section.key}`", "", _ticks(section.summary.replace("\n", " ").replace("  ", "\n\n")), ""]
    lines += ["| key | type, values | default | meaning |", "|---|---|---|---|"]
    for item in section.parameters:
        values = ": ".join(part for part in (_TYPES.get(item.type, item.type), item.allowed) if part)
        name = item.key.rpartition(".")[2]
        lines.append(_row(f"`{name}`", values, item.default, _ticks(item.meaning.rstrip("."))))
    return "\n".join(lines) + "\n"


def _fixed() -> Iterator[str]:
    yield "## Keys of upstream's scripts with one right answer"
    yield ""
    yield "They are accepted so that upstream's scripts run, checked, and then dropped."
    yield ""
    yield "| key | values | why |"
    yield "|---|---|---|"
    for key, (values, why) in FIXED_KEYS.items():
        yield _row(f"`{key}`", " or ".join(f"`{value}`" for value in values), why)
    for key, (values, why) in FIXED_TRANSFORMER_OVERRIDES.items():
        yield _row(f"`override_transformer_config.{key}`", " or ".join(f"`{value}`" for value in values), why)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _ticks(text: str) -> str:
    return text.replace("``", "`")
