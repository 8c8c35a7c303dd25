"""Layouts that fit by the bound of ``bound.py``, fastest first by the time model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from operator import itemgetter

from megatron.core.parallel_layout import ParallelLayout
from tools.plan.search.bound import Bounds
from tools.plan.search.layouts import (
    drafting_rollouts,
    log_prob_batches,
    rollout_layouts,
    rollout_settings,
    training_layouts,
    update_batches,
)
from tools.plan.setup import PlannedRun
from tools.plan.timing.constants import Constants
from tools.plan.timing.cost import StepTime, predict
from tools.plan.timing.rollout import rollout_seconds
from tools.plan.timing.run_shape import RolloutShape, RunShape, TrainShape
from tools.plan.timing.training import log_prob_seconds, update_seconds
from tools.plan.timing.transitions import offload_seconds, weight_sync_seconds
from tools.plan.training import StepSize

KEPT_TRAINING = 400  # of the fastest training layouts, combined with every rollout layout


@dataclass(frozen=True)
class Candidate:
    """A layout with its predicted step."""

    shape: RunShape
    step: StepTime


@dataclass(frozen=True)
class Ranking:
    """num_training, num_rollout: layouts that divide · num_fitting: training layouts that fit by the bound · best:
    candidates, fastest first.
    """

    num_training: int
    num_fitting: int
    num_rollout: int
    best: tuple[Candidate, ...]


def ranking(
    run: PlannedRun,
    shape: RunShape,
    size: StepSize,
    constants: Constants,
    count: int = 200,
    is_wanted: Callable[[ParallelLayout | RolloutShape], bool] = lambda layout: True,
    *,
    tries_drafts: bool = False,
) -> Ranking:
    """The ``count`` fastest layouts of ``run``'s devices that fit by the bound; ``shape`` is the run's own.

    Training and rollout layouts that are not ``is_wanted`` are left out. With ``tries_drafts`` each rollout layout has
    the number of drafts that is fastest; one with drafts is tried without, too, as that needs less memory.
    """
    bounds, rates = Bounds(run, size), constants.rates(run.device.family)
    layouts = list(filter(is_wanted, training_layouts(run)))
    trainings = sorted(_fitting(bounds, shape, constants, layouts), key=itemgetter(0))
    rollouts = list(filter(is_wanted, rollout_layouts(run, shape.rollout)))
    seconds: dict[RolloutShape, float] = {}
    for layout in rollouts:
        spent: dict[RolloutShape, float] = {}
        for rollout in drafting_rollouts(run, layout) if tries_drafts else [layout]:
            other = replace(shape, rollout=rollout)
            generation = sum(rollout_seconds(other, run.device, rates).values())
            spent[rollout] = generation + sum(weight_sync_seconds(other, rates).values())
        kept = (next(iter(spent)), min(spent, key=spent.__getitem__))
        seconds |= {rollout: spent[rollout] for rollout in kept}
    pairs = sorted(product(trainings[:KEPT_TRAINING], seconds), key=lambda pair: pair[0][0] + seconds[pair[1]])
    shapes = (replace(shape, train=train, rollout=rollout) for (_, train), rollout in pairs)
    found = filter(None, (_with_settings(bounds, pair, constants) for pair in shapes))
    best = sorted(islice(found, count), key=lambda candidate: candidate.step.total_s)
    return Ranking(len(layouts), len({train.layout for _, train in trainings}), len(rollouts), tuple(best))


def own_candidate(run: PlannedRun, shape: RunShape, constants: Constants) -> Candidate:
    """The config as it is, whether it fits or not."""
    return Candidate(shape, predict(shape, run.device, constants))


def _fitting(
    bounds: Bounds, shape: RunShape, constants: Constants, layouts: Sequence[ParallelLayout]
) -> Iterator[tuple[float, TrainShape]]:
    """(seconds of offload, log-probs and update, training half) of each layout and update micro-batch that fits."""
    device, config = bounds.run.device, bounds.run.config
    rates, passes = constants.rates(device.family), shape.has_reference + shape.has_old_log_prob
    for layout in layouts:
        plain = shape.with_train(layout=layout, recomputed_layers=-1)
        cuts = update_batches(config, layout.data_parallel_size)
        if bounds.update_bytes(plain.with_train(update=cuts[0])) > device.budget_bytes:
            continue
        if bounds.host_bytes(plain) > device.host_memory_bytes:
            continue
        log_probs = []
        for cut in log_prob_batches(config, layout.data_parallel_size) if passes else [shape.train.log_prob]:
            other = plain.with_train(log_prob=cut)
            if bounds.log_prob_bytes(other) <= device.budget_bytes:
                log_probs.append((passes * sum(log_prob_seconds(other, device, rates).values()), cut))
        if not log_probs:
            continue
        spent, log_prob = min(log_probs, key=itemgetter(0))
        spent += sum(offload_seconds(plain, device, rates).values())
        for cut in cuts:
            fitting = _least_recomputed(bounds, plain.with_train(log_prob=log_prob, update=cut))
            if fitting is not None:
                yield spent + sum(update_seconds(fitting, device, rates).values()), fitting.train


def _least_recomputed(bounds: Bounds, shape: RunShape) -> RunShape | None:
    """With no layers, half or all of a stage recomputed: what fits first, as less is always faster."""
    most = max(shape.train.layout.stage_layer_counts(shape.model.num_hidden_layers))
    shapes = (shape.with_train(recomputed_layers=layers) for layers in dict.fromkeys((0, -(-most // 2), -1)))
    return next((other for other in shapes if bounds.update_bytes(other) <= bounds.run.device.budget_bytes), None)


def _with_settings(bounds: Bounds, shape: RunShape, constants: Constants) -> Candidate | None:
    """With the first of ``rollout_settings`` that fits."""
    run = bounds.run
    for rollout in rollout_settings(run, shape.rollout):
        other = replace(shape, rollout=rollout)
        if max(bounds.memory(other).values()) <= run.device.budget_bytes:
            return Candidate(other, predict(other, run.device, constants))
    return None
