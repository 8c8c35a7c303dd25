"""Switching a worker between training and rollout."""
