"""Seconds of a step and of its phases, predicted from the run's shape, the device and constants of published runs."""
