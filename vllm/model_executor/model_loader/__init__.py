"""Weights from a checkpoint directory."""
