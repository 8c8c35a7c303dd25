"""Config of the model that the actor, the reference and the rollout share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.workers.config.keys import Idle, Section, beside, key
from verl.workers.config.overrides import MODEL_OVERRIDES

_POSITIONS = "max_position_embeddings"
_NOT_ENABLED = beside("enable_gradient_checkpointing", False)
_CHECKPOINTS_NOTHING = Idle(
    "without {where}.gradient_checkpointing_kwargs, override_transformer_config decides what is recomputed",
    lambda run, own: (
        own.enable_gradient_checkpointing
        and all(value is None for value in vars(own.gradient_checkpointing_kwargs).values())
    ),
)


@dataclass(frozen=True)
class GradientCheckpointingConfig(Section):
    """MindSpeed's spelling of activation recomputation; absent values keep ``override_transformer_config``'s."""

    activations_checkpoint_granularity: str | None = None  #: MindSpeed's name of ``recompute_granularity``.
    activations_checkpoint_method: str | None = None  #: MindSpeed's name of ``recompute_method``.
    activations_checkpoint_num_layers: int | None = None  #: MindSpeed's name of ``recompute_num_layers``.


@dataclass(frozen=True)
class HFModelConfig(Section):
    """A Hugging Face model directory; no code from it is ever executed."""

    path: str = key("~/models/DeepSeek-V3-hf", is_path=True)  #: the model's directory, with weights in BF16 or FP8.
    #: a Python module or ``.py`` file, or a list of them, that the controller and every training worker import before
    #: the config is checked. What it registers (``register_adv_est``, ``register_policy_loss``, a reward manager) can
    #: then be named in the config. A file must exist on every node.
    external_lib: Any = None
    enable_gradient_checkpointing: bool = key(False, _CHECKPOINTS_NOTHING)  #: use ``gradient_checkpointing_kwargs``.
    gradient_checkpointing_kwargs: GradientCheckpointingConfig = key(GradientCheckpointingConfig, _NOT_ENABLED)
    #: ``moe_config.freeze_moe_router``, and ``max_position_embeddings``, by itself or in ``model_config``: a limit of
    #: prompt and response below config.json's.
    override_config: dict[str, Any] = key(dict, members=MODEL_OVERRIDES)

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

    def contradictions(self, where: str) -> Iterator[str]:
        libraries = [self.external_lib] if isinstance(self.external_lib, str) else self.external_lib or []
        if not isinstance(libraries, list) or not all(isinstance(library, str) for library in libraries):
            yield f"{where}.external_lib is {self.external_lib!r}; expected a module, a Python file or a list"
