"""An embedding that two stages share: one gradient, counted once, and copies that stay equal to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.ops import TrainOps, reference_ops
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import ProcessGroups, initialize_model_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.megatron.model_helpers import PackedBatch, one_process_groups, packed_batch, tiny_config
from tests.parallel.launcher import run_ranks

CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    vocab_size=64,
    init_method_std=0.1,
    qk_layernorm=True,
    calculate_per_token_loss=True,
    share_embeddings_and_output_weights=True,
)
NUM_TOKENS = 16


def _forward_step(rest: Iterator[PackedBatch], model: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch, device = next(rest), next(model.parameters()).device
    labels_T = batch.labels_T.to(device) if getattr(model, "module", model).post_process else None
    output = model(batch.ids_T.to(device), batch.positions_T.to(device), batch.params, labels_T)
    return output, lambda loss_T: (loss_T.sum() / 64, {})


def train(
    config: TransformerConfig, groups: ProcessGroups, ops: TrainOps, device: str = "cpu", **ddp: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps of four micro-batches: gradient norms, and the weights at the end."""
    model = GPTModel(config, groups, ops)
    model.init_weights(3)
    model.to(device)
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(bucket_size=500, **ddp), model, groups
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), wrapped, groups, ops)
    norms = []
    for step in range(3):
        batches = [packed_batch([6, 10], CONFIG.vocab_size, seed=4 * step + index) for index in range(4)]
        own = batches[groups.coords.dp :: groups.layout.data_parallel_size]
        optimizer.zero_grad()
        get_forward_backward_func(groups)(
            forward_step_func=_forward_step,
            data_iterator=iter(own),
            model=wrapped,
            tensor_shapes=[(NUM_TOKENS // groups.tp.size(), CONFIG.hidden_size)] * len(own),
        )
        finalize_model_grads(wrapped, groups)
        _, norm, _ = optimizer.step()
        norms.append(norm)
    wrapped.finish_param_sync()
    return norms, {name: param.detach().cpu().clone() for name, param in model.named_parameters()}


def _train_rank(sizes: dict[str, Any], ddp: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train(CONFIG, initialize_model_parallel(**sizes), reference_ops(), **ddp)


@pytest.mark.parametrize("ddp", [{}, {"overlap_grad_reduce": True, "overlap_param_gather": True}])
def test_two_stages_train_as_one(ddp: dict[str, Any]) -> None:
    with one_process_groups() as groups:
        norms, weights = train(CONFIG, groups, reference_ops())
    assert "output_layer.weight" not in weights
    first, last = "embedding.word_embeddings.weight", "output_layer.weight"
    by_rank = run_ranks(_train_rank, 4, {"pipeline_model_parallel_size": 2}, ddp, timeout_s=120)
    for rank_norms, _ in by_rank:
        assert rank_norms == pytest.approx(norms, rel=1e-5)
    for (_, of_first), (_, of_last) in zip(by_rank[:2], by_rank[2:], strict=True):
        assert last not in of_first and first not in of_last
        assert torch.equal(of_first[first], of_last[last])
        torch.testing.assert_close(of_first[first], weights[first], rtol=1e-4, atol=1e-5)


def _marks(configs: list[TransformerConfig]) -> list[dict[str, tuple[bool, bool]]]:
    groups = initialize_model_parallel(pipeline_model_parallel_size=2)
    return [
        {
            name: (getattr(param, "shared_embedding", False), getattr(param, "shared", False))
            for name, param in GPTModel(config, groups, reference_ops()).named_parameters()
            if "word_embeddings" in name or "output_layer" in name
        }
        for config in configs
    ]


def test_which_weights_are_shared() -> None:
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    held, copied, own = (True, False), (True, True), (False, False)
    plain = tiny_config(num_layers=2, moe_layer_freq=[0, 1])
    with_mtp = replace(plain, mtp_num_layers=1)
    with_both = replace(with_mtp, share_embeddings_and_output_weights=True)
    first, last = run_ranks(_marks, 2, [CONFIG, plain, with_mtp, with_both], timeout_s=60)
    assert first == [{embedding: held}, {embedding: own}, {embedding: held}, {embedding: held}]
    assert last == [{output: copied}, {output: own}, {embedding: copied, output: own}, {embedding: copied}]
