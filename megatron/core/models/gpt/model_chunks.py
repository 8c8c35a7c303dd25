"""The chunks of a model that one rank runs when its pipeline stage is cut into virtual stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops import TrainOps
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.transformer_config import TransformerConfig


class ModelChunks(nn.Module):
    """Chunk v of every stage runs before chunk v + 1 of any; parameters are named ``chunks.{v}.`` + the chunk's name.

    The module has no forward of its own: the interleaved schedule calls one chunk at a time (``model_chunks``).
    """

    def __init__(self, chunks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        assert len(self.chunks) > 1, "one chunk is a plain model"
        self.config: Any = self.chunks[0].config

    def init_weights(self, seed: int) -> None:
        """Initialise every chunk; every layout gives the same model."""
        for chunk in self.chunks:
            chunk.init_weights(seed)  # type: ignore[operator]


def make_gpt_model(
    config: TransformerConfig, groups: ProcessGroups, ops: TrainOps, **arguments: Any
) -> GPTModel | ModelChunks:
    """This rank's part of the model: one GPTModel, or one for each virtual stage.

    ``arguments`` are further keywords of GPTModel.
    """
    num_chunks = groups.layout.virtual_pipeline_model_parallel_size
    if num_chunks == 1:
        return GPTModel(config, groups, ops, **arguments)
    return ModelChunks(GPTModel(config, groups, ops, vp_stage=chunk, **arguments) for chunk in range(num_chunks))


def model_chunks(module: nn.Module) -> Sequence[nn.Module]:
    """Return the modules that the schedules call: the chunks inside ``module`` and its wrappers, or ``module``."""
    inner = module
    while not isinstance(inner, ModelChunks) and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module  # type: ignore[assignment]
    return list(inner.chunks) if isinstance(inner, ModelChunks) else [module]
