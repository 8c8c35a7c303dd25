"""Ways to write one and the same answer: Unicode's signs as LaTeX, numbers, units, bases, lists, matrices.

Everything here works on the text; nothing is computed but plain rational numbers.
"""

from __future__ import annotations

import re
import unicodedata
from contextlib import suppress
from fractions import Fraction

MAX_PIECES = 12  # of a list or a matrix that is compared piece by piece

_SIGNS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63", "-"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u200b\ufeff", ""),
    **dict.fromkeys("·⋅∙", "\\cdot "),
    "×": "\\times ",
    "÷": "\\div ",
    "±": "\\pm ",
    "∓": "\\mp ",
    "°": "^\\circ",
    "º": "^\\circ",
    "∞": "\\infty ",
    "≤": "\\le ",
    "⩽": "\\le ",
    "≥": "\\ge ",
    "⩾": "\\ge ",
    "≠": "\\ne ",
    "≈": "\\approx ",
    "∈": "\\in ",
    "∪": "\\cup ",
    "∩": "\\cap ",
    "∅": "\\emptyset ",
    "π": "\\pi ",
    "α": "\\alpha ",
    "β": "\\beta ",
    "′": "'",
    "γ": "\\gamma ",
    "δ": "\\delta ",
    "θ": "\\theta ",
    "λ": "\\lambda ",
    "μ": "\\mu ",
    "ω": "\\omega ",
    "φ": "\\phi ",
    "⁄": "/",
    "∕": "/",
    "％": "%",
    "∣": "|",
}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|\\[a-z]+|[a-z]))")

_WORD_COMMANDS = "text|textbf|textit|textnormal|textrm|mbox|mathrm|mathbf|operatorname"
_WRAPPED = re.compile(
    r"\*\*\*?(?P<bold>[^*]+)\*\*\*?|\*(?P<italic>[^*]+)\*|__(?P<under>[^_]+)__|`(?P<code>[^`]+)`|"
    r"\\\((?P<inline>.*)\\\)|\\\[(?P<display>.*)\\\]|\\(?:mathbf|boldsymbol|bm|boxed|fbox|displaystyle)\{(?P<box>[^{}]*)\}"
)
_CHOICE = re.compile(rf"(?:\\(?:{_WORD_COMMANDS})\s*\{{)?\s*\(?([A-Z])[.)]?\s*\}}?")
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:(\d)\s*(\d)(?!\d)|(\d)\s*\{([^{}]*)\}|\{([^{}]*)\}\s*(\d)(?!\d))")

_SEPARATOR = r"(?:,(?:\\!)?|\{,\}|\\[,;:! ]|\\thinspace\s?| )"
_THOUSANDS = re.compile(rf"[+-]?[1-9]\d{{0,2}}(?:{_SEPARATOR}\d{{3}})+(?:\.\d+)?")
_NUMBER = re.compile(r"[+-]?(?:\d{1,40}(?:\.\d{0,20}|/\d{1,40})?|\.\d{1,20})")  # also 1/2
_FRACTION = re.compile(
    r"(?P<whole>[+-]?\d{0,40})\s*\\[dtc]?frac\s*\{(?P<above>[+-]?\d{1,40})\}\s*\{(?P<below>[+-]?\d{1,40})\}"
)
_REPEATING = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>\d{0,20})\.(?P<once>\d{0,20})(?:\\overline\s*\{(?P<line>\d{1,20})\}|\((?P<round>\d{1,20})\))"
)
_MIXED = re.compile(r"(?P<whole>[+-]?\d{1,40}) (?P<above>\d{1,40})/(?P<below>\d{1,40})")
_SCIENTIFIC = re.compile(
    r"(?P<number>[+-]?\d{1,20}(?:\.\d{1,20})?)\s*(?:[eE]|(?:\\times|\\cdot|\*)\s*10\s*\^)\s*"
    r"(?P<open>\{)?\s*(?P<power>[+-]?\d{1,2})\s*(?(open)\})"
)
_BASE = re.compile(
    rf"(?P<digits>\d[0-9A-Za-z.,]*)\s*_\s*(?:\{{\s*)?(?:\\(?:{_WORD_COMMANDS})\s*\{{)?(?P<base>\w+)[}} ]*"
)

