"""Problems by degree with worked examples before the question: the data of DEGREES and NUM_SHOTS."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from hf_formats.chat import chat_text
from hf_formats.stamps import is_made_from, write_stamp
from recipes.common import data_scripts
from recipes.common.options import INPUT, DataScriptParser, user_path
from recipes.common.two_sides import SIDES, QuestionForm
from recipes.gsm8k.word_problems import GENERATED, problem_sides

GSM8K = 4  # its degree
DEGREES = (*GENERATED, GSM8K)
LEAST_FITTING = 0.9  # fraction of the training problems whose prompts must fit, examples included
_PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"

Rows = list[dict[str, Any]]


def parse_degrees(text: str) -> tuple[int, ...]:
    """``1,2`` as sorted degrees; ValueError for anything that is none."""
    words = [word.strip() for word in text.split(",")]
    if not set(words) <= set(map(str, DEGREES)):
        raise ValueError(f"{text!r}: expected some of {','.join(map(str, DEGREES))} with commas between them")
    return tuple(sorted(set(map(int, words))))


def parse_num_shots(text: str) -> int:
    """A whole number of at least 0; ValueError for anything else."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r}: expected a whole number of at least 0")
    return int(text)


def set_name(degree: int) -> str:
    """The name of a degree's evaluation set, whose file is ``eval/<name>.parquet``."""
    return f"degree_{degree}"


def convert(
    form: QuestionForm,
    degrees: Sequence[int],
    input_dir: Path | None,
    local_dir: Path,
    num_shots: int,
    seed: int,
    fit: tuple[str, int] | None = None,
) -> list[str] | None:
    """Write ``train.parquet`` of all degrees, and the test side of each in a file of its own.

    A training problem that is in any test side is left out. ``num_shots`` training problems of a degree, which the seed
    chooses, stand as turns of the chat before each of its questions, and are not trained on.

    Args:
        input_dir: of GSM8K, where it is among the degrees.
        fit: a tokenizer's folder, and the number of tokens that prompts may have.

    Returns:
        lines for a person; None when the files are there, of these inputs.
    """
    files = form.input_files(input_dir) if input_dir is not None and GSM8K in degrees else {}
    if GSM8K in degrees and not files:
        raise ValueError(f"--degrees has {GSM8K}, which is {form.name}: give --input_dir")
    settings = {**form.settings, "degrees": degrees, "num_shots": num_shots, "seed": seed, "fit": fit}
    made_from = {"digest": data_scripts.digest_of(settings, chain.from_iterable(files.values()))}
    if is_made_from(local_dir, made_from):
        return None
    sides = {degree: _sides(form, degree, seed, files) for degree in degrees}
    tested = {row["extra_info"]["question"] for found in sides.values() for row in found["test"]}
    train: Rows = []
    outputs = {local_dir / "train.parquet": train}
    for degree, found in sides.items():
        usable = [row for row in found["train"] if row["extra_info"]["question"] not in tested]
        shots, rest = _choose_shots(usable, degree, num_shots, seed)
        for row in (*rest, *found["test"]):
            row["prompt"] = [*shots, *row["prompt"]]
        train += rest
        path = local_dir / ("test.parquet" if len(sides) == 1 else f"eval/{set_name(degree)}.parquet")
        outputs[path] = found["test"]
    if fit is not None:
        _check_fit(train, num_shots, *fit)
    for index, row in enumerate(train):
        row["extra_info"]["index"] = index
    for path, rows in outputs.items():
        data_scripts.write_parquet(rows, path, extra_texts=(*form.extra_texts, "degree"))
    write_stamp(local_dir, made_from, outputs)
    return [f"wrote {', '.join(f'{path.name} ({len(rows)} rows)' for path, rows in outputs.items())} to {local_dir}"]


