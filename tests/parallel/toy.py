"""A tiny stack of linear layers with a norm, cut into pipeline stages, for tests that need no transformer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from megatron.core.models.gpt import ModelChunks
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN = 12


def toy_config(calculate_per_token_loss: bool = True) -> TransformerConfig:
    """A config whose hidden size is the stack's."""
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        ffn_hidden_size=1,
        vocab_size=1,
        calculate_per_token_loss=calculate_per_token_loss,
    )


class ToyStage(nn.Module):
    """Global layers ``layers`` of a stack of tanh(linear), then a norm; a stage's input comes through the pipeline."""

    def __init__(self, config: TransformerConfig, layers: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleDict({str(layer): nn.Linear(HIDDEN, HIDDEN) for layer in layers})
        self.norms = nn.ModuleDict({str(layer): nn.RMSNorm(HIDDEN, eps=1e-6) for layer in layers})
        self.input_tensor: torch.Tensor | None = None
        for layer in layers:
            generator = torch.Generator().manual_seed(layer)
            nn.init.normal_(self.layers[str(layer)].weight, std=0.3, generator=generator)
            nn.init.normal_(self.layers[str(layer)].bias, std=0.3, generator=generator)

    def set_input_tensor(self, input_tensor: torch.Tensor | None) -> None:
        """Take the previous stage's output."""
        self.input_tensor = input_tensor

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Same shape as the input."""
        h_TH = x_TH if self.input_tensor is None else self.input_tensor
        for layer, norm in zip(self.layers.values(), self.norms.values(), strict=True):
            h_TH = h_TH + norm(torch.tanh(layer(h_TH)))
        return h_TH


def toy_stage(groups: ProcessGroups, config: TransformerConfig, num_layers: int) -> ToyStage | ModelChunks:
    """The layers of this rank's stage, in chunks where the layout has virtual stages."""
    layout = groups.layout
    chunks = [
        ToyStage(config, layout.chunk_layers(groups.coords.pp, chunk, num_layers))
        for chunk in range(layout.virtual_pipeline_model_parallel_size)
    ]
    return chunks[0] if len(chunks) == 1 else ModelChunks(chunks)


def toy_batches(sizes: list[int], seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets [T_i, HIDDEN] of micro-batches with T_i tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, HIDDEN, generator=generator), torch.randn(n, HIDDEN, generator=generator)) for n in sizes]


def toy_forward_step(
    iterator: Iterator[tuple[torch.Tensor, torch.Tensor]], model: nn.Module
) -> tuple[torch.Tensor, object]:
    """Squared distance to the target, summed over tokens."""
    x_TH, target_TH = next(iterator)

    def loss_func(output_TH: torch.Tensor) -> object:
        loss = (output_TH - target_TH).square().mean(-1).sum()
        return loss, {"loss": loss.item()}

    return model(x_TH), loss_func


def toy_output_step(
    iterator: Iterator[tuple[torch.Tensor, torch.Tensor]], model: nn.Module
) -> tuple[torch.Tensor, object]:
    """The same stack, whose outputs take the place of the metrics."""
    return model(next(iterator)[0]), lambda output_TH: (output_TH.sum(), output_TH.detach())
