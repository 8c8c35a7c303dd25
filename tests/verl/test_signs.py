"""The signs of not learning on numbers: healthy, at each threshold and beyond it; what is printed how often."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from verl.trainer.ppo import signs
from verl.trainer.ppo.signs import SIGNS, FirstStep, Signs, StepNumbers, one_line, wilson

MIXED = ((0.0, 1.0, 0.0, 0.0),) * 32
HEALTHY = StepNumbers(MIXED, format=1.0, entropy=1.0, kl=0.05, gap=1e-6)
FIRST = FirstStep(reward=0.25, entropy=1.0)
WRONG = StepNumbers(((0.0,) * 4,) * 32)  # 128 samples


def test_no_condition_holds_in_a_healthy_step() -> None:
    assert [name for name, sign in SIGNS.items() if sign.holds(HEALTHY, FIRST)] == []


@pytest.mark.parametrize(
    ("name", "below", "at"),
    [
        ("skipped_update", {"skipped": 0.0}, {"skipped": 1.0}),
        ("engine_gap", {"gap": 0.099}, {"gap": signs.GAP}),
        ("engine_gap", {"gap": 0.199, "is_stale": True}, {"gap": signs.STALE_GAP, "is_stale": True}),
        ("answers_cut", {"cut": 0.79}, {"cut": signs.CUT_SHARE}),
        ("no_format", {"format": 0.01}, {"format": 0.0}),
        ("same_answer", {"same_answer": 0.89}, {"same_answer": signs.SAME_SHARE}),
        ("entropy_collapse", {"entropy": 0.11}, {"entropy": signs.COLLAPSED}),
        ("entropy_runaway", {"entropy": 1.99}, {"entropy": signs.RUNAWAY}),
        ("random_weights", {"entropy": 1.89, "most_entropy": 2.0}, {"entropy": 1.9, "most_entropy": 2.0}),
        ("kl_runaway", {"kl": 0.99}, {"kl": signs.KL_NATS}),
        ("equal_rewards", {"groups": (*WRONG.groups, (1.0,) * 4)}, {"groups": WRONG.groups}),
        ("no_gradient", {"groups": (*WRONG.groups, (0.0, 0.0, 0.0, 0.1))}, {"groups": (*WRONG.groups, (1.0,) * 4)}),
    ],
)
def test_a_condition_holds_from_its_threshold_on(name: str, below: dict[str, float], at: dict[str, float]) -> None:
    assert not SIGNS[name].holds(replace(HEALTHY, **below), FIRST)  # type: ignore[arg-type]
    assert SIGNS[name].holds(replace(HEALTHY, **at), FIRST)  # type: ignore[arg-type]


def test_a_small_entropy_runs_away_by_a_nat() -> None:
    low = FirstStep(0.25, 0.2)
    assert not SIGNS["entropy_runaway"].holds(replace(HEALTHY, entropy=1.19), low)
    assert SIGNS["entropy_runaway"].holds(replace(HEALTHY, entropy=1.2), low)


def test_what_is_not_measured_is_no_sign() -> None:
    assert [name for name, sign in SIGNS.items() if sign.holds(StepNumbers(MIXED), FirstStep(0.25))] == []


def test_a_run_that_gets_better_names_nothing_whatever_its_entropy_and_format() -> None:
    memory = Signs()
    for step in range(40):
        rewards = ((1.0,) * step + (0.0,) * (40 - step),) * 8
        found = memory.take(StepNumbers(rewards, float(step > 0), 0.79, 0.0, 0.2 * 0.9**step, 6.0, 0.1 * step, 1e-6))
        assert found == [] or step == 0, (step, found)
    assert memory.counts == {"no_format": 1, "equal_rewards": 1}


def test_equal_rewards_need_many_samples_and_a_cause_comes_first() -> None:
    few = StepNumbers(((0.0,) * 8,) * 4, format=0.0, cut=0.2)  # 32 samples
    memory = Signs()
    assert [memory.take(few) for _ in range(4)] == [
        [],
        [],
        ["no_format", "equal_rewards", "no_gradient"],
        ["no_format", "equal_rewards", "no_gradient"],
    ]
    assert Signs().take(WRONG) == ["equal_rewards"]
    assert Signs().take(replace(WRONG, format=0.0, cut=1.0)) == ["answers_cut", "no_format", "equal_rewards"]


def test_groups_that_are_all_right_or_all_wrong_teach_nothing_after_three_steps() -> None:
    memory, halves = Signs(), StepNumbers(((0.0,) * 8, (1.0,) * 8) * 4)
    assert [memory.take(halves) for _ in range(4)] == [[], [], ["no_gradient"], ["no_gradient"]]
    assert memory.take(HEALTHY) == []
    assert memory.take(halves) == []


def test_a_condition_with_a_gradient_needs_three_steps_that_are_no_better_than_the_first() -> None:
    one = replace(HEALTHY, same_answer=0.9)
    memory = Signs()
    assert [memory.take(one) for _ in range(4)] == [[], [], ["same_answer"], ["same_answer"]]
    hardly = replace(one, groups=(*MIXED * 9, (1.0, 1.0, 0.0, 0.0)))  # 0.251 after 0.25
    assert memory.take(hardly) == ["same_answer"]
    assert memory.take(replace(one, groups=((1.0, 1.0, 0.0, 0.0),) * 32)) == []
    assert memory.take(one) == [], "no better for one step"


def test_a_skipped_update_is_named_at_once_and_what_lasts_even_while_the_reward_rises() -> None:
    memory = Signs()
    found = [
        memory.take(replace(HEALTHY, groups=((1.0,) * n + (0.0,) * 9,) * 8, gap=0.2, cut=0.9)) for n in range(1, 5)
    ]
    assert found == [[], [], ["engine_gap", "answers_cut"], ["engine_gap", "answers_cut"]]
    assert memory.take(replace(HEALTHY, skipped=1.0)) == ["skipped_update"]


def test_the_best_reward_is_solved_and_no_sign() -> None:
    right, memory = StepNumbers(((1.0,) * 8,) * 16, entropy=0.001), Signs()
    assert memory.take(HEALTHY) == [] and not memory.is_solved
    assert [memory.take(right) for _ in range(5)] == [[]] * 5 and memory.is_solved
    more = Signs()  # a reward that can be 2: all at 1 is not the best
    more.add_metrics(1, {"critic/score/min": 0.0, "critic/score/max": 2.0})
    assert more.take(StepNumbers(((1.0,) * 8,) * 16)) == ["equal_rewards"] and not more.is_solved


def test_a_sign_is_printed_again_after_ever_longer_times() -> None:
    memory, printed = Signs(), []
    for step in range(1, 100):
        if memory.is_due(memory.take(WRONG)[0]):
            printed.append(step)
    assert printed == [1, 2, 4, 8, 16, 32, 64]


def test_the_memory_is_json_and_goes_on_where_it_was() -> None:
    whole, resumed = Signs(), Signs()
    steps = [replace(HEALTHY, cut=0.8, entropy=1.0 - 0.2 * step) for step in range(6)]
    expected = [whole.take(step) for step in steps]
    found = []
    for step in steps:
        resumed = Signs(**json.loads(json.dumps(asdict(resumed))))
        found.append(resumed.take(step))
    assert found == expected and any(expected)
    assert json.dumps(asdict(resumed)) == json.dumps(asdict(whole))


def _verdict(first: float, last: float, num: float, low: float = 0.0) -> str:
    memory = Signs()
    memory.add_metrics(0, {"val/score": first, "val/problems": num})
    memory.add_metrics(1, {"critic/score/min": low, "critic/score/max": 1.0})
    memory.add_metrics(9, {"val/score": last, "val/problems": num})
    return memory.verdict()


def test_the_last_line_says_whether_a_difference_is_more_than_noise() -> None:
    line = _verdict(0.36, 0.98, 200)
    assert line.startswith(
        "it has learned: validation score 0.360 [0.297, 0.429] (step 0) -> 0.980 [0.950, 0.992] (step 9)"
    )
    assert line.endswith("200 problems, 95 % intervals; signs of not learning: none")
    assert _verdict(0.50, 0.56, 200).startswith("no more than noise")
    assert _verdict(0.50, 0.56, 2000).startswith("it has learned")
    assert _verdict(0.56, 0.50, 2000).startswith("it has become worse")
    assert _verdict(0.0, 0.0, 16).startswith("no more than noise: validation score 0.000 [0.000, 0.194]")
    assert _verdict(-1.0, 0.5, 100, low=-1.0).startswith("it has learned: validation score -1.000 [-1.000, -0.926]")


def test_the_last_line_without_validations_names_the_signs() -> None:
    memory = Signs()
    for _ in range(3):
        memory.take(WRONG)
    known = "whether it has learned is not known, without two validations; signs of not learning: "
    assert memory.verdict() == known + "equal_rewards (3 steps), no_gradient (1 step)"


def test_wilson_s_interval() -> None:
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(0.0, 10)[0] == 0.0 and wilson(1.0, 10)[1] == 1.0


def test_a_text_is_one_line_whatever_a_model_writes() -> None:
    text = one_line("a\n\x1b[31mb\u2028c\u202e \U0001f600 答" + "x" * 100 + "\r\nend")
    assert text.startswith("a\\n\\x1b[31mb\\u2028c\\u202e") and text.endswith("\\r\\nend") and "答" in text
    assert text.isprintable() and len(text) < 100
