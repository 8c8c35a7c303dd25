"""Grading of final answers in the style of MATH (``\\boxed{...}``) and GSM8K (``#### ...``); nothing is ever evaluated.

Two answers are equal when they are the same text, the same rational number or, in math-verify's LaTeX parser, the same
expression; ``answer_forms`` has the ways to write one, in LaTeX or in Unicode. A comma between digits separates
thousands where three digits follow and pieces of a list otherwise, never decimals.

The parser computes what it reads (``9^{9^9}``, ``(10^6)!``), so it is asked only about answers that ``is_small`` has
bounded beforehand; all others are equal to the same text alone. What passes takes milliseconds, but symbolic algebra
has no proof of that: call this from processes that are ended at a wall-clock limit, as
``verl.utils.reward_score.scoring_pool`` does, which counts such an answer as ungraded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from recipes.common.answer_forms import (
    ascii_form,
    based,
    matrix,
    measured,
    pieces,
    rational,
    unwrapped,
    with_braces,
    without_separators,
)

MAX_ANSWER_CHARS = 512
MAX_PARSED_CHARS = 200  # of an answer that is parsed; MATH's longest has 159
MAX_DEPTH = 12  # braces, brackets and parentheses within one another; MATH's deepest answer has 4
MAX_POWER = 5_000  # of a number among numbers: 2^{4181} is an answer of MATH
MAX_SYMBOLIC_POWER = 64  # of anything where there are variables, roots or functions
MAX_GROUP_POWER = 10  # of parentheses, all together: sums are multiplied out
MAX_VARIABLES = 4
MAX_DIGITS = 60  # of one number
MAX_FUNCTIONS = 4  # sines, logarithms ...
MAX_ROOTS = 8  # each may double the terms of an equality that algebra must settle
MAX_SIGNS = 2  # ``\\pm``: each doubles the values of an expression

_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BARE_BOX = re.compile(r"\\boxed\s*(?P<content>[^\s{$\\][^$\n]{0,63}|\\[^$\n]{1,63})")
_TRUTH_MARK = "####"

# Commands that change how an answer looks or are as cheap as arithmetic. Sums, products, integrals, limits, binomials
# and factorials are not among them: a few characters of those are hours of work.
_APPEARANCE = (
    "frac dfrac tfrac cfrac sqrt pi theta alpha beta gamma delta lambda mu omega phi circ degree triangle angle "
    "infty cup cap setminus in emptyset varnothing le leq ge geq ne neq lt gt pm mp cdot times div approx equiv "
    "text textbf textit textnormal textrm mbox mathrm mathbf mathbb mathit rm bf left right big Big bigg Bigg "
    "begin end quad qquad dots ldots cdots overline vec hat phantom hline "
)
_FUNCTIONS = frozenset(("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "ln"))
_ARITHMETIC = frozenset(("frac", "dfrac", "tfrac", "cfrac", "cdot", "times", "div", "left", "right"))
_CHEAP_COMMANDS = _FUNCTIONS | frozenset(_APPEARANCE.split())
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_WORDS = re.compile(
    r"\\(?:text|textbf|textit|textnormal|textrm|mbox|mathrm|begin|end)\s*\{(?P<words>[A-Za-z .,'*-]*)\}"
)
_ODD_ESCAPE = re.compile(r"\\(?![a-zA-Z\\ ,;:!%$#&{}|_])")
_EXPONENT = re.compile(r"\^\s*(?P<exponent>\{[^{}]*\}|\\[a-zA-Z]+|.)", re.DOTALL)
_INFINITY = re.compile(r"(?<=[(\[,+ -])\\infty(?=\s*[,)\]])")  # the end of an interval; in a sum it equals anything
_FLOAT = re.compile(r"\d\.?[eE][+-]?\d")  # 1E9999999
_NUMERAL = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_UNCOUNTED = re.compile(r"(?:\\%|\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree)$")
_MATH_MODE = re.compile(r"(?<!\\)\$")  # a dollar that begins or ends a formula; an escaped one is money


def last_boxed(text: str) -> str | None:
    """What the last ``\\boxed{...}`` holds, braces matched (escaped ones are text); None when missing or unclosed.

    One pass over the text from that box on, however many boxes and braces there are.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    opening = _OPEN_BOX.match(text, start) if start >= 0 else None
    if opening is None:
        return None
    begin = position = opening.end()
    depth = 1
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[begin:position]
        position += 1
    return None


