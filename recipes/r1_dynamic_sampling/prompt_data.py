"""From JSON lines of prompts and labels (slime's ``--prompt-data``, ``--eval-prompt-data``) to verl's parquet files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: the repository's packages must be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_formats.stamps import is_made_from, write_stamp
from recipes.common import data_scripts
from recipes.common.options import DataScriptParser, user_path

HELD_OUT_SET = "held_out"  # the evaluation set when none is given
FORM_VERSION = 1  # raise when the rows would come out differently from the same input


def read_lines(file: Path, input_key: str, label_key: str, source: str) -> list[dict[str, Any]]:
    """Rows in verl's schema; ValueError that names file and line of every one that cannot be used."""
    lines = [(number, line) for number, line in enumerate(data_scripts.text_lines(file), start=1) if line.strip()]
    rows = (
        (f"{file}: line {number}", _converted_row(line, input_key, label_key, source, index))
        for index, (number, line) in enumerate(lines)
    )
    return data_scripts.usable_rows(rows, file)


def _converted_row(line: str, input_key: str, label_key: str, source: str, index: int) -> dict[str, Any] | str:
    """The row of one line, or the reason why it cannot be used."""
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        return f"is not JSON ({error})"
    if not isinstance(given, dict):
        return f"is a {type(given).__name__}, not an object with {input_key} and {label_key}"
    prompt, label = given.get(input_key), given.get(label_key)
    chat = data_scripts.messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    if chat is None:
        return f"{input_key} is {str(prompt)[:60]!r}; expected a text, or messages of role and content"
    if isinstance(label, bool) or not isinstance(label, str | int | float) or not str(label).strip():
        return f"{label_key} is {label!r}; expected the answer as text or number"
    return data_scripts.verl_row(source, chat, str(label), source, index)


def set_pairs(words: Sequence[str]) -> dict[str, Path]:
    """``name path name path ...`` as evaluation sets by name; ValueError when these are not such pairs."""
    names = words[::2]
    if len(words) % 2:
        raise ValueError(f"{' '.join(words)!r} are {len(words)} words; expected name path, and again for every set")
    if len(set(names)) < len(names):
        raise ValueError(f"{' '.join(words)!r} has a name twice; give every evaluation set its own")
    for name in names:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"{name!r} cannot name an evaluation set; expected letters, digits, _ and -")
    return {name: Path(path).expanduser().absolute() for name, path in zip(names, words[1::2], strict=True)}


def convert(
    prompt_data: Path, eval_sets: dict[str, Path], local_dir: Path, input_key: str, label_key: str, held_out: int
) -> dict[str, int] | None:
    """Write ``train.parquet`` and ``eval/<name>.parquet``; return the rows of each, or None when they are current.

    Without evaluation sets the last ``held_out`` prompts become the set ``held_out``, and are not trained on. Nothing
    is written unless every row can be used.
    """
    outputs = {"train": local_dir / "train.parquet"}
    outputs |= {name: local_dir / "eval" / f"{name}.parquet" for name in eval_sets or (HELD_OUT_SET,)}
    settings = {"form": FORM_VERSION, "keys": [input_key, label_key], "sets": sorted(eval_sets), "held_out": held_out}
    inputs = [prompt_data, *eval_sets.values()]
    if missing := [f"{file}: no such file" for file in inputs if not file.is_file()]:
        raise ValueError("\n".join(missing))
    made_from = {"digest": data_scripts.digest_of(settings, inputs)}
    if is_made_from(local_dir, made_from):
        return None
    rows = {"train": read_lines(prompt_data, input_key, label_key, prompt_data.stem)}
    for name, file in eval_sets.items():
        rows[name] = read_lines(file, input_key, label_key, name)
    if not eval_sets:
        if held_out < 1 or len(rows["train"]) <= held_out:
            raise ValueError(
                f"{prompt_data} has {len(rows['train'])} prompts, {held_out} of them to hold out: give evaluation "
                "sets, more prompts, or another --held_out"
            )
        rows[HELD_OUT_SET] = rows["train"][-held_out:]
        rows["train"] = rows["train"][:-held_out]
    for name, path in outputs.items():
        data_scripts.write_parquet(rows[name], path)
    write_stamp(local_dir, made_from, outputs.values())
    return {name: len(rows[name]) for name in outputs}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status, 2 for an input that a user can mend."""
    parser = DataScriptParser(__doc__)
    parser.add_argument("--prompt_data", type=user_path, required=True, help="JSON lines to train on")
    parser.add_argument(
        "--eval_prompt_data", nargs="*", default=[], metavar="NAME PATH", help="evaluation sets by name"
    )
    parser.add_argument("--input_key", default="prompt", help="a text, or a list of messages (default: prompt)")
    parser.add_argument("--label_key", default="label", help="the answer (default: label)")
    parser.add_argument(
        "--held_out", type=int, default=256, help="prompts that are evaluated on without evaluation sets"
    )
    parser.add_output("where the parquet files go")
    args = parser.parse_args(argv)
    output_dir: Path = args.output_dir

    def run() -> list[str] | None:
        sets = set_pairs(args.eval_prompt_data)
        counts = convert(args.prompt_data, sets, output_dir, args.input_key, args.label_key, args.held_out)
        rows = ", ".join(f"{name} {count}" for name, count in (counts or {}).items())
        return None if counts is None else [f"wrote parquet files to {output_dir}: {rows} rows"]

    return data_scripts.run_data_script(run, output_dir)


if __name__ == "__main__":
    sys.exit(main())
