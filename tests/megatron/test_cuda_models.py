"""Models train through the table of CUDA as through the reference; see tests/megatron/test_cuda_ops.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from hf_formats.config import load_hf_config
from megatron.core.ops import TrainOps, reference_ops
from megatron.core.ops.cuda import cuda_ops
from megatron.core.parallel_state import ProcessGroups
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from mindspeed_llm.load_weights import load_weights
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import local_plan
from tests.megatron.flash_attention_form import flash_attention_on_cpu
from tests.megatron.model_helpers import PackedBatch, packed_batch
from tests.mindspeed_llm.tiny import write_tiny_checkpoint
from tests.tiny_models import CONFIGS, PLAIN

pytestmark = [
    pytest.mark.needs_torch("2.10", "torch.nn.functional.grouped_mm, and flash attention with packed log-sum-exps"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="triton is not installed: requirements/dev.txt has it where it has wheels, on Linux",
    ),
]

QUICK = "deepseek-v3", "qwen3-moe"  # the others have their parts in other combinations
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PLAIN]
LENGTHS = [4, 1]


def _loss_and_gradients(
    path: Path, groups: ProcessGroups, ops: TrainOps, dtype: torch.dtype, batch: PackedBatch
) -> tuple[float, dict[str, torch.Tensor]]:
    hf = load_hf_config(path)
    model = build_model(hf, groups, ops, params_dtype=dtype)
    load_weights(model, local_plan(hf, groups.layout, groups.rank), HFCheckpoint(path))
    loss = model(batch.ids_T, batch.positions_T, batch.params, batch.labels_T).mean()
    loss.backward()
    return loss.item(), {name: param.grad.float() for name, param in model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_models_train_as_by_the_reference(name: str, one_rank: ProcessGroups, tmp_path: Path) -> None:
    """float32: attention and products of experts are the reference's."""
    write_tiny_checkpoint(tmp_path, CONFIGS[name], seed=3)
    batch = packed_batch(LENGTHS, 128)
    loss, grads = _loss_and_gradients(tmp_path, one_rank, cuda_ops(), torch.float32, batch)
    expected_loss, expected_grads = _loss_and_gradients(tmp_path, one_rank, reference_ops(), torch.float32, batch)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for parameter, expected in expected_grads.items():
        assert (grads[parameter] - expected).abs().max() <= 1e-4 * expected.abs().max(), parameter


@pytest.mark.parametrize("name", NAMES)
def test_models_in_bfloat16_are_as_close_to_float32_as_by_the_reference(
    name: str, one_rank: ProcessGroups, tmp_path: Path
) -> None:
    write_tiny_checkpoint(tmp_path, CONFIGS[name], seed=3, dtype=torch.bfloat16)
    batch = packed_batch(LENGTHS, 128)
    with flash_attention_on_cpu() as calls:
        loss, grads = _loss_and_gradients(tmp_path, one_rank, cuda_ops(), torch.bfloat16, batch)
    assert {op for op, *_ in calls} == {"forward", "backward"}
    _, by_reference = _loss_and_gradients(tmp_path, one_rank, reference_ops(), torch.bfloat16, batch)
    exact_loss, exact = _loss_and_gradients(tmp_path, one_rank, reference_ops(), torch.float32, batch)
    assert loss == pytest.approx(exact_loss, rel=1e-2)
    for parameter, want in exact.items():
        error, usual = ((found[parameter] - want).norm() / want.norm() for found in (grads, by_reference))
        assert error <= 3 * usual + 2e-2, parameter  # interpreted kernels cut values where a GPU rounds them
