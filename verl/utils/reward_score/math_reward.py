r"""Answers in ``\boxed{...}`` to the problems of MATH (upstream: ``verl.utils.reward_score.math_reward``).

Two answers are the same when they are after the normalisation that the data set's authors publish (arXiv 2103.03874):
spaces, units, ``\left`` and degrees go, fractions and roots get their braces. Nothing is evaluated.
"""

from __future__ import annotations

import re

from verl.utils.reward_score.boxed import inside_boxed, last_boxed

_GOES = ("\n", "\\!", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "\\%", "%")


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 when the last boxed answer of ``solution_str`` is ``ground_truth``, else 0.0."""
    boxed = last_boxed_only_string(solution_str)
    if boxed is None:
        return 0.0
    try:
        answer = remove_boxed(boxed)
    except ValueError:
        return 0.0
    return 1.0 if is_equiv(answer, ground_truth) else 0.0


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether both are the same after ``strip_string``; ``verbose`` prints what is compared."""
    if str1 is None or str2 is None:
        return str1 is str2
    first, second = strip_string(str1), strip_string(str2)
    if verbose:
        print(first, second)
    return first == second


def remove_boxed(s: str) -> str:
    r"""The inside of ``\boxed{...}``, or the rest after ``\boxed``  and a space."""
    plain = "\\boxed "
    return s[len(plain) :] if s.startswith(plain) else inside_boxed(s)


def last_boxed_only_string(string: str) -> str | None:
    r"""The last ``\boxed{...}`` or ``\fbox{...}``; before them ``\boxed `` with what follows up to a ``$``."""
    if "\\boxed " in string:
        return "\\boxed " + string.split("\\boxed ")[-1].split("$")[0]
    return last_boxed(string, ("\\boxed{", "\\fbox{"))


def strip_string(string: str) -> str:
    """``string`` in the form in which answers are compared."""
    string = string.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for text in _GOES:
        string = string.replace(text, "")
    string = remove_right_units(string)
    string = re.sub(r"(^| |\{)\.", r"\g<1>0.", string)  # .5 is 0.5
    left, equals, right = string.partition("=")
    if equals and len(left) <= 2 and "=" not in right:  # "k = 5": the name is not the answer
        string = right
    string = fix_fracs(fix_sqrt(string).replace(" ", ""))
    return fix_a_slash_b("\\frac{1}{2}" if string == "0.5" else string)


def fix_fracs(string: str) -> str:
    r"""``\frac12``, ``\frac1{72}`` and ``\frac{1}2`` with a brace around each part."""
    parts = string.split("\\frac")
    fixed = [parts[0]]
    for part in parts[1:]:
        if part.startswith("{") or len(part) < 2:
            fixed.append(part)
            continue
        above, below, rest = part[0], part[1], part[2:]
        fixed.append(f"{{{above}}}{below}{rest}" if below == "{" else f"{{{above}}}{{{below}}}{rest}")
    return "\\frac".join(fixed)


def fix_a_slash_b(string: str) -> str:
    r"""``a/b`` of two integers as ``\frac{a}{b}``; other texts as they are."""
    match = re.fullmatch(r"(-?\d+)/(-?\d+)", string)
    return f"\\frac{{{int(match[1])}}}{{{int(match[2])}}}" if match else string


def remove_right_units(string: str) -> str:
    r"""What stands before the last ``\text{ ``, which begins a unit."""
    return string.rpartition("\\text{ ")[0] if "\\text{ " in string else string


def fix_sqrt(string: str) -> str:
    r"""``\sqrt3`` as ``\sqrt{3}``."""
    return re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", string)