def _sides(form: QuestionForm, degree: int, seed: int, files: Mapping[str, Sequence[Path]]) -> dict[str, Rows]:
    """Both sides of a degree in verl's schema; a generated degree has a data source of its own."""
    if degree == GSM8K:
        sides = {side: form.side_rows(side, files[side]) for side in SIDES}
    else:
        made = problem_sides(degree, seed)
        sides = {
            side: data_scripts.usable_rows(
                ((side, form.converted_row(row, side, index)) for index, row in enumerate(made[side])), side
            )
            for side in SIDES
        }
    for row in chain.from_iterable(sides.values()):
        row["extra_info"]["degree"] = str(degree)
        if degree != GSM8K:
            row["data_source"] = f"gsm8k/{set_name(degree)}"
    return sides


def _choose_shots(rows: Rows, degree: int, num_shots: int, seed: int) -> tuple[list[dict[str, str]], Rows]:
    """The examples' turns, question and worked answer, and the rows that are left."""
    if num_shots >= len(rows):
        raise ValueError(
            f"--num_shots {num_shots} (NUM_SHOTS): degree {degree} has {len(rows)} training problems, and one at least "
            "must be left"
        )
    chosen = random.Random(f"{seed} {degree}").sample(range(len(rows)), num_shots)
    turns = []
    for index in chosen:
        turns += [*rows[index]["prompt"], {"role": "assistant", "content": rows[index]["extra_info"]["answer"]}]
    return turns, [row for index, row in enumerate(rows) if index not in set(chosen)]


def _check_fit(rows: Rows, num_shots: int, tokenizer_path: str, max_prompt_length: int) -> None:
    """ValueError where more of the prompts are too long than a run may drop."""
    from hf_formats.tokenizer import load_tokenizer  # it imports transformers

    tokenizer = load_tokenizer(tokenizer_path)
    # Without a template of its own the run may bring one, or refuses the model: here the texts alone count.
    template = {} if tokenizer.chat_template else {"chat_template": _PLAIN}
    texts = [chat_text(tokenizer, row["prompt"], **template) for row in rows]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    num_fitting = sum(length <= max_prompt_length for length in lengths)
    if num_fitting < LEAST_FITTING * len(lengths):
        raise ValueError(
            f"--num_shots {num_shots} (NUM_SHOTS): {num_fitting} of {len(lengths)} training prompts have at most "
            f"{max_prompt_length} tokens, the longest has {max(lengths)}; give fewer examples, or raise "
            "data.max_prompt_length"
        )


def main(form: QuestionForm, description: str | None, default_dir: str, argv: list[str] | None = None) -> int:
    """Command line of ``form``'s data script with degrees and examples; without them it is ``form.main``."""
    parser = DataScriptParser(description)
    parser.add_argument(*INPUT, type=user_path, help=f"folder of {form.name}")
    parser.add_output("where the parquet files go", default_dir)
    parser.add_argument("--degrees", type=parse_degrees, help=f"some of 1,2,3,{GSM8K}; the last is {form.name}")
    parser.add_argument("--num_shots", type=parse_num_shots, default=0, help="worked examples before each question")
    parser.add_argument("--seed", type=int, default=42, help="of generated problems and of the examples (default: 42)")
    parser.add_argument("--tokenizer", help="HF directory; with --max_prompt_length refuses examples that do not fit")
    parser.add_argument("--max_prompt_length", type=int, help="longest prompt in tokens, template included")
    args = parser.parse_args(argv)
    if (args.tokenizer is None) != (args.max_prompt_length is None):
        parser.error("--tokenizer and --max_prompt_length check together: give both or neither")
    if args.input_dir is None and (args.degrees is None or GSM8K in args.degrees):
        parser.error(f"{form.name} is wanted: give {INPUT[0]}, or --degrees without {GSM8K}")

    def run() -> list[str] | None:
        if args.degrees is None and not args.num_shots:
            return form.report(args.input_dir, args.output_dir)
        degrees = args.degrees or (GSM8K,)
        fit = None if args.tokenizer is None else (args.tokenizer, args.max_prompt_length)
        return convert(form, degrees, args.input_dir, args.output_dir, args.num_shots, args.seed, fit)

    return data_scripts.run_data_script(run, args.output_dir)
