"""Reward for Python programs: the last code block of an answer, run against tests in the sandbox.

``ground_truth`` is JSON text or a dict (the keys are verl's, as of APPS, TACO and LeetCode rows):

- ``{"inputs": [text, ...], "outputs": [text, ...]}``: the program reads an input and prints its output. Trailing spaces
  of lines and trailing empty lines do not count.
- with ``"fn_name": "f"`` an input is the JSON list of arguments of ``f`` (or of ``Solution().f``), or text with one
  JSON value a line, and an output the JSON value that it returns.
- ``{"asserts": ["assert f(2) == 3", ...]}``, alone or besides: statements that run after the program, in its scope.

Expected outputs never enter the sandbox. Assertions do: a program made for it can fool them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.utils.reward_score.sandbox import SandboxLimits, run_program

MAX_PROGRAM_CHARS = 1 << 18
_FENCE = "```"
_LANGUAGES = ("", "python", "python3", "py")

# Runs behind the program: prints what the function returns for the arguments on standard input.
_CALL = """
def _call():
    import json, sys
    found = globals().get({name!r}) or getattr(globals()["Solution"](), {name!r})
    print("\\n" + json.dumps(found(*json.load(sys.stdin))))
_call()
"""


@dataclass(frozen=True)
class _Test:
    """One run.

    Attributes:
        stdin: what the program reads.
        expected: what must come out of it; None when ``after`` decides.
        after: statements that run behind the program.
        is_call: ``expected`` is the JSON of a function's value, printed by ``after`` on a last line of its own.
    """

    stdin: str
    expected: str | None
    after: str | None = None
    is_call: bool = False


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | dict[str, Any],
    extra_info: dict[str, Any] | None = None,
    *,
    test_s: float = 4.0,
    total_s: float = 8.0,
    memory_mb: int = 1024,
    is_partial: bool = False,
) -> dict[str, Any]:
    """``score`` is 1.0 when every test passes, else 0.0, or with ``is_partial`` the share of them that pass.

    The first test that fails ends the run, with ``is_partial`` the first that takes too long: the rest have failed too.

    Args:
        test_s: wall-clock seconds of one test; an answer that needs more has failed it (``program_timeout`` is 1).
        total_s: of all tests together, below ``reward_model.timeout_s``; when they need more, TimeoutError: such an
            answer is ungraded, not wrong.
        memory_mb: address space of the program.

    Raises:
        TimeoutError: see ``total_s``.
        ValueError: ``ground_truth`` has not the form above.
        SandboxError: this machine cannot run programs safely.
    """
    tests = list(_tests(ground_truth))
    program = last_code_block(solution_str)
    passed, num_run, status = 0, 0, "no program" if program is None else "ok"
    deadline = time.monotonic() + total_s
    for test in tests if program is not None else []:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"{num_run} of {len(tests)} tests took the {total_s:g} s of all")
        limits = SandboxLimits(wall_s=min(test_s, left_s), cpu_s=int(test_s) + 1, memory_bytes=memory_mb << 20)
        is_passed, came_of_it = _run(program or "", test, limits)
        passed, num_run = passed + is_passed, num_run + 1
        if came_of_it == "timeout" and left_s < test_s:
            raise TimeoutError(f"test {num_run} of {len(tests)} did not end in the {total_s:g} s of all")
        if not is_passed:
            status = came_of_it
            if not is_partial or status == "timeout":
                break
    share = passed / len(tests)
    return {
        "score": share if is_partial else float(passed == len(tests)),
        "accuracy": float(passed == len(tests)),
        "format": float(program is not None),
        "program_timeout": float(status == "timeout"),
        "status": status,
        "tests": f"{passed} of {num_run} run, {len(tests)} in all",
    }


def last_code_block(text: str) -> str | None:
    """What the last closed ``` fence encloses; None without one, in another language, or when it is too long."""
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if line.lstrip().startswith(_FENCE)]
    if len(fences) < 2:
        return None
    start, end = fences[len(fences) // 2 * 2 - 2 :][:2]
    language = lines[start].strip().removeprefix(_FENCE).strip().lower()
    block = "\n".join(lines[start + 1 : end])
    return block if language in _LANGUAGES and len(block) <= MAX_PROGRAM_CHARS else None


def _run(program: str, test: _Test, limits: SandboxLimits) -> tuple[bool, str]:
    """Whether the test holds, and what came of the run: a status of ``ProgramResult``, or ``wrong``."""
    result = run_program(program, test.stdin, tests=test.after, limits=limits)
    if not result.is_ok or test.expected is None:
        return result.is_ok, result.status
    if test.is_call:
        returned = result.stdout.rstrip("\n").rpartition("\n")[2]
        is_right = _same_value(returned, test.expected)
    else:
        is_right = _plain(result.stdout) == _plain(test.expected)
    return is_right, "ok" if is_right else "wrong"


def _tests(ground_truth: str | dict[str, Any]) -> Iterator[_Test]:
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except json.JSONDecodeError as error:
        raise ValueError(f"ground_truth of a code problem is not JSON: {error}") from error
    if not isinstance(truth, dict) or not (truth.get("inputs") or truth.get("asserts")):
        raise ValueError("ground_truth of a code problem needs 'inputs' and 'outputs', or 'asserts'")
    inputs, outputs = truth.get("inputs") or [], truth.get("outputs") or []
    if len(inputs) != len(outputs):
        raise ValueError(f"ground_truth of a code problem has {len(inputs)} inputs and {len(outputs)} outputs")
    name = truth.get("fn_name")
    for given, expected in zip(inputs, outputs, strict=True):
        if name is not None:
            yield _Test(_arguments(given), json.dumps(expected), _CALL.format(name=str(name)), is_call=True)
        else:
            yield _Test(str(given), str(expected))
    asserts = truth.get("asserts") or []
    if asserts:
        yield _Test("", None, "\n".join([asserts] if isinstance(asserts, str) else asserts))


def _arguments(given: Any) -> str:
    if isinstance(given, str):
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
    return json.dumps(given)


def _same_value(returned: str, expected: str) -> bool:
    """Equal JSON values; as in APPS, an expected list of one value stands for the value too."""
    try:
        value, wanted = json.loads(returned), json.loads(expected)
    except (ValueError, RecursionError):
        return False
    if isinstance(wanted, str) and not isinstance(value, str):
        try:
            wanted = json.loads(wanted)
        except json.JSONDecodeError:
            return False
    return bool(value == wanted or [value] == wanted)


def _plain(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().split("\n")]
