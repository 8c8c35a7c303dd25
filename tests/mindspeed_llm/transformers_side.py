"""The other side of a parity test: transformers' model, sequence by sequence, and torch's AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tests.megatron.model_helpers import PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAM = {"lr": 1e-4, "weight_decay": 0.1}
# The smaller eps, the less an update depends on the size of its gradient: with 1e-8 an element whose gradient is mere
# rounding moves by the whole rate, in a direction that the order of a sum decides (differences up to 9.7e-6).
BETAS, EPS, MAX_NORM = (0.9, 0.95), 1e-6, 1.0


class Theirs:
    """A checkpoint in transformers: norms and biases do not decay, gradients are clipped by their global norm."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        decayed = [param for param in self.model.parameters() if param.dim() > 1]
        plain = [param for param in self.model.parameters() if param.dim() <= 1]
        param_groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(param_groups, **ADAM, betas=BETAS, eps=EPS)
        self.routes_of_layer: dict[str, list[torch.Tensor]] = {}
        for name, module in self.model.named_modules():
            if name.endswith("mlp.experts"):
                module.register_forward_pre_hook(self._note_routes(name))

    @property
    def routes(self) -> list[torch.Tensor]:
        """Experts of every token, ascending, int64 [T, K] per MoE layer."""
        return [torch.cat(indices) for indices in self.routes_of_layer.values()]

    def gradients(self, batch: PackedBatch) -> tuple[float, dict[str, torch.Tensor]]:
        """The mean loss over all tokens, and its gradients under the names of a checkpoint."""
        self.routes_of_layer.clear()
        self.optimizer.zero_grad()
        total = 0.0
        lengths = batch.params.cu_seqlens.diff().tolist()
        for ids, labels in zip(batch.ids_T.split(lengths), batch.labels_T.split(lengths), strict=True):
            loss = F.cross_entropy(self.model(ids[None]).logits[0], labels, reduction="sum") / len(batch.ids_T)
            loss.backward()
            total += loss.item()
        found = {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        return total, {name: grad.clone() for name, grad in _as_published(found)}

    def step(self) -> float:
        """Clip and update; the gradient norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return norm.item()

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters under the names of a checkpoint."""
        return dict(_as_published(dict(self.model.named_parameters())))

    def _note_routes(self, name: str) -> Any:
        def hook(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self.routes_of_layer.setdefault(name, []).append(inputs[1].sort(dim=-1).values)

        return hook


def _as_published(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of a checkpoint: in memory the experts of a layer are one tensor, gate rows before up rows."""
    for name, tensor in tensors.items():
        layer, is_expert, kind = name.partition(".experts.")
        if not is_expert:
            yield name, tensor
            continue
        for expert, matrix in enumerate(tensor):
            if kind == "gate_up_proj":
                gate, up = matrix.chunk(2)
                yield f"{layer}.experts.{expert}.gate_proj.weight", gate
                yield f"{layer}.experts.{expert}.up_proj.weight", up
            else:
                yield f"{layer}.experts.{expert}.down_proj.weight", matrix


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Over all of ``theirs``, relative to the largest element of the tensor, and whose it is."""
    found = [(0.0, "nothing")]
    for name, expected in theirs.items():
        difference, largest = (ours[name] - expected).abs().max().item(), expected.abs().max().item()
        found.append((difference / largest if largest else difference, name))
    return max(found)
