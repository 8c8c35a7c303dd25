"""The rule reward: right cases, and texts that try to fool it."""

from __future__ import annotations

import pytest

from recipes.r1_zero.deepscaler import answers_equal, compute_score, last_boxed


def form(answer: str, think: str = "reasoning") -> str:
    return f"<think>{think}</think><answer>\\boxed{{{answer}}}</answer>"


@pytest.mark.parametrize(
    ("text", "truth", "has_format", "accuracy"),
    [
        (form("42"), "42", 1, 1),
        (f"  \n{form('42')}\n", "42", 1, 1),
        ("<think>a</think>\n\n<answer>It is \\boxed{42}.</answer>", "42", 1, 1),
        (form("41"), "42", 1, 0),
        ("\\boxed{42}", "42", 0, 1),
        ("The answer is 42", "42", 0, 0),
        (form("42") + form("42"), "42", 0, 1),
        (form("42") + " and so on", "42", 0, 1),
        ("so " + form("42"), "42", 0, 1),
        ("<think>a</think> junk <answer>\\boxed{42}</answer>", "42", 0, 1),
        ("<think></think><answer>\\boxed{42}</answer>", "42", 0, 1),
        ("<think>a</think><answer>\\boxed{}</answer>", "42", 0, 0),
        ("<think>a</think><answer>42</answer>", "42", 0, 0),
        ("<answer>\\boxed{42}</answer><think>a</think>", "42", 0, 1),
        ("<think>a<think></think><answer>\\boxed{42}</answer>", "42", 0, 1),
        ("<think>a</think><answer>\\boxed{42</answer>", "42", 0, 0),
        ("<think>\\boxed{42}</think><answer>\\boxed{1}</answer>", "42", 1, 0),
        ("<think>\\boxed{42}</think><answer>none</answer>", "42", 0, 1),
        ("<think>\\boxed{1}</think><answer>\\boxed{1} no, \\boxed{42}</answer>", "42", 1, 1),
        ("", "42", 0, 0),
        ("<think>" * 1000, "42", 0, 0),
        ("{" * 10000, "42", 0, 0),
    ],
)
def test_parts(text: str, truth: str, has_format: float, accuracy: float) -> None:
    result = compute_score("deepscaler", text, truth, {"index": 1})
    assert (result["format"], result["accuracy"]) == (has_format, accuracy)
    assert result["score"] == pytest.approx(0.33 * has_format + 0.67 * accuracy)


@pytest.mark.parametrize(
    ("given", "truth"),
    [
        ("042", "42"),
        ("1,000", "1000"),
        ("1,\\!000,\\!000", "1000000"),
        ("$12$", "12"),
        ("\\frac12", "0.5"),
        ("\\dfrac{1}{2}", "\\frac{1}{2}"),
        ("Evelyn", "\\text{Evelyn}"),
        ("1+x", "x+1"),
        ("60", "60^\\circ"),
        ("25", "25\\%"),
        ("-2+i, 3-i", "3 - i, -2 + i"),
        ("\\left(\\frac{1}{2}, 3\\right)", "(1/2,3)"),
    ],
)
def test_equal_answers(given: str, truth: str) -> None:
    assert answers_equal(given, truth)


@pytest.mark.parametrize(
    ("given", "truth"),
    [
        ("2", "12"),
        ("12", "2"),
        ("(1,234)", "(1234)"),
        ("1/0", "5"),
        ("", "3"),
        ("3", ""),
        ("9" * 600, "9" * 599),
        ("__import__('os').system('exit 1')", "3"),
        ("x", "y"),
        ("1 2", "12"),
    ],
)
def test_different_answers(given: str, truth: str) -> None:
    assert not answers_equal(given, truth)


def test_an_answer_is_never_executed(tmp_path: object) -> None:
    marker = f"{tmp_path}/marker"
    for code in (f"open('{marker}','w')", f"\\text{{open('{marker}','w')}}", f'exec(\'open("{marker}", "w")\')'):
        assert compute_score("deepscaler", form(code), "3")["accuracy"] == 0.0
    from pathlib import Path

    assert not Path(marker).exists()


def test_braces_are_matched() -> None:
    assert last_boxed("\\boxed{1} \\boxed{\\frac{1}{2}} x") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{\\{1\\}}") == "\\{1\\}"
    assert last_boxed("\\boxed{a\\") is None
    assert last_boxed("boxed{1}") is None
