"""The check of a reward function's file before anything starts: it reads the file and runs nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.utils.reward_score.functions import RewardFunctionSpec
from verl.utils.reward_score.static_check import file_problem

RAISES = "raise RuntimeError('this file must not run')\n"


def problem_of(folder: Path, text: str, name: str = "compute_score", **kwargs: int) -> str | None:
    path = folder / "reward.py"
    path.write_text(RAISES + text)
    return file_problem(RewardFunctionSpec(str(path), name, kwargs))


@pytest.mark.parametrize(
    "text",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...",
        "async def compute_score(data_source, solution_str, ground_truth, extra_info, **others): ...",
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos): ...",
        "def compute_score(a, b, c, d, /): ...",
        "def compute_score(*samples): ...",
        "from elsewhere import compute_score",
        "from elsewhere import *",
        "compute_score = make_score()",
        "import functools\n@functools.cache\ndef compute_score(): ...",
        "class compute_score: ...",
        "try:\n    import fast\nexcept ImportError:\n    def compute_score(a, b, c, d): ...",
    ],
)
def test_what_may_work_is_left_alone(tmp_path: Path, text: str) -> None:
    assert problem_of(tmp_path, text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def compute_score(data_source:\n", "reward.py is not Python in line 2: "),
        ("def score(a, b, c, d): ...", "defines no 'compute_score'; it defines score"),
        ("x = 1", "defines no 'compute_score'"),
        ("def compute_score(a, b): ...", "compute_score of "),
        ("def compute_score(a, b): ...", "(a, b) cannot be called; expected def NAME(data_source, solution_str"),
        ("def compute_score(data_source, solution_str, ground_truth, *, extra_info, must): ...", "cannot be called"),
    ],
)
def test_what_cannot_work_is_named(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in str(problem_of(tmp_path, text))


def test_kwargs_need_their_parameters(tmp_path: Path) -> None:
    text = "def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1): ..."
    assert problem_of(tmp_path, text, scale=2) is None
    assert "cannot be called with the reward_kwargs depth" in str(problem_of(tmp_path, text, depth=2))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    spec = RewardFunctionSpec(str(tmp_path / "none.py"))
    assert "none.py: No such file or directory; expected the Python file" in str(file_problem(spec))


@pytest.mark.parametrize(("encoding", "first"), [("utf-8-sig", ""), ("gbk", "# -*- coding: gbk -*-\n")])
def test_a_file_in_any_encoding_that_python_reads(tmp_path: Path, encoding: str, first: str) -> None:
    path = tmp_path / "reward.py"
    path.write_bytes(f"{first}# 奖励\r\ndef compute_score(a, b, c, d): ...\r\n".encode(encoding))
    assert file_problem(RewardFunctionSpec(str(path))) is None
    path.write_bytes("# 奖励".encode("gbk"))
    assert "reward.py is not Python" in str(file_problem(RewardFunctionSpec(str(path))))
