"""Grading of final answers: gold answers of real sets are their own and not another's, hostile texts cost little."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from recipes.common.math_answers import answers_equal, is_small, last_boxed, rational, true_answer

REAL_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
LIMIT_S = 6.0  # CPU time of one comparison; the slowest takes 0.5 s, and four times that on a slow and busy machine


def gold_answers(name: str) -> list[str]:
    """Final answers of a real set, taken from its own solutions where it has them; skips where the set is not there."""
    files = {"gsm8k": ["gsm8k_train.jsonl", "gsm8k_test.jsonl"], "deepscaler": ["deepscaler_math_aime.json"]}[name]
    missing = [file for file in files if not (REAL_DATA / file).is_file()]
    if missing:
        pytest.skip(f"{REAL_DATA} has no {' and no '.join(missing)}: the real answers are not graded")
    texts = [(REAL_DATA / file).read_text(encoding="utf-8") for file in files]
    if name == "gsm8k":
        found = [true_answer(json.loads(line)["answer"]) for text in texts for line in text.splitlines()]
    else:
        found = [row["answer"] for row in json.loads(texts[0])]
    return [str(answer) for answer in found if answer is not None]


def shares(answers: list[str], seed: int = 0) -> tuple[float, float]:
    """(part graded right against themselves, part graded right against another problem's different answer)."""
    generator = random.Random(seed)
    own = other = 0
    for answer in answers:
        said = f"Thus \\boxed{{{answer}}}."
        boxed = last_boxed(said)
        own += boxed is not None and answers_equal(boxed, answer)
        while (strange := generator.choice(answers)).strip() == answer.strip():
            pass
        other += boxed is not None and answers_equal(boxed, strange)
    return own / len(answers), other / len(answers)


@pytest.mark.parametrize("name", ["gsm8k", "deepscaler"])
def test_a_sample_of_real_answers(name: str) -> None:
    answers = random.Random(1).sample(gold_answers(name), 200)
    own, other = shares(answers)
    assert own >= 0.99 and other <= 0.01, (own, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "deepscaler"])
def test_all_real_answers(name: str) -> None:
    answers = gold_answers(name)
    own, other = shares(answers)
    print(f"\n{name}: {len(answers)} answers, {own:.2%} right against themselves, {other:.2%} against another's")
    assert own >= 0.99 and other <= 0.01, (own, other)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("so $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("$\\boxed{1}$ or rather $\\boxed{2}$", "2"),
        ("$\\fbox{3}$", "3"),
        ("is $\\boxed 5$.", "5"),
        ("is $\\boxed\\frac12$.", "\\frac12"),
        ("4*2=<<4*2=8>>8\n#### 1,080", "1,080"),
        ("#### -3\n", "-3"),
        ("no answer", None),
        ("\\boxed{open", None),
        ("####", None),
    ],
)
def test_answers_of_solutions(solution: str, answer: str | None) -> None:
    assert true_answer(solution) == answer


@pytest.mark.parametrize(
    ("text", "is_number"), [("1/3", True), ("\\dfrac{-1}{3}", True), ("-0.5", True), ("1/0", False), ("x", False)]
)
def test_plain_numbers(text: str, is_number: bool) -> None:
    assert (rational(text) is not None) is is_number


@pytest.mark.parametrize(
    ("given", "truth"),
    [
        ("0.50", "\\frac{1}{2}"),
        ("-\\frac{1}{2}", "\\frac{-1}{2}"),
        ("3/4", "\\tfrac{3}{4}"),
        ("1080", "1,080"),
        ("3\\sqrt{2}", "\\sqrt{18}"),
        ("\\text{Evelyn}", "Evelyn"),
        ("(x-1)(x+1)", "x^2-1"),
        ("[0,\\infty)", "[0, \\infty)"),
        ("2^{10}", "1024"),
        ("90^{\\circ},60^{\\circ}", "$90^{\\circ}$,$60^{\\circ}$"),
        ("$60^{\\circ}$, $90^{\\circ}$", "$90^{\\circ}$,$60^{\\circ}$"),
        ("\\frac12", "['$\\frac{1}{2}$']"),
        ("7", "['$7$']"),
        ("\\frac12,\\frac13", "['$\\frac{1}{2}$', '$\\frac{1}{3}$']"),
        ("\\$5", "5"),
        ("$\\$5$", "\\$5"),
    ],
)
def test_equal(given: str, truth: str) -> None:
    assert answers_equal(given, truth)


@pytest.mark.parametrize(
    ("given", "truth"),
    [
        ("$90^{\\circ}$", "$90^{\\circ}$,$60^{\\circ}$"),
        ("$90^{\\circ}$,$30^{\\circ}$", "$90^{\\circ}$,$60^{\\circ}$"),
        ("$90^{\\circ}$ and $60^{\\circ}$", "$90^{\\circ}$ and $30^{\\circ}$"),
        ("['$\\frac{1}{3}$']", "['$\\frac{1}{2}$']"),
        ("\\frac13", "['$\\frac{1}{2}$']"),
        ("['$\\frac{1}{2}$', '$\\frac{1}{4}$']", "['$\\frac{1}{2}$', '$\\frac{1}{3}$']"),
        ("['$x=1$', '$x=3$']", "['$x=1$', '$x=2$']"),
    ],
)
def test_every_piece_between_dollars_counts(given: str, truth: str) -> None:
    assert not answers_equal(given, truth)


