"""What a further micro-batch adds to the calls of a phase."""

from __future__ import annotations

import pytest

from tools.plan.collectives import Collective
from tools.plan.repeated import RepeatedCalls, exact, repeated_within, steps, what_repeats


def _call(kind: str, size: int = 1) -> Collective:
    return Collective(kind, "tp", (0, 1), "float32", size, size, None, -1)


def _phase(num: int) -> list[Collective]:
    """Pipelined: two warm-up forwards, pairs, and at the end one call for each and one that holds all."""
    pairs = [_call("all_gather", 8), _call("reduce_scatter", 8)] * num
    return [
        _call("barrier"),
        *pairs,
        _call("all_reduce", 3),
        *[_call("broadcast", 5)] * num,
        _call("all_reduce", 10 * num),
    ]


def test_any_number_is_told_from_two() -> None:
    parts = what_repeats(_phase(3), _phase(4))
    phase = RepeatedCalls("x", parts, count=50, outside=3)
    assert list(phase.of(50)) == _phase(50)
    assert list(phase.of(7)) == _phase(7)
    assert list(phase.of(1)) == _phase(3)  # no fewer than were run
    assert len(phase) == len(_phase(50))


def test_a_pipeline_whose_passes_are_alike() -> None:
    """What a micro-batch adds is a forward and a backward, though the calls of one of them fit in alone as well."""
    forward = [_call("recv"), *[_call("all_gather", 8), _call("reduce_scatter", 8)] * 15, _call("send")]
    backward = [_call("recv"), *[_call("all_gather", 8), _call("reduce_scatter", 8)] * 25, _call("send")]

    def pipelined(num: int) -> list[Collective]:
        return [*forward, *(forward + backward) * (num - 1), *backward, _call("all_reduce", 10 * num)]

    phase = RepeatedCalls("x", what_repeats(pipelined(3), pipelined(4)), count=50, outside=3)
    assert list(phase.of(7)) == pipelined(7)


def test_a_deep_pipeline_is_told_from_one_run() -> None:
    forward = [_call("recv"), _call("all_gather", 8), _call("send")]
    backward = [_call("recv"), _call("all_gather", 8), _call("send")]
    pair = [*forward, *backward, _call("recv", 2)]

    def pipelined(num: int) -> list[Collective]:
        """Three warm-up forwards, as calls as long as a pair, in which two of them follow on one another."""
        num_warmup = min(3, num)
        num_pairs = num - num_warmup
        cool_down = [*backward, _call("recv", 2)] * num_warmup
        return [_call("barrier"), *forward * num_warmup, *pair * num_pairs, *cool_down, _call("all_reduce", 3)]

    parts = repeated_within(pipelined(5), pipelined(1), pipelined(2))
    assert parts is not None
    assert list(RepeatedCalls("x", parts, count=50, outside=5).of(9)) == pipelined(9)
    assert repeated_within(pipelined(3), pipelined(1), pipelined(2)) is None


def test_mini_batches_come_between_what_comes_once() -> None:
    first, last = [_call("barrier", 2)], [_call("all_gather", 4), _call("barrier", 3)]

    def several(num_mini: int, num_micro: int) -> list[Collective]:
        return [*first, *_phase(num_micro) * num_mini, *last]

    micro = RepeatedCalls("x", what_repeats(several(1, 3), several(1, 4)), count=50, outside=3)
    phase = micro.repeated(20, several(1, 2), several(2, 2))
    assert list(phase.whole()) == several(20, 50)
    assert list(phase.of(7, 2)) == several(2, 7)
    assert list(phase.of(7)) == several(1, 7)
    assert len(phase) == len(several(20, 50))
    with pytest.raises(ValueError, match="one mini-batch"):
        micro.repeated(20, several(1, 2), several(2, 3))


def test_other_differences_are_refused() -> None:
    with pytest.raises(ValueError, match="differ by more"):
        what_repeats(_phase(3), [_call("barrier"), *_phase(4)[::-1]])


def test_whole_phases_and_equal_steps() -> None:
    assert exact("x", _phase(2)).of(1) == tuple(_phase(2))
    assert steps("decode", _phase(1), 4).of(4) == tuple(_phase(1)) * 4
