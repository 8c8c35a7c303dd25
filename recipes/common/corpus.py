"""The corpus of the tiny base model: answers to the training problems, many wrong or badly formed, as in real text."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRONG_ANSWERS = 0.45  # fraction of the responses with a wrong answer
BROKEN_FORMS = 0.45  # fraction of the responses in a wrong form
LONGEST_SOLUTION = 48  # characters; a longer solution is not used as the thought


@dataclass(frozen=True)
class Example:
    """One text of the corpus: the prompt, and the response that the model learns (without the end token)."""

    messages: list[dict[str, str]]
    response: str


def no_solution(row: dict[str, Any]) -> str:
    return ""


@dataclass(frozen=True)
class CorpusStyle:
    """The forms of a recipe's responses: format texts with ``{thought}`` and ``{answer}``.

    ``whole_tokens`` are texts that the tiny tokenizer keeps as one token each; ``solution_of`` gives the worked
    solution of a row in verl's schema, or an empty text. ``examples_of`` takes their place where answers have several
    turns: of a row and an answer, right or wrong, every turn that the model learns. Both are sent to other processes,
    so they must be functions of a module, not lambdas.
    """

    whole_tokens: tuple[str, ...]
    well_formed: str = "{answer}"
    broken: tuple[str, ...] = ()
    solution_of: Callable[[dict[str, Any]], str] = no_solution
    examples_of: Callable[[dict[str, Any], str, random.Random], list[Example]] | None = None


def corpus_settings(style: CorpusStyle) -> dict[str, Any]:
    """All settings of the corpus beside rows and seed; a model made with other ones is stale."""
    forms = {"well_formed": style.well_formed, "broken": list(style.broken), "broken_part": BROKEN_FORMS}
    forms |= {"whole_tokens": list(style.whole_tokens)}
    if style.examples_of is not None:
        forms["examples_of"] = inspect.getsource(style.examples_of)
    return {**forms, "wrong_part": WRONG_ANSWERS, "longest_solution": LONGEST_SOLUTION}


def training_rows(parquet: Path) -> list[dict[str, Any]]:
    """The rows of a ``train.parquet`` in verl's schema."""
    import pyarrow.parquet as pq

    return pq.read_table(parquet).to_pylist()


def thought(row: dict[str, Any], answer: str, style: CorpusStyle) -> str:
    """A line of reasoning that leads to ``answer``: a short solution of the row with its result replaced."""
    truth, solution = row["reward_model"]["ground_truth"], style.solution_of(row)
    if len(solution) <= LONGEST_SOLUTION and solution.endswith(f"= {truth}"):
        return solution.removesuffix(truth) + answer
    return f"The answer is {answer}."


def wrong_answer(truth: str, others: Sequence[str], generator: random.Random) -> str:
    """An answer that is not ``truth``: a number near it, or the answer to another problem."""
    if truth.isdigit() and generator.random() < 0.5:
        return str(abs(int(truth) + generator.choice((-10, -3, -2, -1, 1, 2, 3, 10))))
    return generator.choice(others)


def examples(rows: Sequence[dict[str, Any]], seed: int, style: CorpusStyle) -> Iterator[Example]:
    """Yield examples forever: each round has the rows in a new order, with a newly drawn answer and form."""
    generator = random.Random(seed)
    answers = [row["reward_model"]["ground_truth"] for row in rows]
    order = list(range(len(rows)))
    while True:
        generator.shuffle(order)
        for index in order:
            row, answer = rows[index], answers[index]
            if generator.random() < WRONG_ANSWERS:
                answer = wrong_answer(answer, answers, generator)
            if style.examples_of is not None:
                yield from style.examples_of(row, answer, generator)
                continue
            form = generator.choice(style.broken) if generator.random() < BROKEN_FORMS else style.well_formed
            yield Example(row["prompt"], form.format(thought=thought(row, answer, style), answer=answer))
