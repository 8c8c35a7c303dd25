"""Makes the training calls of one step on a worker, planned or real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.plan.collectives import Collective, CollectiveLog
from tools.plan.device import MemoryMeter
from tools.plan.training import StepSize, batch_of, training_calls
from verl.workers.megatron_workers import ActorRolloutRefWorker


@dataclass(frozen=True)
class TrainingPhase:
    """One call of a rank: its collectives in order, and bytes beside what was there before it.

    peak_bytes: most that were alive at one time · left_bytes: still alive when it ended.
    """

    collectives: tuple[Collective, ...]
    peak_bytes: int
    left_bytes: int


def run_training(
    worker: ActorRolloutRefWorker,
    num_rows: int,
    size: StepSize,
    log: CollectiveLog,
    meter: MemoryMeter,
    before_call: Callable[[], None] = lambda: None,
) -> dict[str, TrainingPhase]:
    """Makes the training calls of one step on ``worker``, planned or real, while ``log`` and ``meter`` are active.

    before_call: waits until real process groups have let go of what the call before it sent.
    """
    batch = batch_of(num_rows, size, worker.run_config)
    done = {}
    for name in training_calls(worker.run_config):
        before_call()
        before = meter.now_bytes
        meter.peak_bytes = before
        with log.apart() as calls:
            getattr(worker, name)(batch)
        done[name] = TrainingPhase(tuple(calls), meter.peak_bytes - before, meter.now_bytes - before)
    return done