def test_dollars_around_real_answers_change_no_grade() -> None:
    """A response may write a formula in dollars or without: an answer that is right stays right."""
    for answer in random.Random(2).sample([gold for gold in gold_answers("deepscaler") if gold.strip()], 300):
        assert answers_equal(f"${answer}$", answer) and answers_equal(answer, f" $ {answer} $ "), answer


HOSTILE = [
    *(f"{base}^{{{exponent}}}" for base in (2, 99, "x", "(x+y)", "\\sqrt{2}", "\\pi") for exponent in (
        "9^{9}", "99999", "-99999", "9*9*9*9*9", "1/0.00001", "\\frac{1}{0.0000001}", "9!", "10^{10^{10}}", "\\infty",
        "{9^9}^9", "999999999999", "2^x^y", "\\sum_{i=1}^{9} i",
    )),
    *(f"{opening * 40}2{closing * 40}" for opening, closing in (
        ("(", ")"), ("\\sqrt{", "}"), ("\\frac{1}{", "}"), ("\\left(", "\\right)"), ("{", "}"), ("|", "|"),
        ("\\sin(", ")"), ("\\log(", ")"), ("-(", ")"), ("\\text{", "}"), ("\\overline{", "}"), ("1+(", ")"),
        ("2^{", "}"), ("[", "]"),
    )),
    *(f"{text}\\text{{{code}}}" for text in ("", "7") for code in (
        "__import__('os').system('touch x')", "exec('1')", "eval('1')", "open('x','w')", "import socket",
        "while 1: pass", "().__class__.__bases__", "os.fork()", "raise SystemExit", "lambda: 0", "print(1)",
        "globals()",
    )),
    *(chr(code) * 30 for code in range(0x0660, 0x0668)), *(chr(code) + "5" for code in range(0x202A, 0x202F)),
    *(chr(code) * 20 for code in (0x0, 0x1, 0x7F, 0x85, 0xAD, 0x2212, 0x221E, 0x2460, 0x3000, 0xFEFF, 0x1D7D9)),
    *(symbol * 300_000 for symbol in ("\\frac{1}{", "\\sqrt", "^", "_", "&", "\\", "$", ",", "9^{", "\\left(", "x=")),
    "\\frac{\\sqrt[3]{5}^n^2}{2}", "\\sqrt{3}^3^{-4999}", "9 ^ 9 ^ 9", "{9}^{9}^{9}",
    "9^{9^9}", "9^{9^{9^{9}}}", "9^9^9^9", "9^{9*9*9*9*9}", "9^{1/0.00000001}", "9^{-99999}", "99^{\\infty}",
    "2^{99999}", "9**9**9**9", "2**(10**10)", "1E9999999", "9e999999999", "10000000000!", "(100!)!",
    "\\binom{10^9}{10^8}", "\\sum_{i=1}^{10^9} i", "\\prod_{i=1}^{10^9} i", "\\int_0^1 x^x dx", "\\lim_{x\\to0} x",
    "((2^{99})^{99})^{99}", "(a+b+c+d+e+f)^{64}", "(1+\\sqrt{2})^{99999}", "((x+1)^8)^8", "\\text{9^9^9^9}",
    "\\mathrm{9^{9^9}}", "9^\\text{9^9}", "+".join(f"\\sqrt{{{p}}}" for p in (2, 3, 5, 7, 11, 13, 17, 19)),
    "\\sqrt{" * 12 + "2" + "}" * 12, "\\frac{1}{1+" * 11 + "x" + "}" * 11, "\\pm1" * 30,
    ",".join(map(str, range(60))), "\\log(" * 11 + "2" + ")" * 11, "\\sin(" * 11 + "x" + ")" * 11, "x=" * 60 + "1",
    "1/" * 90 + "3", "-" * 190 + "1", "*".join(["(x+y+z)"] * 20), "2^{0.5}" * 8, "e^{x}" * 10, "i^i", "(1,2)" * 20,
    "[1,2]\\cup" * 15 + "[1,2]", "__import__('os').system('ls')", "open('/tmp/x','w')", "lambda: 0", "0x" + "f" * 60,
    "π" * 50, "²" * 40, "\x00" * 50, "٣" * 50, "\u202e12", "1" * 500, "\\frac" * 50, "{" * 300, "}" * 300, "\\" * 301,
    "$" * 400, "\\left(" * 30, "&" * 100, "|" * 100, "\\infty-\\infty", "\\frac{1}{x-x}", "x_{1_{2_{3}}}",
    "\\begin{cases}1\\end{cases}" * 5, "{" * 500_000 + "}" * 500_000, "\\boxed{" * 150_000, "9^" * 500_000 + "9",
    " " * 1_000_000 + "5", "(" * 1_000_000, "\\text{" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_hostile_answers_are_wrong_and_cheap(every: int) -> None:
    assert answers_equal("1+x", "x+1")  # the parser is imported when first needed, which is not what is timed
    for hostile in HOSTILE[::every]:
        for truth in ("5", "x+1"):
            started = time.process_time()
            boxed = last_boxed(f"\\boxed{{{hostile}}}")
            for answer in {boxed or "", hostile}:
                assert not answers_equal(answer, truth), (hostile[:60], truth)
            assert time.process_time() - started < LIMIT_S, (hostile[:60], truth)


def test_what_is_refused_is_still_equal_to_itself() -> None:
    for answer in ("9^{9^9}", "10!", "\\binom{6}{3}", "\\infty", "99^{\\infty}"):
        assert not is_small(answer) and answers_equal(answer, answer)
