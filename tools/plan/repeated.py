"""Calls of a phase with thousands of micro-batches or steps, described by what each further one adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from tools.plan.collectives import Collective

_LOOKAHEAD = 24  # calls compared to find where two sequences continue alike after an insertion


@dataclass(frozen=True)
class Part:
    """Neighbouring calls.

    is_repeated: they occur once for every further unit · growth: elements sent and received that every further
    unit adds to each call; empty where nothing grows.
    """

    calls: tuple[Collective, ...]
    is_repeated: bool = False
    growth: tuple[tuple[int, int], ...] = ()

    def of(self, num_more: int) -> Iterator[tuple[Collective, int]]:
        """Every call and how often it comes, with so many units more than there were."""
        if self.is_repeated:
            yield from ((call, num_more) for call in self.calls)
        elif not self.growth:
            yield from ((call, 1) for call in self.calls)
        else:
            for call, (sent, received) in zip(self.calls, self.growth, strict=True):
                yield call._replace(sent=call.sent + num_more * sent, received=call.received + num_more * received), 1


@dataclass(frozen=True)
class RepeatedCalls:
    """The calls of a phase of ``count`` units (micro-batches, one for each virtual stage, or steps of a generation).

    outside: units that are in the parts that are not repeated · mini_batches: how often all parts come, between the
    calls ``before`` and ``after`` them.
    """

    phase: str
    parts: tuple[Part, ...]
    count: int = 0
    outside: int = 0
    mini_batches: int = 1
    before: tuple[Collective, ...] = ()
    after: tuple[Collective, ...] = ()

    def __len__(self) -> int:
        return sum(times for _, times in self.counted())

    def counted(self) -> Iterator[tuple[Collective, int]]:
        """Every call of the phase and how often it comes."""
        yield from ((call, 1) for call in self.before)
        for part in self.parts:
            yield from ((call, times * self.mini_batches) for call, times in part.of(self.count - self.outside))
        yield from ((call, 1) for call in self.after)

    def of(self, count: int, mini_batches: int = 1) -> tuple[Collective, ...]:
        """The phase with so many units in each of so many mini-batches, and no more than there are of either.

        There are no fewer units than show how all further ones are.
        """
        num_more = min(max(count, self.outside), self.count) - self.outside
        found: list[Collective] = []
        for part in self.parts:
            if part.is_repeated:
                found += part.calls * num_more
            else:
                found += [call for call, _ in part.of(num_more)]
        return (*self.before, *(found * min(mini_batches, self.mini_batches)), *self.after)

    def whole(self) -> tuple[Collective, ...]:
        return self.of(self.count, self.mini_batches)

    def repeated(self, mini_batches: int, one: Sequence[Collective], two: Sequence[Collective]) -> RepeatedCalls:
        """A phase of so many mini-batches, of which this is one.

        one, two: the calls with one and with two small mini-batches, which show what comes before and after all.
        ValueError when the second mini-batch differs from the first.
        """
        num_before, num_after = _ends(one, two)
        parts, before = _cut(self.parts, num_before)
        backwards, after = _cut([_reversed(part) for part in reversed(parts)], num_after)
        inner = tuple(_reversed(part) for part in reversed(backwards))
        return replace(self, parts=inner, mini_batches=mini_batches, before=before, after=after[::-1])


def exact(phase: str, calls: Sequence[Collective]) -> RepeatedCalls:
    """The calls of a phase, all of them given."""
    return RepeatedCalls(phase, (Part(tuple(calls)),))


def steps(phase: str, calls: Sequence[Collective], count: int) -> RepeatedCalls:
    """The calls of ``count`` equal steps."""
    return RepeatedCalls(phase, (Part(tuple(calls), is_repeated=True),), count)


def what_repeats(before: Sequence[Collective], after: Sequence[Collective]) -> tuple[Part, ...]:
    """The parts of ``before``, with what ``after``, of one unit more, has in addition: further calls, larger ones.

    ValueError when ``after`` differs in another way.
    """
    parts: list[Part] = []
    i = j = 0
    while i < len(before) or j < len(after):
        same = _common(before, after, i, j)
        if same:
            parts.append(_grown(before[i : i + same], after[j : j + same]))
            i, j = i + same, j + same
            continue
        more = _inserted(before, after, i, j)
        if more is None:
            raise ValueError(f"{len(before)} and {len(after)} calls differ by more than what one micro-batch adds")
        parts.append(Part(tuple(after[j : j + more]), is_repeated=True))
        j += more
    return tuple(parts)


def repeated_within(
    calls: Sequence[Collective], one: Sequence[Collective], two: Sequence[Collective]
) -> tuple[Part, ...] | None:
    """The parts of a phase in which a unit follows on a whole one somewhere, as ``what_repeats``.

    one, two: the phase with one and with two units, which show what a unit consists of but not where it comes. None
    where there are no two such pieces one after another.
    """
    unit, length = Counter(two) - Counter(one), len(two) - len(one)
    for start in range(length, len(calls) - length + 1):
        piece = calls[start : start + length]
        if calls[start - 1] == piece[-1] and calls[start - length : start] == piece and Counter(piece) == unit:
            return Part(tuple(calls[:start])), Part(tuple(piece), is_repeated=True), Part(tuple(calls[start:]))
    return None


def _common(before: Sequence[Collective], after: Sequence[Collective], i: int, j: int) -> int:
    """How many calls are alike from i and j on: equal, or only larger where nothing is inserted after them."""
    count = 0
    while i + count < len(before) and j + count < len(after):
        if before[i + count] == after[j + count]:
            count += 1
        elif len(before) - i == len(after) - j and _alike(before[i:], after[j:]):
            return len(before) - i
        else:
            break
    return count


def _inserted(before: Sequence[Collective], after: Sequence[Collective], i: int, j: int) -> int | None:
    """How many calls of ``after`` were inserted before it continues like ``before``.

    What a unit adds repeats what the units before it added there: the longest piece that equals the one before it or
    the one after it. Calls of forwards and backwards are alike, so others may seem to fit as well; repeated, they do
    not. Where no unit was added before (the warm-up of virtual stages), the piece after which most is equal.
    """
    most = len(after) - j - (len(before) - i)
    for more in range(most, 0, -1):
        piece = after[j : j + more]
        if piece in (before[max(0, i - more) : i], before[i : i + more]) and (
            more == most or _equal(before, after, i, j + more)
        ):
            return more
    best, longest = None, 0
    for more in range(1, most + 1):
        run = _equal(before, after, i, j + more)
        if run > longest:
            best, longest = more, run
        if longest >= _LOOKAHEAD:
            break
    if best is None and _alike(before[i:], after[j + most :]):
        return most  # all that follows has grown
    return best


def _equal(before: Sequence[Collective], after: Sequence[Collective], i: int, j: int) -> int:
    """The number of equal calls from there on, counted as far as ``_LOOKAHEAD``."""
    pairs = zip(before[i : i + _LOOKAHEAD], after[j : j + _LOOKAHEAD], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _alike(before: Sequence[Collective], after: Sequence[Collective]) -> bool:
    return len(before) == len(after) and all(
        x._replace(sent=0, received=0) == y._replace(sent=0, received=0) for x, y in zip(before, after, strict=True)
    )


def _grown(before: Sequence[Collective], after: Sequence[Collective]) -> Part:
    growth = tuple((y.sent - x.sent, y.received - x.received) for x, y in zip(before, after, strict=True))
    return Part(tuple(before), growth=growth if any(map(any, growth)) else ())


def _ends(one: Sequence[Collective], two: Sequence[Collective]) -> tuple[int, int]:
    """How many calls come before the first of two equal mini-batches, and how many after the last."""
    length = len(two) - len(one)
    for first in range(len(one) - length + 1):
        end = first + length
        if list(two[:end]) == list(one[:end]) and list(two[end:]) == list(one[first:]):
            return first, len(one) - end
    raise ValueError(f"{len(one)} and {len(two)} calls differ by more than what one mini-batch adds")


def _cut(parts: Sequence[Part], count: int) -> tuple[list[Part], tuple[Collective, ...]]:
    """The parts without their first ``count`` calls, and those calls."""
    found: list[Collective] = []
    rest = list(parts)
    while len(found) < count:
        part = rest.pop(0)
        missing = count - len(found)
        if part.is_repeated or any(map(any, part.growth[:missing])):
            raise ValueError("calls outside of the mini-batches grow with the micro-batches")
        found += part.calls[:missing]
        if missing < len(part.calls):
            rest.insert(0, Part(part.calls[missing:], growth=part.growth[missing:]))
    return rest, tuple(found)


def _reversed(part: Part) -> Part:
    return replace(part, calls=part.calls[::-1], growth=part.growth[::-1])
