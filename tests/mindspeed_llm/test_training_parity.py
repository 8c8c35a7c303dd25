"""Ten training steps of every model family equal transformers with torch.optim.AdamW: loss, gradients, weights, routes.

Both sides start from one checkpoint and see the same sequences, packed here and one by one there, in float32. The loss
is the mean over all tokens; gradients are clipped by their global norm; norms and biases do not decay. "Relative" is to
the largest element of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.ops import reference_ops
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.moe.router import TopKRouter
from mindspeed_llm.hf_config import load_hf_config
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import local_plan
from mindspeed_llm.weights import HFCheckpoint, export_weights, hf_gradients, load_weights
from tests.megatron.model_helpers import PackedBatch, one_process_groups, packed_batch
from tests.mindspeed_llm.tiny import (
    tiny_hf_config,
    tiny_moonlight_config,
    tiny_qwen3_config,
    tiny_v2_lite_config,
    write_tiny_checkpoint,
)

MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v3": tiny_hf_config(),
    "deepseek-v3 without q-lora": tiny_hf_config(q_lora_rank=None),
    "deepseek-v3 without yarn": tiny_hf_config(rope_scaling=None),
    "moonlight": tiny_moonlight_config(),
    "deepseek-v2-lite": tiny_v2_lite_config(),
    "qwen3": tiny_qwen3_config(),
    "qwen3 tied": tiny_qwen3_config(tie_word_embeddings=True),
}
NUM_STEPS = 10
LENGTHS = [21, 40, 3, 32]
TOLERANCE = 1e-5
ADAM = {"lr": 1e-4, "weight_decay": 0.1}
# The smaller eps, the less an update depends on the size of its gradient: with 1e-8 an element whose gradient is mere
# rounding moves by the whole rate, in a direction that the order of a sum decides (differences up to 9.7e-6).
BETAS, EPS, MAX_NORM = (0.9, 0.95), 1e-6, 1.0


@pytest.fixture(scope="module")
def groups() -> Iterator[ProcessGroups]:
    with one_process_groups() as groups:
        yield groups


class Ours:
    """The training engine on one rank: packed sequences, gradient buffers, the distributed optimizer."""

    def __init__(self, path: Path, groups: ProcessGroups) -> None:
        self.hf, self.groups = load_hf_config(path), groups
        overrides = {"calculate_per_token_loss": True}
        if self.hf.has_expert_bias:
            overrides["moe_router_bias_update_rate"] = 0.0
        model = build_model(self.hf, groups, reference_ops(), params_dtype=torch.float32, **overrides)
        load_weights(model, local_plan(self.hf, groups.layout, groups.coords), HFCheckpoint(path))
        self.ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model, groups)
        beta1, beta2 = BETAS
        config = OptimizerConfig(**ADAM, adam_beta1=beta1, adam_beta2=beta2, adam_eps=EPS, clip_grad=MAX_NORM)
        self.optimizer = get_megatron_optimizer(config, self.ddp, groups, reference_ops())
        self.routes: list[torch.Tensor] = []
        for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
            router.register_forward_hook(lambda _, __, output: self.routes.append(output[1].sort(dim=-1).values))

    def gradients(self, batch: PackedBatch) -> tuple[float, dict[str, torch.Tensor]]:
        self.routes.clear()
        self.optimizer.zero_grad()
        loss = self.ddp(batch.ids_T, batch.positions_T, batch.params, batch.labels_T).mean()
        loss.backward()
        finalize_model_grads(self.ddp, self.groups)
        return loss.item(), hf_gradients(self.ddp, self.hf, self.groups)

    def step(self) -> float:
        _, norm, _ = self.optimizer.step()
        return norm

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(export_weights(self.ddp.module, self.hf, self.groups.layout, self.groups))


class Theirs:
    """transformers' model, sequence by sequence, and torch's AdamW."""

    def __init__(self, path: Path) -> None:
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
        return [torch.cat(indices) for indices in self.routes_of_layer.values()]

    def gradients(self, batch: PackedBatch) -> tuple[float, dict[str, torch.Tensor]]:
        self.routes_of_layer.clear()
        self.optimizer.zero_grad()
        total = 0.0
        for ids, labels in zip(batch.ids_T.split(LENGTHS), batch.labels_T.split(LENGTHS), strict=True):
            loss = F.cross_entropy(self.model(ids[None]).logits[0], labels, reduction="sum") / len(batch.ids_T)
            loss.backward()
            total += loss.item()
        found = {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        return total, {name: grad.clone() for name, grad in _as_published(found)}

    def step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return norm.item()

    def weights(self) -> dict[str, torch.Tensor]:
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


def _largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Over all of ``theirs``, relative to the largest element of the tensor, and whose it is."""
    found = [(0.0, "nothing")]
    for name, expected in theirs.items():
        difference, largest = (ours[name] - expected).abs().max().item(), expected.abs().max().item()
        found.append((difference / largest if largest else difference, name))
    return max(found)


@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_equal_transformers(name: str, groups: ProcessGroups, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, MODELS[name], seed=3)
    ours, theirs = Ours(tmp_path, groups), Theirs(tmp_path)
    for step in range(NUM_STEPS):
        batch = packed_batch(LENGTHS, ours.hf.vocab_size, seed=step)
        (loss, grads), (expected_loss, expected_grads) = ours.gradients(batch), theirs.gradients(batch)
        num_moe_layers = sum(ours.hf.is_moe_layer(layer) for layer in range(ours.hf.num_hidden_layers))
        assert len(ours.routes) == len(theirs.routes) == num_moe_layers
        for route, expected_route in zip(ours.routes, theirs.routes, strict=True):
            assert torch.equal(route, expected_route), step
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert grads.keys() == expected_grads.keys()
        worst = _largest_difference(grads, expected_grads)
        assert worst[0] < TOLERANCE, (step, worst)
        assert ours.step() == pytest.approx(theirs.step(), rel=TOLERANCE)
        worst = _largest_difference(ours.weights(), theirs.weights())
        assert worst[0] < TOLERANCE, (step, worst)
