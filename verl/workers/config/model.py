"""Knobs of the model that the actor, the reference and the rollout share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GradientCheckpointingConfig:
    """MindSpeed's spelling of activation recomputation; absent values keep ``override_transformer_config``'s."""

    activations_checkpoint_granularity: str | None = None
    activations_checkpoint_method: str | None = None
    activations_checkpoint_num_layers: int | None = None


@dataclass(frozen=True)
class HFModelConfig:
    """A Hugging Face model directory; no code from it is ever executed."""

    path: str = "~/models/DeepSeek-V3-hf"
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: GradientCheckpointingConfig = field(default_factory=GradientCheckpointingConfig)
    override_config: dict[str, Any] = field(default_factory=dict)

    def problems(self, where: str) -> list[str]:
        """Every value that cannot work, one sentence each."""
        if self.trust_remote_code:
            return [f"{where}.trust_remote_code is True; model directories are never executed here, leave it False"]
        return []
