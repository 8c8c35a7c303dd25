"""A generation of several turns: samples decode, wait for their tools and go on, one event after another."""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tools.plan.timing.lengths import LengthDistribution, length_distribution
from verl.workers.config import RolloutConfig

TOOLS = "tools"  # the term of the seconds in which every sample waits and nothing decodes
TOOL_SPREAD = 1.0
_MOST_SAMPLES = 256  # that are followed one by one; each stands for as many as a replica has more
_LONGEST = 50.0  # a call, in means


@dataclass(frozen=True)
class Turns:
    """Turns of a sample and what is between two of them.

    mean, limit: turns of the model · tool_s: mean seconds of an environment's call · given: tokens that the model is
    given after it, a part of the response's · spread: standard deviation of the logarithm of turns and of seconds.
    """

    mean: float
    limit: float
    tool_s: float
    given: float
    spread: float = TOOL_SPREAD

    def given_tokens(self) -> float:
        """That a sample is given after its first turn, on average."""
        return (self.mean - 1) * self.given


def default_turns(rollout: RolloutConfig) -> Turns | None:
    """Half of the turns that are allowed, or three, and calls of a second; None where a sample is one turn."""
    given = rollout.multi_turn
    if not given.enable:
        return None
    mean = max(1.0, (given.max_assistant_turns or 6) / 2)
    return Turns(mean, given.max_assistant_turns or 4 * mean, 1.0, given.max_tool_response_length / 4)


@dataclass(slots=True)
class _Sample:
    tokens: float  # of each turn
    context: float  # behind which the next one is written
    calls: list[float]  # seconds of those to come, the next one last


def generation_terms(
    turns: Turns,
    responses: LengthDistribution,
    prompt: float,
    rows: float,
    slots: float,
    replicas: int,
    step_terms: Callable[[float, float], Mapping[str, float]],
) -> dict[str, float]:
    """Seconds by term until the last of ``rows`` samples of a replica has ended, with those of ``TOOLS``.

    Args:
        slots: samples that decode at the same time.
        replicas: that step together, as long as one of them has a sample left.
        step_terms: the terms of a decode step by (sequences, tokens of each in the cache).
    """
    samples = _samples(turns, responses, prompt, rows, replicas)
    weight = rows / len(samples)
    ready, running, away = deque(samples), list[tuple[float, int, _Sample]](), list[tuple[float, int, _Sample]]()
    now_s = steps = 0.0
    number = 0
    terms: dict[str, float] = {TOOLS: 0.0}
    while ready or running or away:
        while ready and len(running) < max(1.0, slots / weight):
            sample = ready.popleft()
            heapq.heappush(running, (steps + sample.tokens, number := number + 1, sample))
        if running:
            context = sum(one.context + one.tokens / 2 for _, _, one in running) / len(running)
            step = step_terms(len(running) * weight, context)
            step_s = sum(step.values())
            count = running[0][0] - steps
            if away:
                count = min(count, max(0.0, away[0][0] - now_s) / step_s)
            for name, seconds in step.items():
                terms[name] = terms.get(name, 0.0) + seconds * count
            steps, now_s = steps + count, now_s + count * step_s
        else:
            terms[TOOLS] += away[0][0] - now_s
            now_s = away[0][0]
        while running and running[0][0] <= steps + 1e-9:
            sample = heapq.heappop(running)[2]
            if sample.calls:
                sample.context += sample.tokens + turns.given
                heapq.heappush(away, (now_s + sample.calls.pop(), number := number + 1, sample))
        while away and away[0][0] <= now_s + 1e-9:
            ready.append(heapq.heappop(away)[2])
    return terms


def _samples(turns: Turns, responses: LengthDistribution, prompt: float, rows: float, replicas: int) -> list[_Sample]:
    """Lengths, turns and calls at even shares of their distributions, in a fixed random order; the longest response is
    that of all replicas.
    """
    count = max(1, min(_MOST_SAMPLES, round(rows)))
    order = random.Random(0)
    lengths = [_at(responses, (index + 0.5) / count) for index in range(count)]
    lengths[-1] = max(lengths[-1], responses.max_of(rows * replicas))
    of_turns = length_distribution(turns.mean, max(turns.limit, turns.mean), turns.spread)
    numbers = [max(1, round(_at(of_turns, (index + 0.5) / count))) for index in range(count)]
    seconds = length_distribution(turns.tool_s, _LONGEST * turns.tool_s, turns.spread) if turns.tool_s > 0 else None
    order.shuffle(lengths)
    order.shuffle(numbers)
    samples = []
    for length, number in zip(lengths, numbers, strict=True):
        sampled = max(length - (number - 1) * turns.given, number)
        calls = [0.0 if seconds is None else _at(seconds, order.random()) for _ in range(number - 1)]
        samples.append(_Sample(sampled / number, prompt, calls))
    return samples


def _at(lengths: LengthDistribution, share: float) -> float:
    return lengths.points[min(bisect_left(lengths.below, share), len(lengths.points) - 1)]
