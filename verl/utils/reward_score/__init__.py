"""Grading answers outside the driver."""
