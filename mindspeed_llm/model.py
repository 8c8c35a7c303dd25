"""The training model of an HF config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hf_formats.config import HFModelConfig
from mindspeed_llm.transformer_config import to_transformer_config

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel, ModelChunks
    from megatron.core.ops import TrainOps
    from megatron.core.parallel_state import ProcessGroups


def build_model(
    hf: HFModelConfig, groups: ProcessGroups, ops: TrainOps, *, params_dtype: torch.dtype, **overrides: Any
) -> GPTModel | ModelChunks:
    """This rank's part of the model, weights not yet set; ``overrides`` are MLATransformerConfig fields."""
    from megatron.core.models.gpt import make_gpt_model

    config = to_transformer_config(hf, params_dtype=params_dtype, layout=groups.layout, **overrides)
    return make_gpt_model(config, groups, ops)