_CURRENCY = re.compile(r"(\\\$|€|£|¥|₹|\\pounds|\\euro)\s*")
_UNIT = re.compile(
    rf"(?P<head>.*?[^\s\\,;])?(?:\s|~|\\[,;: ])*(?:\\(?:{_WORD_COMMANDS})\s*\{{(?P<word>[A-Za-z .,/°-]+)\}}|"
    r"(?<=[\d}] )(?P<bare>[A-Za-z]{1,20}(?: [A-Za-z]{2,20}|/[A-Za-z]{1,20})?))(?:\s*\^\s*\{?\s*(?P<power>[1-9])\s*\}?)?"
)
# Names of one unit; a plural's s goes first, so these are singular.
_UNITS = {
    "meter": "m",
    "metre": "m",
    "centimeter": "cm",
    "centimetre": "cm",
    "millimeter": "mm",
    "kilometer": "km",
    "kilometre": "km",
    "inche": "inch",
    "in": "inch",
    "foot": "ft",
    "feet": "ft",
    "yard": "yd",
    "mile": "mi",
    "gram": "g",
    "kilogram": "kg",
    "pound": "lb",
    "lb": "lb",
    "second": "s",
    "sec": "s",
    "minute": "min",
    "hour": "h",
    "hr": "h",
    "liter": "L",
    "litre": "L",
    "dollar": "$",
    "cent": "¢",
    "degree": "°",
    "mile per hour": "mph",
    "miles per hour": "mph",
    "mi/h": "mph",
    "km/hr": "km/h",
    "kilometers per hour": "km/h",
    "kilometer per hour": "km/h",
    "percent": "%",
}
_LIST = re.compile(r"(?P<open>\\\{|[(\[]|)(?P<inside>.*?)(?P<close>\\\}|[)\]]|)", re.DOTALL)
_MATRIX = re.compile(
    r"\\begin\{(?P<kind>[pbBvV]?matrix|array)\}(?:\{[lcr|]*\})?(?P<inside>.*)\\end\{(?P=kind)\}", re.DOTALL
)


def ascii_form(answer: str) -> str:
    """The answer with LaTeX in place of Unicode's mathematical signs, and plain digits and spaces."""
    if answer.isascii():
        return answer
    answer = _RAISED.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", answer)
    answer = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_SUBSCRIPTS)}}}", answer)
    answer = _VULGAR.sub(lambda match: "\\frac{{{}}}{{{}}}".format(*_nfkc(match[0]).split("⁄")), answer)
    answer = "".join(_SIGNS[char] if char in _SIGNS else _plain_character(char) for char in answer)
    return _ROOT.sub(
        lambda match: f"\\sqrt{'[3]' if match[1] == '∛' else ''}{{{match[2] or match[3] or match[4]}}}", answer
    )


def _plain_character(char: str) -> str:
    """A digit of any script, or a full-width sign, as ASCII; other characters as they are."""
    digit = unicodedata.decimal(char, None)
    return str(digit) if digit is not None else _nfkc(char) if "\uff01" <= char <= "\uff5e" else char


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def unwrapped(answer: str) -> str:
    """What emphasis, a box or the delimiters of a formula enclose; a letter of a choice without its parentheses."""
    while (match := _WRAPPED.fullmatch(answer)) is not None:
        answer = next(text for text in match.groups() if text is not None).strip()
    choice = _CHOICE.fullmatch(answer)
    return choice[1] if choice is not None else answer


def with_braces(answer: str) -> str:
    r"""``\frac12`` and the like with a brace around each part, percent signs escaped, rows of a matrix apart."""

    def braced(match: re.Match[str]) -> str:
        above, below = [part for part in match.groups() if part is not None]
        return f"\\frac{{{above}}}{{{below}}}"

    answer = re.sub(r"(?<!\\)%", r"\\%", _SHORT_FRACTION.sub(braced, answer))
    return re.sub(r"\\\\(?:\[[^\]]*\])?\s*", r"\\\\ ", answer) if "\\begin" in answer else answer


