"""Knobs of the model that the actor, the reference and the rollout share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config.overrides import MODEL_OVERRIDES, override_problems


@dataclass(frozen=True)
class GradientCheckpointingConfig:
    """MindSpeed's spelling of activation recomputation; absent values keep ``override_transformer_config``'s.

    Attributes:
        activations_checkpoint_granularity: as ``recompute_granularity``.
        activations_checkpoint_method: as ``recompute_method``.
        activations_checkpoint_num_layers: as ``recompute_num_layers``.
    """

    activations_checkpoint_granularity: str | None = None
    activations_checkpoint_method: str | None = None
    activations_checkpoint_num_layers: int | None = None


@dataclass(frozen=True)
class HFModelConfig:
    """A Hugging Face model directory; no code from it is ever executed.

    Attributes:
        path: the directory, with weights in BF16 or FP8.
        trust_remote_code: False only.
        enable_gradient_checkpointing: makes ``gradient_checkpointing_kwargs`` count.
        override_config: ``moe_config.freeze_moe_router``, and nothing else.
    """

    path: str = "~/models/DeepSeek-V3-hf"
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: GradientCheckpointingConfig = field(default_factory=GradientCheckpointingConfig)
    override_config: dict[str, Any] = field(default_factory=dict)

    @property
    def freeze_moe_router(self) -> bool:
        """``override_config.moe_config.freeze_moe_router``: gates and their biases keep their values."""
        return bool((self.override_config.get("moe_config") or {}).get("freeze_moe_router"))

    def problems(self, where: str) -> list[str]:
        """Every value that cannot work, one sentence each."""
        found = []
        if self.trust_remote_code:
            found.append(
                f"{where}.trust_remote_code is True; model directories are never executed here, leave it False"
            )
        for section, keys in self.override_config.items():
            name = f"{where}.override_config.{section}"
            if section not in ("model_config", "moe_config"):
                found.append(f"{name} is not known here; known: moe_config.freeze_moe_router")
            elif section == "model_config" and keys:
                found.append(f"{name} is {dict(keys)}; the model's config.json decides, leave it empty")
            elif section == "moe_config":
                found += override_problems(name, keys or {}, MODEL_OVERRIDES)
        return found
