"""The counting behind the asynchronous schedules: no sample over the bound, none lost, none twice, no step stuck."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trainer.ppo.schedules.staleness import StalenessLedger


@settings(max_examples=200)
@given(
    b=st.integers(1, 5),
    k=st.integers(1, 3),
    threshold=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0]),
    data=st.data(),
)
def test_whatever_finishes_when_every_prompt_is_trained_on_once_and_in_time(
    b: int, k: int, threshold: float, data: st.DataObject
) -> None:
    ledger = StalenessLedger(b, k, threshold)
    finished: list[int] = []
    running: list[int] = []
    trained: list[int] = []
    for version in range(8):
        if version:
            ledger.begin_version(version)
        for _ in range(k):
            running += ledger.start(data.draw(st.integers(0, ledger.num_allowed)) if trained else ledger.num_allowed)
            while (chosen := ledger.choice(finished)) is None:
                running += ledger.start(ledger.num_allowed)
                assert running, "a step waits and nothing runs"
                finished.append(running.pop(data.draw(st.integers(0, len(running) - 1))))
            before = dict(ledger.in_flight)
            ages = ledger.take(chosen)
            assert ages == [version - before[number] for number in chosen]
            assert len(chosen) == b and max(ages) <= ledger.max_staleness
            finished = [number for number in finished if number not in chosen]
            trained += chosen
    assert len(set(trained)) == len(trained) == 8 * k * b
    assert sorted([*trained, *finished, *running]) == list(range(ledger.next_prompt))


class CountedNumber(int):
    """A prompt's number that counts how often it is looked up or put in a set."""

    hashes = 0

    def __hash__(self) -> int:
        CountedNumber.hashes += 1
        return int.__hash__(self)


def test_a_choice_takes_time_in_proportion_to_the_prompts_in_flight() -> None:
    ledger = StalenessLedger(200, 1, 1.0)
    ledger.start(400)
    finished = [CountedNumber(number) for number in range(200)]
    CountedNumber.hashes = 0
    assert ledger.choice(finished) == list(range(200))
    assert CountedNumber.hashes < 5 * 400


def test_without_a_threshold_every_step_trains_on_what_it_started() -> None:
    ledger = StalenessLedger(3, 1, 0.0)
    assert ledger.start(ledger.num_allowed) == [0, 1, 2] and ledger.num_allowed == 0
    assert ledger.choice([0, 2]) is None
    assert ledger.choice([2, 0, 1]) == [0, 1, 2]
    assert ledger.take([0, 1, 2]) == [0, 0, 0]
    assert ledger.num_allowed == 0
    ledger.begin_version(1)
    assert ledger.start(3) == [3, 4, 5]


def test_a_younger_prompt_overtakes_only_while_the_older_ones_can_still_be_in_time() -> None:
    ledger = StalenessLedger(2, 1, 1.0)
    assert ledger.start(4) == [0, 1, 2, 3]
    assert ledger.choice([2, 3]) == [2, 3]  # 0 and 1 fit into the next step
    ledger.take([2, 3])
    ledger.begin_version(1)
    ledger.start(ledger.num_allowed)
    assert ledger.choice([4, 5]) is None  # 0 and 1 are due
    assert ledger.choice([4, 5, 0]) is None
    assert ledger.choice([4, 0, 1]) == [0, 1]


def test_state_goes_through_json_and_back() -> None:
    ledger = StalenessLedger(2, 2, 1.0)
    ledger.start(5)
    ledger.take([1, 3])
    other = StalenessLedger(2, 2, 1.0)
    other.load_state(ledger.state())
    assert other == ledger


def test_more_than_allowed_is_not_started() -> None:
    ledger = StalenessLedger(2, 1, 0.5)
    assert ledger.num_allowed == 3
    with pytest.raises(AssertionError, match="4 prompts started where 3 are allowed"):
        ledger.start(4)