def without_separators(answer: str) -> str:
    """A number without what separates its thousands; another answer as it is."""
    return re.sub(_SEPARATOR, "", answer) if _THOUSANDS.fullmatch(answer) else answer


def rational(answer: str) -> Fraction | None:
    """The number that an integer, (repeating) decimal, fraction, mixed number or power of ten writes, else None."""
    with suppress(ZeroDivisionError):
        if _NUMBER.fullmatch(answer):
            return Fraction(answer)
        if (match := _FRACTION.fullmatch(answer) or _MIXED.fullmatch(answer)) is not None:
            part, whole = Fraction(int(match["above"]), int(match["below"])), match["whole"]
            sign = -1 if whole.startswith("-") else 1
            return sign * (abs(int(whole)) + part) if whole.strip("+-") else sign * part
        if (match := _REPEATING.fullmatch(answer)) is not None:
            once, again = match["once"], match["line"] or match["round"]
            period = Fraction(int(again), 10 ** len(once) * (10 ** len(again) - 1))
            return int(match["sign"] + "1") * (Fraction(f"{match['whole'] or 0}.{once}") + period)
        if (match := _SCIENTIFIC.fullmatch(answer)) is not None:
            return Fraction(match["number"]) * Fraction(10) ** int(match["power"])
    return None


def based(answer: str) -> tuple[str, str] | None:
    """The digits and the base of ``12_5``; None for a number without a base."""
    match = _BASE.fullmatch(answer)
    return None if match is None else (match["digits"].replace(",", ""), match["base"])


def measured(answer: str) -> tuple[str, str]:
    """What is measured and its unit or currency, "" without one."""
    if (match := _CURRENCY.match(answer)) is not None:
        return answer[match.end() :].strip(), {"\\$": "$", "\\pounds": "£", "\\euro": "€"}.get(match[1], match[1])
    match = _UNIT.fullmatch(answer)
    if match is None or not match["head"] or "\\begin" in answer:
        return answer, ""
    if match["bare"] and rational(match["head"]) is None:
        return answer, ""  # a product of variables, not a unit
    name = " ".join((match["word"] or match["bare"]).replace(".", " ").split())
    power = match["power"] or ""
    for words, value in (("square ", "2"), ("sq ", "2"), ("cubic ", "3"), ("cu ", "3")):
        if name.startswith(words):
            name, power = name.removeprefix(words), value
    return match["head"].strip(), _unit(name) + ("" if power in ("", "1") else f"^{power}")


def _unit(name: str) -> str:
    if name in _UNITS or len(name) < 3:
        return _UNITS.get(name, name)
    name = name.lower()
    return _UNITS.get(name) or _UNITS.get(name.removesuffix("s"), name.removesuffix("s"))


def pieces(answer: str) -> tuple[str, list[str]] | None:
    """The brackets, "" for none, and the pieces of a list, tuple, set or interval of two or more; None for others."""
    match = _LIST.fullmatch(answer)
    if match is None or bool(match["open"]) != bool(match["close"]):
        return None
    found, depth, start = [], 0, 0
    inside = match["inside"]
    for place, char in enumerate(inside):
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return None  # "(1,2),(3,4)": the outer brackets are of two pieces
        if char == "," and depth == 0:
            found.append(inside[start:place])
            start = place + 1
    found.append(inside[start:])
    texts = [re.sub(r"^(?:\s|\\[,;:!])+|(?:\s|\\[,;:!])+$", "", text) for text in found]
    return (match["open"] + match["close"], texts) if 2 <= len(texts) <= MAX_PIECES and all(texts) else None


def matrix(answer: str) -> tuple[str, list[list[str]]] | None:
    """The kind of a matrix (its brackets mean nothing, bars are a determinant) and its cells, row by row."""
    match = _MATRIX.fullmatch(answer)
    if match is None or "\\begin" in match["inside"]:
        return None
    rows = [row for row in re.split(r"\\\\", match["inside"]) if row.strip()]
    cells = [[cell.strip() for cell in row.split("&")] for row in rows]
    kind = match["kind"] if match["kind"] in ("vmatrix", "Vmatrix") else "matrix"
    return (kind, cells) if sum(map(len, cells)) <= 2 * MAX_PIECES else None
