"""Exit statuses of the planner."""

from __future__ import annotations

FITS, DOES_NOT_FIT, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
