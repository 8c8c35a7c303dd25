"""Upstream's graders: what they read in an answer, and what they call the same."""

from __future__ import annotations

import pytest

from verl.utils.reward_score import default_compute_score, gsm8k, math_batch, math_dapo, math_reward, math_verify


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        ("so 3 + 4 = 7\n#### 7", "7", "7"),
        ("#### 1,234", "1234", "1234"),
        ("#### -3.5 dollars", "-3.5", "-3.5"),
        ("#### 1\n#### 2", "2", "2"),
        ("it is 12 and 7.", None, "7."),
        ("no number at all .", None, None),
        ("#### 5" + "x" * 300, None, None),
    ],
)
def test_gsm8k_reads_the_last_number(answer: str, strict: str | None, flexible: str | None) -> None:
    assert gsm8k.extract_solution(answer) == strict
    assert gsm8k.extract_solution(answer, "flexible") == flexible


def test_gsm8k_scores() -> None:
    assert gsm8k.compute_score("#### 72", "72") == 1.0
    assert gsm8k.compute_score("#### 71", "72", format_score=0.1) == 0.1
    assert gsm8k.compute_score("72", "72", format_score=0.1) == 0.0
    assert gsm8k.compute_score("72", "72", method="flexible", score=2.0) == 2.0
    with pytest.raises(ValueError, match="expected strict or flexible"):
        gsm8k.extract_solution("1", "loose")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\\frac12", "\\frac{1}{2}"),
        ("\\dfrac{1}{2}", "1/2"),
        (".5", "\\frac{1}{2}"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("x = 5", "5"),
        ("50\\%", "50"),
        ("90^\\circ", "90"),
        ("12\\text{ cm}", "12"),
        ("\\$3", "3"),
        ("{.5}", "{0.5}"),
    ],
)
def test_math_answers_that_are_the_same(one: str, other: str) -> None:
    assert math_reward.is_equiv(one, other) and math_reward.is_equiv(other, one)


def test_math_answers_that_are_not_the_same() -> None:
    assert not math_reward.is_equiv("3/6", "1/2") and not math_reward.is_equiv("x+1", "1+x")
    assert math_reward.is_equiv(None, None) and not math_reward.is_equiv(None, "1")


def test_the_last_closed_box_is_the_answer() -> None:
    text = "first \\boxed{1}, then \\boxed{\\frac{1}{2}}."
    assert math_reward.last_boxed_only_string(text) == math_dapo.last_boxed_only_string(text) == "\\boxed{\\frac{1}{2}}"
    assert math_reward.remove_boxed("\\boxed{\\frac{1}{2}}") == math_dapo.remove_boxed("\\boxed{\\frac{1}{2}}")
    assert math_reward.last_boxed_only_string("$\\boxed 7$ it is") == "\\boxed 7"
    assert math_reward.remove_boxed("\\boxed 7") == "7"
    for none in ("no box", "\\boxed{open"):
        assert math_reward.last_boxed_only_string(none) is None and math_dapo.last_boxed_only_string(none) is None
    assert math_reward.compute_score(text, "1/2") == 1.0 and math_reward.compute_score(text, "1") == 0.0
    assert math_reward.compute_score("\\boxed{open", "1") == math_reward.compute_score("\\fbox{1}", "1") == 0.0
    assert math_batch.compute_score_batched(["m"] * 2, [text, "none"], ["0.5", "1"], [{}] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("x = 7", "7"),
        ("$34$", "34"),
        ("12,000 dollars", "12000"),
        ("\\text{blue}", "blue"),
        ("\\frac12", "\\frac{1}{2}"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("\\boxed{5}", "5"),
        ("an apple", "apple"),
        ("90^\\circ", "90"),
    ],
)
def test_minervas_form_of_an_answer(answer: str, normal: str) -> None:
    assert math_dapo.normalize_final_answer(answer) == normal


def test_dapo_reads_what_follows_answer() -> None:
    assert math_dapo.compute_score("thus\nAnswer: $34$", "34") == {"score": 1.0, "acc": True, "pred": "34"}
    assert math_dapo.compute_score("answer: 33\nAnswer: 35", "34") == {"score": -1.0, "acc": False, "pred": "35"}
    assert math_dapo.compute_score("34", "34") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert math_dapo.compute_score("Answer: 34" + " " * 300, "34")["acc"] is False
    assert math_dapo.compute_score("so \\boxed{34}", "34", strict_box_verify=True)["score"] == 1.0
    assert math_dapo.compute_score("\\boxed{34}" + "." * 100, "34", strict_box_verify=True)["pred"] is None
    assert math_dapo.is_correct_strict_box("\\boxed{1}" + "." * 200, "1", [0, 0, 0, 9]) == (1, "1")
    assert math_dapo.is_correct_minerva("Answer: 5", "it is \\boxed{5}", gt_need_extract=True) == (True, "5")
    assert math_dapo.verify("Answer: 5", "5") == (True, "5")
    with pytest.raises(ValueError, match="expected 4"):
        math_dapo.is_correct_strict_box("1", "1", [1])


def test_each_source_of_upstream_has_its_function() -> None:
    assert default_compute_score("openai/gsm8k", "#### 7", "7") == 1.0
    assert default_compute_score("HuggingFaceH4/MATH-500", "\\boxed{7}", "7", {}) == 1.0
    for source in ("math_dapo", "math", "aime2024"):
        assert default_compute_score(source, "Answer: 7", "7", extra_info={"index": 1})["score"] == 1.0
    with pytest.raises(ValueError, match="'mathematics' has no reward function of its own.*aime"):
        default_compute_score("mathematics", "7", "7")
    with pytest.raises(ValueError, match="programs run in the sandbox of this machine"):
        default_compute_score("code", "7", "7", sandbox_fusion_url="http://localhost:8080")


def test_math_verify_compares_as_mathematics() -> None:
    assert math_verify.compute_score("so it is \\boxed{\\frac{2}{4}}", "\\frac{1}{2}") == 1.0
    assert math_verify.compute_score("it is 3", "4") == math_verify.compute_score("no idea", "4") == 0.0
