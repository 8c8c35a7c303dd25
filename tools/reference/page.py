"""The page of parameters in Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from tools.reference.essentials import ESSENTIALS
from tools.reference.parameters import ACTOR_ENGINE, REFERENCE_ENGINE, Section, sections
from verl.trainer.config.fixed_keys import FIXED_KEYS

COMMAND = "python -m tools.reference"
_HEAD = f"""# Parameters

Every key of a run's configuration. A key is set in a recipe's YAML file or on the command line, as
`actor_rollout_ref.rollout.n=8`; a key that is not here is an error that names the nearest one, and all problems come in
one message before anything starts. Defaults are those of the code; a recipe's file may set others, and
`bash recipes/r1_zero/ray_start_grpo_npu.sh --print-plan` shows what a run resolves them to. Where the default is
"absent", the meaning says what leaving the key out does.

`{COMMAND} --write` generates this page from the config's classes and their docstrings, and `{COMMAND} --check` compares
it with them. The values of a key are those that its validation names in an error.
"""
_TYPES = {"Any": "text or list", "dict[str, Any]": "section"}


def render() -> str:
    """The whole page."""
    found = [_HEAD, "\n".join(_essentials()) + "\n", *(_table(section) for section in sections())]
    found.append(
        f"## `{REFERENCE_ENGINE}`\n\nThe keys of `{ACTOR_ENGINE}`, whose values count where none is given here.\n"
    )
    found.append("\n".join(_fixed()) + "\n")
    return "\n".join(found)


def _essentials() -> Iterator[str]:
    parameters = {item.key: item for section in sections() for item in section.parameters}
    yield f"## The {len(ESSENTIALS)} keys to know"
    yield ""
    yield "All other keys can stay as they are until a page or a message asks for them."
    yield ""
    yield "| key | default | what it does | touch it when |"
    yield "|---|---|---|---|"
    for key, occasion in ESSENTIALS.items():
        yield _row(f"`{key}`", parameters[key].default, _ticks(parameters[key].meaning.rstrip(".")), occasion)


def _table(section: Section) -> str:
    lines = [f"## `{section.key}`", "", _ticks(section.summary.replace("\n", " ").replace("  ", "\n\n")), ""]
    lines += ["| key | type, values | default | meaning |", "|---|---|---|---|"]
    for item in section.parameters:
        values = ": ".join(part for part in (_TYPES.get(item.type, item.type), item.allowed) if part)
        name = item.key.rpartition(".")[2]
        lines.append(_row(f"`{name}`", values, item.default, _ticks(item.meaning.rstrip("."))))
    return "\n".join(lines) + "\n"


def _fixed() -> Iterator[str]:
    yield "## Keys of upstream's scripts that need no action"
    yield ""
    yield "They are accepted so that upstream's scripts run: each is checked, then dropped. A `*` stands for any text."
    yield ""
    yield "| key | values | why |"
    yield "|---|---|---|"
    for key, (values, why) in FIXED_KEYS.items():
        yield _row(f"`{key}`", " or ".join(f"`{value}`" for value in values) or "any", why)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _ticks(text: str) -> str:
    return text.replace("``", "`")
