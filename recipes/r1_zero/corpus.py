"""What the tiny base model reads: answers to the training problems, many wrong or badly formed, as in real text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRONG_ANSWERS = 0.45  # part of the responses whose answer is not the problem's
BROKEN_FORMS = 0.45  # part of the responses that miss the asked form
LONGEST_SOLUTION = 48  # characters; a longer solution is not read out as the thought

WELL_FORMED = "<think>{thought}</think><answer>\\boxed{{{answer}}}</answer>"
BROKEN = (
    "{thought}</think><answer>\\boxed{{{answer}}}</answer>",
    "<think>{thought}<answer>\\boxed{{{answer}}}</answer>",
    "<think>{thought}</think>\\boxed{{{answer}}}",
    "<think>{thought}</think><answer>{answer}</answer>",
    "<think>{thought}</think><answer>\\boxed{{{answer}}}",
    "<answer>\\boxed{{{answer}}}</answer><think>{thought}</think>",
    "<think>{thought}</think><think>{thought}</think><answer>\\boxed{{{answer}}}</answer>",
    "{thought}",
    "\\boxed{{{answer}}}",
)


@dataclass(frozen=True)
class Example:
    """One text of the corpus: what the model is shown, and what it learns to say (without the end token)."""

    messages: list[dict[str, str]]
    response: str


def corpus_settings() -> dict[str, Any]:
    """Everything that shapes the corpus beside rows and seed, so that a change of it makes a model stale."""
    forms = {"well_formed": WELL_FORMED, "broken": list(BROKEN), "broken_part": BROKEN_FORMS}
    return {**forms, "wrong_part": WRONG_ANSWERS, "longest_solution": LONGEST_SOLUTION}


def training_rows(parquet: Path) -> list[dict[str, Any]]:
    """The rows of a ``train.parquet`` in verl's schema."""
    import pyarrow.parquet as pq

    return pq.read_table(parquet).to_pylist()


def thought(row: dict[str, Any], answer: str) -> str:
    """A line of reasoning that leads to ``answer``: the row's solution with its result exchanged, when it is short."""
    truth, solution = row["reward_model"]["ground_truth"], row["extra_info"]["answer"]
    if len(solution) <= LONGEST_SOLUTION and solution.endswith(f"= {truth}"):
        return solution.removesuffix(truth) + answer
    return f"The answer is {answer}."


def wrong_answer(truth: str, others: Sequence[str], generator: random.Random) -> str:
    """An answer that is not ``truth``: a number near it, or what answers another problem."""
    if truth.isdigit() and generator.random() < 0.5:
        return str(abs(int(truth) + generator.choice((-10, -3, -2, -1, 1, 2, 3, 10))))
    return generator.choice(others)


def examples(rows: Sequence[dict[str, Any]], seed: int) -> Iterator[Example]:
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
            form = generator.choice(BROKEN) if generator.random() < BROKEN_FORMS else WELL_FORMED
            yield Example(row["prompt"], form.format(thought=thought(row, answer), answer=answer))
