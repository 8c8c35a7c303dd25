"""Layouts that fit by the bound of ``bound.py``, fastest first by the time model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from tools.plan.rank_plan import StepSize
from tools.plan.search.bound import Bounds, RolloutKnobs
from tools.plan.search.layouts import (
    log_prob_batches,
    rollout_layouts,
    rollout_settings,
    training_layouts,
    update_batches,
)
from tools.plan.setup import PlannedRun
from tools.plan.timing import Constants, MicroBatches, RolloutShape, RunShape, StepTime, TrainShape, predict
from tools.plan.timing.rollout import rollout_seconds
from tools.plan.timing.training import log_prob_seconds, update_seconds
from tools.plan.timing.transitions import offload_seconds, weight_sync_seconds

KEPT_TRAINING = 400  # of the fastest training layouts, combined with every rollout layout


@dataclass(frozen=True)
class Candidate:
    """A layout with its predicted step.

    bytes: phase -> bound of device memory.
    """

    shape: RunShape
    knobs: RolloutKnobs
    step: StepTime
    bytes: dict[str, float] = field(compare=False)

    @property
    def train(self) -> TrainShape:
        """The training half."""
        return self.shape.train

    @property
    def rollout(self) -> RolloutShape:
        """The rollout half."""
        return self.shape.rollout


@dataclass(frozen=True)
class Ranking:
    """num_training, num_rollout: layouts that divide · num_fitting: training layouts that fit by the bound · best:
    candidates, fastest first.
    """

    num_training: int
    num_fitting: int
    num_rollout: int
    best: tuple[Candidate, ...]


def ranking(run: PlannedRun, shape: RunShape, size: StepSize, constants: Constants, count: int = 200) -> Ranking:
    """The ``count`` fastest layouts of ``run``'s devices that fit by the bound; ``shape`` is the run's own."""
    bounds = Bounds(run.config, run.hf, run.device, size)
    layouts = list(training_layouts(run.config, run.hf, run.device))
    trainings = sorted(_fitting(run, shape, bounds, constants, layouts), key=lambda found: found[0])
    rollouts = list(rollout_layouts(run.config, run.hf, run.device, shape.rollout))
    rates = constants.rates(run.device.family)
    seconds = {}
    for rollout in rollouts:
        other = replace(shape, rollout=rollout)
        parts = rollout_seconds(other, run.device, rates), weight_sync_seconds(other, rates)
        seconds[rollout] = sum(sum(part.values()) for part in parts)
    pairs = sorted(
        (
            (spent + seconds[rollout], train, rollout)
            for (spent, train), rollout in product(trainings[:KEPT_TRAINING], rollouts)
        ),
        key=lambda pair: pair[0],
    )
    best: list[Candidate] = []
    for _, train, rollout in pairs:
        if len(best) == count:
            break
        pair = replace(shape, train=train, rollout=rollout)
        if (found := _with_settings(run, bounds, pair, constants)) is not None:
            best.append(found)
    best.sort(key=lambda candidate: candidate.step.total_s)
    return Ranking(len(layouts), len({train.layout for _, train in trainings}), len(rollouts), tuple(best))


def own_candidate(run: PlannedRun, shape: RunShape, size: StepSize, constants: Constants) -> Candidate:
    """The config as it is, whether it fits or not."""
    bounds, knobs = Bounds(run.config, run.hf, run.device, size), RolloutKnobs.of(run.config)
    return Candidate(shape, knobs, predict(shape, run.device, constants), memory(bounds, shape, knobs))


def memory(bounds: Bounds, shape: RunShape, knobs: RolloutKnobs) -> dict[str, float]:
    """Phase -> bound."""
    found = bounds.rollout_bytes(shape, knobs)
    return found | {"log_prob": bounds.log_prob_bytes(shape), "update": bounds.update_bytes(shape)}


def _fitting(
    run: PlannedRun, shape: RunShape, bounds: Bounds, constants: Constants, layouts: list
) -> Iterator[tuple[float, TrainShape]]:
    """(seconds of offload, log-probs and update, training half) of each layout and update micro-batch that fits."""
    rates, device = constants.rates(run.device.family), run.device
    passes = shape.has_reference + shape.has_old_log_prob
    for layout in layouts:
        plain = replace(shape, train=replace(shape.train, layout=layout, recomputed_layers=-1))
        if (
            bounds.update_bytes(_with(plain, update=update_batches(run.config, layout.data_parallel_size)[0]))
            > bounds.device.budget_bytes
        ):
            continue
        if bounds.host_bytes(plain) > device.host_memory_bytes:
            continue
        log_probs = []
        for cut in log_prob_batches(run.config, layout.data_parallel_size) if passes else [shape.train.log_prob]:
            other = _with(plain, log_prob=cut)
            if bounds.log_prob_bytes(other) <= bounds.device.budget_bytes:
                log_probs.append((passes * sum(log_prob_seconds(other, device, rates).values()), cut))
        if not log_probs:
            continue
        spent, log_prob = min(log_probs, key=lambda found: found[0])
        spent += sum(offload_seconds(plain, device, rates).values())
        for cut in update_batches(run.config, layout.data_parallel_size):
            fitting = _least_recomputed(bounds, _with(plain, log_prob=log_prob, update=cut))
            if fitting is not None:
                yield spent + sum(update_seconds(fitting, device, rates).values()), fitting.train


def _least_recomputed(bounds: Bounds, shape: RunShape) -> RunShape | None:
    """With no layers, half or all of a stage recomputed: what fits first, as less is always faster."""
    most = max(shape.train.layout.stage_layer_counts(shape.model.num_hidden_layers))
    for layers in dict.fromkeys((0, -(-most // 2), -1)):
        other = replace(shape, train=replace(shape.train, recomputed_layers=layers))
        if bounds.update_bytes(other) <= bounds.device.budget_bytes:
            return other
    return None


def _with_settings(run: PlannedRun, bounds: Bounds, shape: RunShape, constants: Constants) -> Candidate | None:
    """With the first of ``rollout_settings`` that fits."""
    for knobs in rollout_settings(run.config, run.hf, run.device, shape.rollout):
        found = memory(bounds, shape, knobs)
        if max(found.values()) <= bounds.device.budget_bytes:
            return Candidate(shape, knobs, predict(shape, run.device, constants), found)
    return None


def _with(shape: RunShape, update: MicroBatches | None = None, log_prob: MicroBatches | None = None) -> RunShape:
    train = replace(shape.train, update=update or shape.train.update, log_prob=log_prob or shape.train.log_prob)
    return replace(shape, train=train)
