"""Weight mapping as data: where the slice of a Hugging Face tensor goes on this rank."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

_DERIVED_NAME = re.compile(r".*\.rotary_emb\.inv_freq$")
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class WeightTarget:
    """parameter[local] = hf_tensor[source]; `parameter` None: the tensor belongs to other ranks only."""

    hf_shape: tuple[int, ...]
    parameter: nn.Parameter | None = None
    local: tuple[int | slice, ...] = ()
    source: tuple[slice, ...] = ()

    def load(self, name: str, tensor: Tensor) -> None:
        """Copy this rank's slice, converting dtype and device; ValueError when the full tensor has another shape."""
        if tuple(tensor.shape) != self.hf_shape:
            raise ValueError(
                f"weight {name} has shape {tuple(tensor.shape)}, the model config asks for {self.hf_shape}"
            )
        if self.parameter is not None:
            self.parameter.data[self.local].copy_(tensor[self.source])


def is_skipped(name: str, num_layers: int) -> bool:
    """Tensors of a checkpoint that the model has no use for: multi-token-prediction layers and stored rotary tables."""
    layer = _LAYER_NAME.match(name)
    return (layer is not None and int(layer.group(1)) >= num_layers) or _DERIVED_NAME.match(name) is not None


def load_weights(targets: dict[str, WeightTarget], num_layers: int, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Put every (hf_name, full tensor) where it belongs; returns the names taken.

    ValueError for a name the model does not have.
    """
    loaded: set[str] = set()
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            if is_skipped(name, num_layers):
                continue
            raise ValueError(
                f"weight {name} is unknown to this model; expected names such as {', '.join(list(targets)[:3])}"
            )
        target.load(name, tensor)
        loaded.add(name)
    return loaded
