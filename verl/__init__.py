"""The RL system: one controller, one worker process per device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.data_proto import DataProto

__all__ = ["DataProto", "__version__"]

__version__ = "0.9.0"  # of the verl whose names these are, beside those of 0.6.1


def __getattr__(name: str) -> Any:
    """``from verl import DataProto`` imports torch when it is asked for, so that ``import verl`` does nothing."""
    if name == "DataProto":
        from verl.data_proto import DataProto

        return DataProto
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
