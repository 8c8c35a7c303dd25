"""The layers of one pipeline stage or of one chunk of it, with optional recompute of their activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.ops import TrainOps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.checkpoint import checkpoint
from megatron.core.tensor_parallel.weight_init import WeightInit, init_weights
from megatron.core.transformer.moe.router import without_counting
from megatron.core.transformer.norm import RMSNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


class TransformerBlock(nn.Module):
    """[T/TP, H] -> [T/TP, H] through this stage's layers, and the final norm on the last stage.

    With ``recompute_granularity='full'``: ``uniform`` keeps the input of every run of ``recompute_num_layers`` layers;
    ``block`` recomputes the first ``recompute_num_layers`` layers of the stage one by one and keeps all of the others.
    ``selective`` recomputes inside each layer (``TransformerLayer``).
    """

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps, post_layer_norm: bool, vp_stage: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        layers = groups.layout.chunk_layers(groups.coords.pp, vp_stage, config.num_layers)
        self.layers = nn.ModuleList(TransformerLayer(config, groups, ops, layer) for layer in layers)
        self.final_layernorm = RMSNorm(config, ops, config.hidden_size) if post_layer_norm else None

    def forward(
        self, x_TH: Tensor, rotary_cos_sin: tuple[Tensor, Tensor], packed_seq_params: PackedSeqParams
    ) -> Tensor:
        for layers, is_recomputed in self._runs():
            if is_recomputed and torch.is_grad_enabled():
                arguments = (layers, x_TH, rotary_cos_sin, packed_seq_params)
                x_TH = checkpoint(_forward_layers, *arguments, recompute_context=lambda: without_counting(self))
            else:
                x_TH = _forward_layers(layers, x_TH, rotary_cos_sin, packed_seq_params)
        return x_TH if self.final_layernorm is None else self.final_layernorm(x_TH)

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill all layers of this stage, each under its number in the whole model; the norm becomes ones."""
        for layer in self.layers:
            init_weights(layer, init, f"{name}.layers.{layer.global_layer}")
        if self.final_layernorm is not None:
            self.final_layernorm.init_weights(init, name)

    def _runs(self) -> list[tuple[list[nn.Module], bool]]:
        """Consecutive layers that are run together, and whether they are recomputed."""
        layers = list(self.layers)
        if self.config.recompute_granularity != "full" or self.config.recompute_num_layers is None:
            return [(layers, False)]
        count = self.config.recompute_num_layers
        if self.config.recompute_method == "uniform":
            return [(layers[first : first + count], True) for first in range(0, len(layers), count)]
        return [([layer], True) for layer in layers[:count]] + [(layers[count:], False)]


def _forward_layers(
    layers: list[nn.Module], x_TH: Tensor, rotary_cos_sin: tuple[Tensor, Tensor], packed_seq_params: PackedSeqParams
) -> Tensor:
    for layer in layers:
        x_TH = layer(x_TH, rotary_cos_sin, packed_seq_params)
    return x_TH
