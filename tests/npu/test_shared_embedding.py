"""A tied embedding whose copies lie on two devices: their gradients meet over hccl, and they stay equal bit for bit."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from megatron.core.parallel_state import initialize_model_parallel
from mindspeed.ops import train_ops
from tests.megatron.test_tied_embeddings import CONFIG, train
from tests.parallel.launcher import run_ranks


def _train_stage() -> tuple[list[float], dict[str, torch.Tensor]]:
    groups = initialize_model_parallel(pipeline_model_parallel_size=2)
    config = replace(CONFIG, params_dtype=torch.bfloat16)
    return train(config, groups, train_ops(), device=f"npu:{dist.get_rank()}")


def test_copies_stay_equal() -> None:
    (first_norms, first), (last_norms, last) = run_ranks(_train_stage, 2, device="npu")
    assert first_norms == last_norms
    assert torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])
