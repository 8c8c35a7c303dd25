"""What the tiny base model reads: answers to the training problems, many wrong or badly formed, as in real text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRONG_ANSWERS = 0.45  # part of the responses whose answer is not the problem's
BROKEN_FORMS = 0.45  # part of the responses that miss the asked form
LONGEST_SOLUTION = 48  # characters; a longer solution is not read out as the thought


@dataclass(frozen=True)
class CorpusStyle:
    """What a recipe's responses look like: format texts with ``{thought}`` and ``{answer}``.

    ``whole_tokens`` are texts that the tiny tokenizer keeps as one token each; ``solution_of`` gives the worked
    solution of a row in verl's schema, or an empty text. It is sent to processes: a function of a module, no lambda.
    """

    well_formed: str
    broken: tuple[str, ...]
    whole_tokens: tuple[str, ...]
    solution_of: Callable[[dict[str, Any]], str]


@dataclass(frozen=True)
class Example:
    """One text of the corpus: what the model is shown, and what it learns to say (without the end token)."""

    messages: list[dict[str, str]]
    response: str


def corpus_settings(style: CorpusStyle) -> dict[str, Any]:
    """Everything that shapes the corpus beside rows and seed, so that a change of it makes a model stale."""
    forms = {"well_formed": style.well_formed, "broken": list(style.broken), "broken_part": BROKEN_FORMS}
    forms |= {"whole_tokens": list(style.whole_tokens)}
    return {**forms, "wrong_part": WRONG_ANSWERS, "longest_solution": LONGEST_SOLUTION}


def training_rows(parquet: Path) -> list[dict[str, Any]]:
    """The rows of a ``train.parquet`` in verl's schema."""
    import pyarrow.parquet as pq

    return pq.read_table(parquet).to_pylist()


def thought(row: dict[str, Any], answer: str, style: CorpusStyle) -> str:
    """A line of reasoning that leads to ``answer``: the row's solution with its result exchanged, when it is short."""
    truth, solution = row["reward_model"]["ground_truth"], style.solution_of(row)
    if len(solution) <= LONGEST_SOLUTION and solution.endswith(f"= {truth}"):
        return solution.removesuffix(truth) + answer
    return f"The answer is {answer}."


def wrong_answer(truth: str, others: Sequence[str], generator: random.Random) -> str:
    """An answer that is not ``truth``: a number near it, or what answers another problem."""
    if truth.isdigit() and generator.random() < 0.5:
        return str(abs(int(truth) + generator.choice((-10, -3, -2, -1, 1, 2, 3, 10))))
    return generator.choice(others)


def examples(rows: Sequence[dict[str, Any]], seed: int, style: CorpusStyle) -> Iterator[Example]:
    """Endless examples: the rows in a new order in each round, answer and form drawn anew each time."""
    generator = random.Random(seed)
    answers = [row["reward_model"]["ground_truth"] for row in rows]
    order = list(range(len(rows)))
    while True:
        generator.shuffle(order)
        for index in order:
            row, answer = rows[index], answers[index]
            if generator.random() < WRONG_ANSWERS:
                answer = wrong_answer(answer, answers, generator)
            form = generator.choice(style.broken) if generator.random() < BROKEN_FORMS else style.well_formed
            yield Example(row["prompt"], form.format(thought=thought(row, answer, style), answer=answer))
