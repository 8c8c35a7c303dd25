"""Programs as answers: which block is the program, what counts as right, what a row's tests may look like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.code_answers import compute_score, last_code_block

INPUTS = {"inputs": ["1", "2", "3", "4"], "outputs": ["1"] * 4}
SQUARE = "print(int(input()) ** 2)"


def _score(program: str, truth: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    return compute_score("code", f"So:\n```python\n{program}\n```\nDone.", json.dumps(truth), {}, **kwargs)


def test_the_last_closed_block_is_the_program() -> None:
    assert last_code_block("a\n```python\nx = 1\n```\nb\n```py\nx = 2\ny\n```\nc") == "x = 2\ny"
    assert last_code_block("```\nx\n```") == "x"
    assert last_code_block("```python\nx = 1\n```\nthen\n```python\nnever closed") == "x = 1"
    assert last_code_block("```cpp\nint x;\n```") is None
    assert last_code_block("x = 1") is None and last_code_block("```") is None and last_code_block("") is None
    assert last_code_block("```\n" + "x" * (1 << 19) + "\n```") is None, "too long to run"


def test_outputs_are_compared_without_trailing_space() -> None:
    truth = {"inputs": ["3\n", "-2\n"], "outputs": ["9", "4 \n\n"]}
    right = _score(SQUARE, truth)
    assert (right["score"], right["accuracy"], right["format"], right["status"]) == (1.0, 1.0, 1.0, "ok")
    wrong = _score("print(9)", truth)
    assert (wrong["score"], wrong["status"], wrong["tests"]) == (0.0, "wrong", "1 of 2 run, 2 in all")
    assert _score("print(9)", truth, is_partial=True)["score"] == 0.5
    assert _score("print(' 9')", {"inputs": ["3"], "outputs": ["9"]})["score"] == 0.0, "leading space counts"


def test_functions_are_called_with_json_arguments() -> None:
    truth = {"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [3, [7]]}
    assert _score("def add(a, b):\n    print('noise')\n    return a + b", truth)["score"] == 1.0
    assert _score("class Solution:\n    def add(self, a, b): return a + b", truth)["score"] == 1.0
    assert _score("def add(a, b): return a - b", truth)["score"] == 0.0
    assert _score("def other(): pass", truth)["status"] == "failed"
    assert _score("def add(a, b): return object()", truth)["status"] == "failed"
    assert _score("print(3)\nraise SystemExit", truth)["score"] == 0.0, "printing the answer is not returning it"


def test_assertions_must_be_reached() -> None:
    truth = {"asserts": ["assert f(2) == 3", "assert f(3) == 4"]}
    assert _score("def f(x): return x + 1", truth)["score"] == 1.0
    assert _score("def f(x): return 3", truth)["score"] == 0.0
    assert _score("import os\ndef f(x): os._exit(0)", truth)["score"] == 0.0


@pytest.mark.timeout(60)
def test_a_slow_program_is_wrong_and_too_many_slow_tests_are_ungraded() -> None:
    slow = "import time\ntime.sleep(0.7)\nprint(1)"
    endless = _score("while True: pass", {"inputs": [""], "outputs": ["1"]}, test_s=0.5)
    partly = _score("if input() == '2': \n    while True: pass\nprint(1)", INPUTS, test_s=0.5, is_partial=True)
    assert (partly["score"], partly["program_timeout"], partly["tests"]) == (0.25, 1.0, "1 of 2 run, 4 in all")
    assert (endless["score"], endless["program_timeout"], endless["status"]) == (0.0, 1.0, "timeout")
    with pytest.raises(TimeoutError, match="1 s of all"):
        _score(slow, {"inputs": [""] * 9, "outputs": ["1"] * 9}, total_s=1.0)


def test_an_answer_without_a_program_scores_nothing() -> None:
    result = compute_score("code", "It is 9.", json.dumps({"inputs": ["3"], "outputs": ["9"]}), {})
    assert (result["score"], result["format"], result["status"]) == (0.0, 0.0, "no program")


@pytest.mark.parametrize(
    "truth, message",
    [
        ("42", "needs 'inputs' and 'outputs', or 'asserts'"),
        ("x", "is not JSON"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs and 0 outputs"),
    ],
)
def test_a_row_without_tests_is_an_error_of_the_row(truth: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_score("code", f"```\n{SQUARE}\n```", truth, {})


def test_the_default_function_grades_code_and_says_what_it_does_not() -> None:
    truth = json.dumps({"inputs": ["3"], "outputs": ["9"]})
    for source in ("code", "taco", "code/own"):
        assert default_compute_score(source, f"```\n{SQUARE}\n```", truth)["score"] == 1.0
    with pytest.raises(ValueError, match="'riddles' has no reward function of its own"):
        default_compute_score("riddles", "42", "42")
