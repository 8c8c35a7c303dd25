"""Every model family on the simulated device, by native ops, has the loss and gradients of the reference table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_formats.config import load_hf_config
from megatron.core.ops import TrainOps, reference_ops
from megatron.core.parallel_state import ProcessGroups
from mindspeed.ops import train_ops
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from mindspeed_llm.load_weights import load_weights
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import local_plan
from tests.megatron.model_helpers import PackedBatch, packed_batch
from tests.mindspeed_llm.tiny import write_tiny_checkpoint
from tests.tiny_models import CONFIGS


def _loss_and_gradients(
    path: Path, groups: ProcessGroups, ops: TrainOps, device: str, batch: PackedBatch
) -> tuple[float, dict[str, torch.Tensor]]:
    hf = load_hf_config(path)
    model = build_model(hf, groups, ops, params_dtype=torch.float32).to(device)
    load_weights(model, local_plan(hf, groups.layout, groups.rank), HFCheckpoint(path))
    tensors = (tensor.to(device) for tensor in (batch.ids_T, batch.positions_T))
    loss = model(*tensors, batch.params, batch.labels_T.to(device)).mean()
    loss.backward()
    return loss.item(), {name: param.grad.cpu() for name, param in model.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_native_equals_reference(name: str, groups: ProcessGroups, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, CONFIGS[name], seed=3)
    batch = packed_batch([9, 20, 1, 14], 128)
    loss, grads = _loss_and_gradients(tmp_path, groups, train_ops(), "npu:0", batch)
    expected_loss, expected_grads = _loss_and_gradients(tmp_path, groups, reference_ops(), "cpu", batch)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for parameter, expected in expected_grads.items():
        assert (grads[parameter] - expected).abs().max() <= 1e-4 * expected.abs().max(), parameter
