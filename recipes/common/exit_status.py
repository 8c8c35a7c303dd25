"""Exit statuses of the launcher; apart, because loading the launcher takes seconds."""

from __future__ import annotations

BAD_INPUT = 2