def true_answer(solution: str) -> str | None:
    """The final answer of a data set's own solution: its last box, ``\\boxed 5`` too, or what follows ``####``."""
    if _TRUTH_MARK in solution:
        return solution.rsplit(_TRUTH_MARK, 1)[1].strip().split("\n")[0].strip() or None
    boxed = last_boxed(solution)
    if boxed is None and (bare := _BARE_BOX.match(solution, max(solution.rfind("\\boxed"), 0))) is not None:
        boxed = bare["content"]
    return None if boxed is None else boxed.strip() or None


def answers_equal(given: str, truth: str) -> bool:
    """Whether two answers are the same number, text or mathematical expression.

    Two plain numbers are compared exactly. Bases and units count where both sides give one, the order of a tuple, an
    interval or a matrix always; a percent sign and degrees never (50% is 50, not 0.5).
    """
    if len(given) > 4 * MAX_ANSWER_CHARS:
        return False
    numbers = rational(given.strip()), rational(truth.strip())
    if numbers[0] is not None and numbers[1] is not None:  # most answers, without further looking
        return numbers[0] == numbers[1]
    given, truth = _plain(given), _plain(truth)
    if not given or not truth or len(given) > MAX_ANSWER_CHARS:
        return False
    return _equal(given, truth)


def contradict(given: str, truth: str) -> bool:
    """Whether two answers differ for certain: as plain numbers, in their units or in their bases."""
    return len(given) <= MAX_ANSWER_CHARS and _plainly_equal(_plain(given), _plain(truth)) is False


def _equal(given: str, truth: str) -> bool:
    decided = _plainly_equal(given, truth)
    if decided is not None:
        return decided
    (given_head, given_unit), (truth_head, truth_unit) = measured(given), measured(truth)
    if given_unit or truth_unit:
        decided = _plainly_equal(given_head, truth_head)
        return _equal_pieces(given, truth) if decided is None else decided
    return _equal_pieces(given, truth)


def _plainly_equal(given: str, truth: str) -> bool | None:
    """Whether two answers are equal as texts or plain numbers, or differ as such, in bases or units; None: unknown."""
    if given == truth or _uncounted(given) == _uncounted(truth):
        return True
    bases = based(given), based(truth)
    if bases[0] is not None and bases[1] is not None:
        return bases[0] == bases[1]
    (given_head, given_unit), (truth_head, truth_unit) = measured(given), measured(truth)
    if given_unit and truth_unit and given_unit != truth_unit:
        return False
    numbers = [rational(without_separators(_uncounted(head))) for head in (given_head, truth_head)]
    return None if None in numbers else numbers[0] == numbers[1]


def _uncounted(answer: str) -> str:
    return _UNCOUNTED.sub("", answer).rstrip()


def _equal_pieces(given: str, truth: str) -> bool:
    """As ``_equal``, of lists and matrices piece by piece, and of what the parser must decide."""
    given_matrix, true_matrix = matrix(given), matrix(truth)
    if given_matrix is not None and true_matrix is not None:
        (kind, cells), (true_kind, true_cells) = given_matrix, true_matrix
        has_form = kind == true_kind and list(map(len, cells)) == list(map(len, true_cells))
        return has_form and all(_in_order(*rows) for rows in zip(cells, true_cells, strict=True))
    given_list, true_list = pieces(given), pieces(truth)
    if given_list is not None and true_list is not None:
        (brackets, found), (true_brackets, wanted) = given_list, true_list
        if brackets == true_brackets and len(found) == len(wanted):
            return _in_any_order(found, wanted) if brackets in ("", "\\{\\}") else _in_order(found, wanted)
    return is_small(given) and is_small(truth) and _math_equal(given, truth)


def _in_order(found: Sequence[str], wanted: Sequence[str]) -> bool:
    return all(_equal(*pair) for pair in zip(found, wanted, strict=True))


