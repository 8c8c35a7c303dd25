"""Signs that a run does not learn: conditions on the numbers of a step, with their thresholds and what to change.

Each condition is a pure function of a step and the first one. Most become a sign when they have held for ``STEPS``
steps that are no better than the first, or at once when no sample of many has differed in reward from its group. So a
run whose entropy falls because it learns has no sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

STEPS = 3  # in a row
MIN_SAMPLES = 96  # fewer equal rewards in a row are chance: at one right answer in twenty 1 run in 140 begins so
NO_BETTER, SOLVED = 0.02, 0.95  # of the best reward: what a step must be above the first; what is good enough
CUT_SHARE, SAME_SHARE = 0.8, 0.9  # of the answers; a model that has yet to learn to be brief may begin with 0.6 cut
COLLAPSED, RUNAWAY, RUNAWAY_NATS = 0.1, 2.0, 1.0  # of the first entropy; times it, and more than it by so much
KL_NATS = 1.0  # per token
RANDOM_SHARE = 0.95  # of the entropy of a token drawn from all; Qwen3-0.6B with random weights: 0.98
GAP, STALE_GAP = 0.1, 0.2  # mean difference of probabilities (an fp8 rollout: 0.04); of samples of older weights


@dataclass(frozen=True)
class StepNumbers:
    """What the signs see of a step; with dynamic sampling of all samples, before the filter. NaN is not measured.

    Attributes:
        groups: rewards of the samples of each prompt, or of all samples where the estimator compares all.
        format: the best format score of any sample.
        cut: share of the samples that the length limit ended.
        same_answer: share of the most frequent answer; 0 where all prompts have one truth.
        entropy: nats per token.
        most_entropy: nats of a token drawn from the whole vocabulary.
        kl: the largest KL of the step in nats per token.
        gap: mean difference of a token's probabilities in both engines.
        is_stale: some samples come from older weights.
        skipped: optimizer steps that were left out because the loss or the gradient was not finite.
    """

    groups: Sequence[Sequence[float]]
    format: float = math.nan
    cut: float = 0.0
    same_answer: float = 0.0
    entropy: float = math.nan
    most_entropy: float = math.nan
    kl: float = math.nan
    gap: float = math.nan
    is_stale: bool = False
    skipped: float = 0.0

    @property
    def rewards(self) -> list[float]:
        return [reward for group in self.groups for reward in group]

    @property
    def mean(self) -> float:
        return math.fsum(self.rewards) / len(self.rewards)

    @property
    def has_gradient(self) -> bool:
        """Whether rewards differ within any group."""
        return any(reward != group[0] for group in self.groups for reward in group)


class FirstStep(NamedTuple):
    """What later steps are compared with; NaN until it is measured."""

    reward: float = math.nan
    entropy: float = math.nan


@dataclass(frozen=True)
class Sign:
    """A sign of not learning.

    Attributes:
        holds: the condition, on the numbers of a step and of the first one.
        advice: what is seen and what to change.
        when: when the condition is a sign, beside ``steps`` in a row without a gradient in ``MIN_SAMPLES`` samples:
            ``stuck`` (never), ``unlearned`` (for ``STEPS`` steps no better than the first), ``lasting`` (for ``STEPS``
            steps), ``always``.
    """

    holds: Callable[[StepNumbers, FirstStep], bool]
    advice: str
    when: Literal["stuck", "unlearned", "lasting", "always"] = "unlearned"
    steps: int = 1


# The most important first: a cause comes before what follows from it. A policy that training has broken also writes
# answers that are cut, and answers that are cut have no format.
SIGNS = {
    "skipped_update": Sign(
        lambda step, first: step.skipped > 0,
        "loss or gradient was not finite: lower actor.optim.lr, and look for NaN in the weights of the start",
        "always",
    ),
    "engine_gap": Sign(
        lambda step, first: step.gap >= (STALE_GAP if step.is_stale else GAP),
        "the engines disagree about the same tokens: use one dtype in both; docs/debugging.md finds the cause",
        "lasting",
    ),
    "entropy_collapse": Sign(
        lambda step, first: step.entropy <= COLLAPSED * first.entropy,
        "the policy is certain and no better: lower actor.optim.lr, raise rollout.temperature or actor.entropy_coeff",
    ),
    "entropy_runaway": Sign(
        lambda step, first: step.entropy >= max(RUNAWAY * first.entropy, first.entropy + RUNAWAY_NATS),
        "the policy becomes random: lower actor.optim.lr or actor.entropy_coeff, start from an earlier checkpoint",
    ),
    "random_weights": Sign(
        lambda step, first: step.entropy >= RANDOM_SHARE * step.most_entropy,
        "tokens are drawn as if from the whole vocabulary: the weights are not trained, or were not read as they are",
    ),
    "kl_runaway": Sign(
        lambda step, first: step.kl >= KL_NATS,
        "the policy is far from where it was: lower actor.optim.lr, raise actor.kl_loss_coef",
    ),
    "answers_cut": Sign(
        lambda step, first: step.cut >= CUT_SHARE,
        "most answers end at the length limit: raise data.max_response_length, or ask for shorter answers",
        "lasting",
    ),
    "same_answer": Sign(
        lambda step, first: step.same_answer >= SAME_SHARE,
        "nearly all prompts get one answer: check the prompts as the model sees them; lower actor.optim.lr",
    ),
    "no_format": Sign(
        lambda step, first: step.format <= 0,
        "no answer has the form asked for: show it in the prompt or in worked examples; check the chat template",
    ),
    "equal_rewards": Sign(
        lambda step, first: len(set(step.rewards)) == 1,
        "all rewards are equal and not the best: take easier problems, worked examples or a stronger model",
        "stuck",
    ),
    "no_gradient": Sign(
        lambda step, first: not step.has_gradient,
        "no prompt has different rewards: take easier or harder problems, or raise rollout.n",
        "stuck",
        STEPS,
    ),
}


@dataclass
class Signs:
    """The memory of a run's signs; a checkpoint holds all of it as JSON.

    Attributes:
        in_a_row: steps for which each condition has held.
        num_stuck: samples in a row without a gradient.
        num_no_better: steps in a row whose mean reward is not above that of the first by more than noise.
        counts: in how many steps each sign has held.
        is_solved: the rewards have been at the best, without a gradient.
        scores: step, score and number of problems of the first and of the last validation.
        bounds: the least and the greatest training score, and 0 and 1.
    """

    first: FirstStep = field(default_factory=FirstStep)
    in_a_row: dict[str, int] = field(default_factory=dict)
    num_stuck: int = 0
    num_no_better: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    is_solved: bool = False
    scores: list[tuple[int, float, float]] = field(default_factory=list)
    bounds: tuple[float, float] = (0.0, 1.0)

    def take(self, step: StepNumbers) -> list[str]:
        """The signs that hold in ``step``, the most important first."""
        known = zip(self.first, (step.mean, step.entropy), strict=True)
        first = self.first = FirstStep(*(new if math.isnan(old) else old for old, new in known))
        self.num_stuck = 0 if step.has_gradient else self.num_stuck + len(step.rewards)
        best = max(self.bounds[1], *step.rewards)
        self.num_no_better = self.num_no_better + 1 if step.mean <= first.reward + NO_BETTER * best else 0
        self.in_a_row = {
            name: self.in_a_row.get(name, 0) + 1 for name, sign in SIGNS.items() if sign.holds(step, first)
        }
        is_good = step.mean >= SOLVED * best
        self.is_solved |= is_good and self.num_stuck >= MIN_SAMPLES
        found = [name for name in self.in_a_row if self._is_sign(name, is_good)]
        self.counts |= {name: self.counts.get(name, 0) + 1 for name in found}
        return found

    def _is_sign(self, name: str, is_good: bool) -> bool:
        sign, num_steps = SIGNS[name], self.in_a_row[name]
        is_stuck = self.num_stuck >= MIN_SAMPLES and not is_good and num_steps >= sign.steps
        is_unlearned = not is_good and min(num_steps, self.num_no_better) >= STEPS
        beside = {"stuck": False, "unlearned": is_unlearned, "lasting": num_steps >= STEPS, "always": True}
        return is_stuck or beside[sign.when]

    def is_due(self, name: str) -> bool:
        """Whether a sign that holds is printed: in the 1st, 2nd, 4th, 8th, ... step in which it does."""
        return self.counts[name].bit_count() == 1

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Remembers the scores of a validation and the bounds of training scores, where ``metrics`` has them."""
        if "val/problems" in metrics:
            self.scores = [*self.scores[:1], (step, metrics["val/score"], metrics["val/problems"])]
        low, high = (metrics.get(f"critic/score/{name}", math.nan) for name in ("min", "max"))
        self.bounds = min(self.bounds[0], low), max(self.bounds[1], high)

    def verdict(self) -> str:
        """One sentence: whether the run has learned, by its first and last validation, and its signs."""
        signs = ", ".join(f"{name} ({count} step{'s' * (count > 1)})" for name, count in self.counts.items()) or "none"
        if len(self.scores) < 2:
            return f"whether it has learned is not known, without two validations; signs of not learning: {signs}"
        (_, before, _), (_, after, n) = self.scores
        intervals = (low_1, high_1), (low_2, high_2) = [wilson(mean, num, self.bounds) for _, mean, num in self.scores]
        # Newcombe's interval of a difference
        least = after - before - math.hypot(after - low_2, high_1 - before)
        most = after - before + math.hypot(high_2 - after, before - low_1)
        result = "it has learned" if least > 0 else "it has become worse" if most < 0 else "no more than noise"
        both = zip(self.scores, intervals, strict=True)
        scores = " -> ".join(f"{score:.3f} [{a:.3f}, {b:.3f}] (step {step})" for (step, score, _), (a, b) in both)
        return f"{result}: validation score {scores}, {n:.0f} problems, 95 % intervals; signs of not learning: {signs}"


def wilson(mean: float, count: float, bounds: Sequence[float] = (0.0, 1.0)) -> tuple[float, float]:
    """Wilson's interval, 95 %, of the mean of ``count`` values within ``bounds``: wide enough for any such values."""
    low, width = bounds[0], bounds[1] - bounds[0]
    share, penalty = min(max((mean - low) / width, 0.0), 1.0), 1.96**2 / count
    middle, half = share + penalty / 2, math.sqrt(penalty * (share * (1 - share) + penalty / 4))
    return low + width * max(middle - half, 0.0) / (1 + penalty), low + width * min(
        (middle + half) / (1 + penalty), 1.0
    )


def one_line(text: str, limit: int = 64) -> str:
    """The beginning and the end of a text, without line breaks and other characters that a terminal acts on."""
    kept = text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in kept)
