"""Values that were collected under a name, as one (upstream: ``verl.utils.metric``)."""

from __future__ import annotations

from typing import Any

import numpy as np


def reduce_metrics(metrics: dict[str, list[Any]]) -> dict[str, Any]:
    """The maximum where the name has ``max`` in it, the minimum where it has ``min``, else the mean; in place."""
    for name, values in metrics.items():
        if "max" in name:
            metrics[name] = np.max(values)  # type: ignore[assignment]
        elif "min" in name:
            metrics[name] = np.min(values)  # type: ignore[assignment]
        else:
            metrics[name] = np.mean(values)  # type: ignore[assignment]
    return metrics
