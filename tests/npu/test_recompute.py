"""Selective recompute and multi-token prediction on a device with native ops: the same bits, and memory given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from mindspeed.ops import train_ops
from tests.megatron.model_helpers import packed_batch, tiny_config
from tests.npu.device_memory import held_bytes

DEVICE = torch.device("npu:0")
NUM_TOKENS, HEADS, NOPE, ROPE, VALUE = 96, 2, 128, 64, 128
MODULES = ("core_attn", "mla_up_proj", "moe_act", "layernorm", "mlp", "moe")


def _pass(groups: ProcessGroups, **changes: Any) -> tuple[list[torch.Tensor], int]:
    """Loss and gradients on the CPU, and the device memory that the forward pass keeps."""
    config = tiny_config(
        params_dtype=torch.bfloat16,
        num_attention_heads=HEADS,
        qk_head_dim=NOPE,
        qk_pos_emb_head_dim=ROPE,
        v_head_dim=VALUE,
        mtp_num_layers=1,
        **changes,
    )
    model = GPTModel(config, groups, train_ops())
    model.init_weights(3)
    model.to(DEVICE)
    batch = packed_batch([40, 30, 26], config.vocab_size)
    ids_T, positions_T, labels_T = (x.to(DEVICE) for x in (batch.ids_T, batch.positions_T, batch.labels_T))
    params = PackedSeqParams(batch.params.cu_seqlens, batch.params.max_seqlen)
    before = held_bytes()
    loss = model(ids_T, positions_T, params, labels_T=labels_T).mean()
    kept = held_bytes() - before
    loss.backward()
    return [loss.detach().cpu(), *(param.grad.cpu() for param in model.parameters() if param.grad is not None)], kept


@pytest.mark.parametrize("modules", [*((module,) for module in MODULES), MODULES])
def test_the_same_bits_from_less_memory(groups: ProcessGroups, modules: tuple[str, ...]) -> None:
    want, all_bytes = _pass(groups)
    got, kept = _pass(groups, recompute_granularity="selective", recompute_modules=modules)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert kept < all_bytes
    if "mla_up_proj" in modules:  # four layers: queries, keys, and the product that values are a view of
        assert all_bytes - kept >= 4 * 2 * NUM_TOKENS * HEADS * (2 * (NOPE + ROPE) + NOPE + VALUE)