def _in_any_order(found: Sequence[str], wanted: Sequence[str]) -> bool:
    left = list(wanted)
    for piece in found:
        match = next((other for other in left if _equal(piece, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def is_small(answer: str) -> bool:
    """Whether computing what ``answer`` writes is bounded: its commands, nesting, variables, numbers and powers."""
    if len(answer) > MAX_PARSED_CHARS or not answer.isascii() or _depth(answer) > MAX_DEPTH:
        return False
    if answer.count("|") > 2 * MAX_DEPTH:  # half of them may be within one another, and parsing costs their square
        return False
    math = _WORDS.sub(" ", answer)
    commands = _COMMAND.findall(math)
    if any(command not in _CHEAP_COMMANDS for command in commands) or _ODD_ESCAPE.search(math):
        return False
    if sum(command in _FUNCTIONS for command in commands) > MAX_FUNCTIONS:
        return False
    if commands.count("sqrt") > MAX_ROOTS or commands.count("pm") + commands.count("mp") > MAX_SIGNS:
        return False
    if "!" in math.replace("\\!", "") or _FLOAT.search(math):
        return False
    if any(len(numeral) > MAX_DIGITS for numeral in _NUMERAL.findall(math)):
        return False
    if len(_INFINITY.findall(math)) != commands.count("infty"):
        return False
    letters = set(re.findall(r"[a-zA-Z]", _COMMAND.sub(" ", math)))
    if len(letters) > MAX_VARIABLES:
        return False
    is_plain = not letters and _ARITHMETIC.issuperset(commands)
    return _powers_are_small(math, MAX_POWER if is_plain else MAX_SYMBOLIC_POWER)


def _depth(text: str) -> int:
    deepest = depth = 0
    for char in text:
        depth += (char in "{([") - (char in "})]")
        deepest = max(deepest, depth)
    return deepest


def _powers_are_small(math: str, most: int) -> bool:
    """Whether the exponents are bounded: of single factors by ``most``, of what stands in parentheses their product."""
    found = list(_EXPONENT.finditer(math))
    if len(found) != math.count("^"):
        return False
    group_power = 1
    for match in found:
        if math[match.end() :].lstrip()[:1] == "^":
            return False  # 9^9^9, a tower without braces
        bound = _exponent_bound(match["exponent"])
        if bound is None or bound > most:
            return False
        if math[: match.start()].rstrip()[-1:] in tuple(")]}|"):
            group_power *= bound
    return group_power <= MAX_GROUP_POWER


def _exponent_bound(exponent: str) -> int | None:
    """At least the size of an exponent's value; None where an exponent has an exponent, or braces of its own.

    Sums and products of numbers are at most the product of (number + 1); a division by a decimal multiplies by a power
    of ten for each of its places.
    """
    if "^" in exponent or exponent in ("{", "(", "["):
        return None
    bound = 1
    for numeral in _NUMERAL.findall(exponent):
        whole, _, decimals = numeral.partition(".")
        bound *= (int(whole + decimals) + 1) * 10 ** len(decimals)
    return max(bound - 1, 1) if exponent.strip("{}-+ ").isdigit() else bound


def _plain(answer: str) -> str:
    """Drop what never changes an answer: dollars of formulas, outer space, the full stop, ``\\left``, thousands commas.

    The parser reads an answer between two dollars, so a dollar inside would end what it compares.
    """
    answer = _MATH_MODE.sub("", ascii_form(answer)).strip().removesuffix(".")
    answer = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", answer)
    answer = unwrapped(re.sub(r"\s+", " ", answer).strip())
    if (words := _WORDS.fullmatch(answer)) is not None:
        answer = words["words"].strip()
    return without_separators(with_braces(answer))


def _math_equal(given: str, truth: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify  # a second to import: only when an answer needs it

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn at every call that their limits are off
    latex_only = [LatexExtractionConfig()]
    # The library's own limits are alarms of the main thread, which swallow a time-out as "wrong": switched off here,
    # the pool's wall clock is the limit.
    truth_parsed = parse(f"${truth}$", extraction_config=latex_only, parsing_timeout=None)
    given_parsed = parse(f"${given}$", extraction_config=latex_only, parsing_timeout=None)
    # As many digits as tell a decimal from the irrational number that it approximates.
    digits = {"float_rounding": 30, "numeric_precision": 50}
    sides = [(truth_parsed, given_parsed), (given_parsed, truth_parsed)]  # an interval is its inequality, not so back
    return any(verify(*pair, timeout_seconds=None, **digits) for pair in sides)
