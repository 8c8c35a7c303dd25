"""Optimizers that keep their state off the device."""
