"""Sampling and its noise."""
