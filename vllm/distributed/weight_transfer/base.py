"""The requests of vLLM's weight transfer, each with what its backend needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WeightTransferInitRequest:
    """What `LLM.init_weight_transfer_engine` takes; "ipc" needs nothing."""

    init_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightTransferUpdateRequest:
    """What `LLM.update_weights` takes: the fields of the backend's update info."""

    update_info: Any
