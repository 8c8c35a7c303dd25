r"""Answers after ``Answer:`` as DAPO grades them (arXiv 2503.14476; upstream: ``verl.utils.reward_score.math_dapo``).

The form in which they are compared is that of Minerva (arXiv 2206.14858, appendix D.1).
"""

from __future__ import annotations

import re
from typing import Any

from verl.utils.reward_score.boxed import inside_boxed, last_boxed

_LOOKED_AT, _LOOKED_AT_STRICT = 300, 100  # characters at the end of an answer

SUBSTITUTIONS = [
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
]
REMOVED_EXPRESSIONS = [
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots"),
]


def last_boxed_only_string(string: str) -> str | None:
    r"""The last ``\boxed{...}``; None where there is none or it is not closed."""
    return last_boxed(string)


def remove_boxed(s: str) -> str:
    r"""What ``\boxed{...}`` encloses; ValueError for another text."""
    return inside_boxed(s)


def normalize_final_answer(final_answer: str) -> str:
    """An answer in Minerva's form: what stands after its last ``=``, without units, spaces and LaTeX's marks."""
    answer = final_answer.rpartition("=")[2]
    for before, after in SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for expression in REMOVED_EXPRESSIONS:
        answer = answer.replace(expression, "")
    answer = re.sub(r"(.*?)\$(.*?)\$(.*)", r"$\2$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", answer)
    answer = re.sub(r"(sqrt)([^{])", r"sqrt{\2}", answer).replace("$", "")
    return (answer.replace(",", "") if answer.replace(",", "").isdigit() else answer).strip()


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = r"(?i)Answer\s*:\s*([^\n]+)"
) -> tuple[bool, str]:
    r"""(whether it is right, the answer): what ``answer_pattern`` finds last, both sides normalised.

    With ``gt_need_extract`` the truth is a solution, whose last ``\boxed{...}`` counts. ``[INVALID]`` is the answer of
    a text without one.
    """
    found = re.findall(answer_pattern, solution_str)
    answer = normalize_final_answer(found[-1] if found else "[INVALID]")
    truth = gt
    if gt_need_extract:
        boxed = last_boxed_only_string(gt)
        truth = "" if boxed is None else remove_boxed(boxed)
    return answer == normalize_final_answer(truth), answer


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: list[int] | None = None) -> tuple[int, str | None]:
    r"""(1 or -1, the answer): ``\boxed{...}`` in the last 100 characters has to be ``gt``, letter by letter.

    With four ``pause_tokens_index`` it is looked for from 100 characters before the last of them on.
    """
    if pause_tokens_index is not None:
        if len(pause_tokens_index) != 4:
            raise ValueError(f"pause_tokens_index has {len(pause_tokens_index)} places; expected 4")
        pred = pred[max(pause_tokens_index[-1] - _LOOKED_AT_STRICT, 0) :]
    else:
        pred = pred[-_LOOKED_AT_STRICT:]
    boxed = last_boxed_only_string(pred)
    answer = None if boxed is None else remove_boxed(boxed)
    return (1 if answer == gt else -1), answer


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str | None]:
    """(whether it is right, the answer that was read), by one of the two ways."""
    if strict_box_verify:
        correct, pred = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return correct == 1, pred
    return is_correct_minerva(solution_str, answer)


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    """``score`` 1.0 or -1.0, ``acc`` and ``pred``, of the last 300 characters."""
    correct, pred = verify(solution_str[-_LOOKED_AT:], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
