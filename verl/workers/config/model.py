"""Config of the model that the actor, the reference and the rollout share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config.overrides import LIMIT_OVERRIDES, MODEL_OVERRIDES, override_problems
from verl.workers.config.values import Section

_POSITIONS = "max_position_embeddings"


@dataclass(frozen=True)
class GradientCheckpointingConfig(Section):
    """MindSpeed's spelling of activation recomputation; absent values keep ``override_transformer_config``'s.

    Attributes:
        activations_checkpoint_granularity: MindSpeed's name of ``recompute_granularity``.
        activations_checkpoint_method: MindSpeed's name of ``recompute_method``.
        activations_checkpoint_num_layers: MindSpeed's name of ``recompute_num_layers``.
    """

    activations_checkpoint_granularity: str | None = None
    activations_checkpoint_method: str | None = None
    activations_checkpoint_num_layers: int | None = None


@dataclass(frozen=True)
class HFModelConfig(Section):
    """A Hugging Face model directory; no code from it is ever executed.

    Attributes:
        path: the model's directory, with weights in BF16 or FP8.
        external_lib: a Python module or ``.py`` file, or a list of them, that the controller and every training worker
            import before the config is checked. What it registers (``register_adv_est``, ``register_policy_loss``, a
            reward manager) can then be named in the config. A file must exist on every node.
        enable_gradient_checkpointing: use ``gradient_checkpointing_kwargs``.
        override_config: ``moe_config.freeze_moe_router``, and ``max_position_embeddings``, by itself or in
            ``model_config``: a limit of prompt and response below config.json's.
    """

    path: str = "~/models/DeepSeek-V3-hf"
    external_lib: Any = None
    enable_gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: GradientCheckpointingConfig = field(default_factory=GradientCheckpointingConfig)
    override_config: dict[str, Any] = field(default_factory=dict)

    @property
    def freeze_moe_router(self) -> bool:
        """``override_config.moe_config.freeze_moe_router``: gates and their biases keep their values."""
        return bool((self.override_config.get("moe_config") or {}).get("freeze_moe_router"))

    @property
    def max_position_embeddings(self) -> int | None:
        """The limit of ``override_config``, if it has one."""
        given = self.override_config
        found: int | None = {**given, **(given.get("model_config") or {})}.get(_POSITIONS)
        return found

    def contradictions(self, where: str) -> list[str]:
        found = []
        libraries = [self.external_lib] if isinstance(self.external_lib, str) else self.external_lib or []
        if not isinstance(libraries, list) or not all(isinstance(library, str) for library in libraries):
            found.append(f"{where}.external_lib is {self.external_lib!r}; expected a module, a Python file or a list")
        for section, keys in self.override_config.items():
            name = f"{where}.override_config.{section}"
            if section == _POSITIONS:
                found += override_problems(where + ".override_config", {section: keys}, LIMIT_OVERRIDES)
            elif section not in ("model_config", "moe_config"):
                found.append(f"{name} is not known here; known: moe_config.freeze_moe_router, {_POSITIONS}")
            elif section == "model_config":
                found += override_problems(name, keys or {}, LIMIT_OVERRIDES)
            elif section == "moe_config":
                found += override_problems(name, keys or {}, MODEL_OVERRIDES)
        return found
