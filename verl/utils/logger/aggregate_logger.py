"""Lines of metrics (upstream: ``verl.utils.logger.aggregate_logger``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def concat_dict_to_str(dict: Mapping[str, Any], step: int) -> str:
    """``step:3 - loss:0.5 - kl:0.1``."""
    return " - ".join([f"step:{step}", *(f"{name}:{value}" for name, value in dict.items())])
