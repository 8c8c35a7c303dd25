"""Pairs of answers and the right verdict: every way to write one answer, and what must stay apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from recipes.common.math_answers import answers_equal
from recipes.dapo_qwen3_moe import reward as dapo
from recipes.gsm8k import reward as gsm8k
from recipes.math_lighteval import reward as math_lighteval
from recipes.r1_dynamic_sampling import reward as r1_dynamic_sampling
from recipes.r1_zero import deepscaler
from verl.utils.reward_score.default import default_compute_score

EQUAL = [
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"),
    ("−5", "-5"),
    ("√2", "\\sqrt{2}"),
    ("1\\,000", "1000"),
    ("12_5", "12_{5}"),
    ("12_5", "12"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("1,2", "2,1"),
    ("5\\text{ m}", "5"),
    ("5\\,\\text{cm}", "5\\text{ cm}"),
    ("½", "\\frac{1}{2}"),
    ("3×4", "12"),
    ("2²", "4"),
    ("60°", "60^\\circ"),
    ("π", "\\pi"),
    ("∞", "\\infty"),
    ("５", "5"),
    ("1 000", "1000"),
    ("1{,}000", "1000"),
    ("\\tfrac12", "0.5"),
    ("\\frac 1 2", "0.5"),
    ("\\boxed{5}", "5"),
    ("5.", "5"),
    ("$5$", "5"),
    ("50\\%", "50"),
    ("50%", "50"),
    ("1\\frac{1}{2}", "1.5"),
    ("1 \\frac12", "\\frac32"),
    ("1.2\\times10^{3}", "1200"),
    ("1.2\\cdot 10^3", "1200"),
    ("1.2e3", "1200"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("x = 5", "x=5"),
    ("\\text{(A)}", "A"),
    ("(A)", "A"),
    ("\\textbf{(A)}", "A"),
    ("\\begin{bmatrix}1&2\\end{bmatrix}", "\\begin{bmatrix} 1 & 2 \\end{bmatrix}"),
    ("\\begin{bmatrix}1\\\\2\\end{bmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("\\begin{pmatrix}1/2\\\\3\\end{pmatrix}", "\\begin{pmatrix}\\frac12\\\\3\\end{pmatrix}"),
    ("\\$5", "5"),
    ("$5", "5"),
    ("€5", "5"),
    ("\\pm 3", "3,-3"),
    ("x=\\pm3", "\\pm 3"),
    ("**72**", "72"),
    ("*72*", "72"),
    ("__72__", "72"),
    ("90", "90°"),
    ("0.1", "0.10"),
    ("3:4", "3:4"),
    ("3:4", "\\frac{3}{4}"),
    ("1.0", "1"),
    ("-0", "0"),
    ("2^{10}", "1024"),
    ("x^2+1", "1+x^2"),
    ("(x+1)^2", "x^2+2x+1"),
    ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}"),
    ("√(2)/2", "\\frac{\\sqrt{2}}{2}"),
    ("x≤3", "x\\le 3"),
    ("(-\\infty,3]", "(-∞, 3]"),
    ("[1,2)\\cup(3,4)", "(3,4)\\cup[1,2)"),
    ("−√2", "-\\sqrt2"),
    ("5 cm", "5"),
    ("5 \\text{ cm}^2", "5"),
    ("101_2", "101_{2}"),
    ("\\sqrt[3]{8}", "2"),
    ("\\ln e", "1"),
    ("0.1x", "\\frac{x}{10}"),
    ("\\frac{\\sqrt{4}}{4}", "0.5"),
    ("0.5", "\\frac{2}{4}"),
    ("12.5%", "12.5"),
    ("yes", "Yes"),
    ("5:30", "5:30"),
    ("12{,}345", "12345"),
    ("1\\!000", "1000"),
    ("10\\,000\\,000", "10,000,000"),
    ("1.50", "1.5"),
    ("0.\\overline{3}", "\\frac13"),
    ("1.1\\overline{36}", "\\frac{25}{22}"),
    ("-0.(142857)", "-1/7"),
    ("12 km/h", "12\\,\\text{km/h}"),
    ("12 km/h", "12"),
    ("3 x y", "3 y x"),
    ("x\\ge 3", "[3,\\infty)"),
    ("1/3", "2/6"),
    ("-\\frac12", "-0.5"),
    ("−½", "-0.5"),
    ("1½", "1.5"),
    ("2 1/2", "2.5"),
    ("-1\\frac12", "-1.5"),
    ("1.2×10³", "1200"),
    ("1.2\\times10^{-3}", "0.0012"),
    ("5 meters", "5\\text{ m}"),
    ("5 inches", "5\\text{ in}"),
    ("5\\text{ square cm}", "5\\text{ cm}^2"),
    ("5 apples", "5"),
    ("$\\$1{,}000$", "1000"),
    ("**x+1**", "1+x"),
    ("\\(5\\)", "5"),
    ("\\[5\\]", "5"),
    ("$$5$$", "5"),
    ("٣", "3"),
    ("x²+1", "x^2+1"),
    ("3÷4", "0.75"),
    ("3·4", "12"),
    ("2±√3", "2\\pm\\sqrt{3}"),
    ("a₁", "a_1"),
    ("1011₂", "1011_2"),
    ("\\{1,2,3\\}", "\\{3,1,2\\}"),
    ("(2,3),(4,5)", "(4,5),(2,3)"),
    ("0.1+0.2", "0.3"),
    ("A.", "A"),
    ("(B)", "\\textbf{(B)}"),
    ("０.５", "0.5"),
]
DIFFERENT = [
    ("0.0000001", "0.0000002"),
    ("12_5", "12_7"),
    ("5\\text{ m}", "5\\text{ km}"),
    ("2.718281828", "e"),
    ("3.14159265358979", "\\pi"),
    ("0.333333333333", "\\frac{1}{3}"),
    ("1.41421356237", "\\sqrt{2}"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    ("(1,2]", "(1,2)"),
    ("5 m", "5 km"),
    ("5\\mathrm{ m}", "5\\mathrm{ km}"),
    ("50\\%", "0.5"),
    ("y=5", "x=5"),
    ("A", "B"),
    ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}2&1\\end{pmatrix}"),
    ("£5", "\\$5"),
    ("1,5", "1.5"),
    ("3,14", "3.14"),
    ("1/3", "0.333"),
    ("1/3", "0.\\overline{34}"),
    ("0.1\\overline{3}", "0.\\overline{13}"),
    ("12 km/h", "12 m/s"),
    ("x>3", "[3,\\infty)"),
    ("3:4", "4:3"),
    ("10!", "3628800"),
    ("x≥3", "x\\le 3"),
    ("5\\text{ cm}^2", "5\\text{ cm}^3"),
    ("101_2", "5"),
    ("x=0.0000001", "x=0.0000002"),
    ("\\text{no}", "\\text{yes}"),
    ("12:00", "0.2"),
    ("2 1/2", "21/2"),
    ("1.2\\times10^{3}", "1.2\\times10^{4}"),
    ("10^{-7}", "2\\times10^{-7}"),
    ("(0.0000001,1)", "(0.0000002,1)"),
    ("0.0000001x", "0.0000002x"),
    ("5\\text{ cm}^2", "5\\text{ cm}"),
    ("5 hours", "5 minutes"),
    ("€5", "$\\$5$"),
    ("1011_2", "1011_3"),
    ("23_{\\text{five}}", "23_{\\text{six}}"),
    ("[0,1]", "[0,1)"),
    ("(0,1)", "(0,1]"),
    ("\\{1,2\\}", "\\{1,3\\}"),
    ("(2,3),(4,5)", "(3,2),(4,5)"),
    ("\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1&2\\end{pmatrix}"),
    ("\\begin{pmatrix} 0.0000001 \\\\ 2\\end{pmatrix}", "\\begin{pmatrix}0.0000002\\\\2\\end{pmatrix}"),
    ("(B)", "(C)"),
    ("2.5\\text{ kg}", "2500\\text{ g}"),
]


def test_there_is_a_pair_of_every_kind() -> None:
    assert len(EQUAL) + len(DIFFERENT) >= 120


@pytest.mark.parametrize(("pairs", "is_right"), [(EQUAL, True), (DIFFERENT, False)])
def test_answers_are_equal_in_both_directions(pairs: list[tuple[str, str]], is_right: bool) -> None:
    found = [(left, right) for left, right in pairs for pair in ((left, right), (right, left)) if answers_equal(*pair)]
    assert len(found) == (2 * len(pairs) if is_right else 0), set(found) if not is_right else set(pairs) - set(found)


GRADERS: dict[str, Callable[[str, str], float]] = {
    "r1_zero": lambda given, truth: deepscaler.compute_score(
        "", f"<think>so</think><answer>\\boxed{{{given}}}</answer>", truth
    )["accuracy"],
    "math_lighteval": lambda given, truth: math_lighteval.compute_score("", f"\\boxed{{{given}}}", truth)["accuracy"],
    "r1_dynamic_sampling": lambda given, truth: r1_dynamic_sampling.compute_score(
        "", f"so</think>\\boxed{{{given}}}", truth
    )["accuracy"],
    "dapo": lambda given, truth: dapo.compute_score("", f"so\nAnswer: {given}", truth)["acc"],
}


@pytest.mark.parametrize("recipe", GRADERS)
def test_every_recipe_s_grader_says_the_same(recipe: str) -> None:
    """A third of the table each: they share what compares."""
    rows = [(*pair, 1.0) for pair in EQUAL[::3]] + [(*pair, 0.0) for pair in DIFFERENT[::3]]
    rows += [("12_5", "12_7", 0.0), ("5\\text{ m}", "5\\text{ km}", 0.0), ("0.0000001", "0.0000002", 0.0)]
    assert [row for row in rows if GRADERS[recipe](row[0], row[1]) != row[2]] == []


@pytest.mark.parametrize(
    ("given", "truth", "accuracy"),
    [
        ("**72**", "72", 1),
        ("$72$", "72", 1),
        ("\\boxed{72}", "72", 1),
        ("`72`", "72", 1),
        ("$\\$72$", "72", 1),
        ("−72", "-72", 1),
        ("1{,}080", "1,080", 1),
        ("1\\,080", "1080", 1),
        ("７２", "72", 1),
        ("72.", "72", 1),
        ("72.00", "72", 1),
        ("**72**", "-72", 0),
        ("7.2", "72", 0),
        ("0.0000001", "0.0000002", 0),
    ],
)
def test_gsm8k_reads_a_number_with_emphasis(given: str, truth: str, accuracy: float) -> None:
    assert gsm8k.compute_score("", f"so\n#### {given}", truth)["accuracy"] == accuracy
    assert default_compute_score("openai/gsm8k", f"so\n#### {given}", truth) == accuracy
