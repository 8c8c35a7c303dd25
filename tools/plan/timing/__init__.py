"""Seconds of a step and of its phases, predicted from the run's shape, the device and constants of published runs."""

from tools.plan.timing.constants import Constants, PhaseError, load_constants
from tools.plan.timing.cost import StepTime, Variation, predict, sensitivity
from tools.plan.timing.run_shape import Lengths, MicroBatches, RolloutShape, RunShape, TrainShape

__all__ = [
    "Constants",
    "Lengths",
    "MicroBatches",
    "PhaseError",
    "RolloutShape",
    "RunShape",
    "StepTime",
    "TrainShape",
    "Variation",
    "load_constants",
    "predict",
    "sensitivity",
]
