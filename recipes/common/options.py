"""The command line that all data scripts share: one set of names, and an unknown one is refused by name."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

OUTPUT = ("--output_dir", "--output", "--local_dir", "--local_save_dir")  # the last two are upstream's
INPUT = ("--input_dir", "--local_dataset_path")  # the last one is upstream's
ELSEWHERE = {"--hdfs_dir": "this command writes to a local folder alone; copy that one (hdfs dfs -put FOLDER HDFS_DIR)"}


class DataScriptParser(argparse.ArgumentParser):
    """Takes every option with ``_`` and with ``-`` between its words, and none by a part of its name."""

    def __init__(self, description: str | None, **others: Any) -> None:
        super().__init__(description=description, allow_abbrev=False, **others)

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:  # type: ignore[override]
        """As in argparse; a name that starts with ``--`` stands for both of its forms."""
        forms = [form for name in names for form in dict.fromkeys((name, _hyphened(name), _underscored(name)))]
        return super().add_argument(*forms, **settings)

    def add_output(self, what: str, default: str | None = None) -> None:
        """Adds ``output_dir``, under every name of ``OUTPUT``; required without a default."""
        needed = default is None
        self.add_argument(*OUTPUT, type=user_path, action=_OneFolder, default=default, required=needed, help=what)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse; an option that is not there is named, with those that are like it."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return found

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        options = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        if not options:
            self.error(f"{' '.join(unknown)}: no option comes before this")
        known = [action.option_strings[0] for action in self._actions if action.dest != "help"]
        problems = []
        for option in options:
            near = difflib.get_close_matches(_underscored(option), self._option_string_actions, n=1, cutoff=0.7)
            better = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            problems.append(f"{option} is no option of this command: {ELSEWHERE.get(_underscored(option), better)}")
        self.error("; ".join(problems))


class _OneFolder(argparse.Action):
    """Stores the value; another one under another of its names is refused."""

    first: tuple[str | None, Any] | None = None

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, value = self.first = self.first or (option_string, values)
        if name != option_string and value != values:
            parser.error(f"{name} {value} and {option_string} {values} name the same folder; give one of them")
        setattr(namespace, self.dest, values)


def user_path(text: str) -> Path:
    """The path of an argument, in which a ``~`` is the user's folder."""
    return Path(text).expanduser()


def _hyphened(name: str) -> str:
    return f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name


def _underscored(name: str) -> str:
    return f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
