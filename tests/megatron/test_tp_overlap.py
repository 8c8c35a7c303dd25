"""``tp_comm_overlap``: a model whose products run beside its collectives learns what the plain one does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.ops import TrainOps, reference_ops, resolve
from megatron.core.ops.cuda.symmetric_memory import SymmetricMemoryOverlap
from megatron.core.parallel_state import ProcessGroups, initialize_model_parallel
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.megatron.model_helpers import packed_batch, tiny_config
from tests.megatron.symmetric_memory_form import mapped_memory, symmetric_memory_on_cpu
from tests.parallel.launcher import run_ranks

pytestmark = pytest.mark.needs_torch("2.10", "the fused ops of symmetric memory, as the CUDA table needs them")

OVERLAPPED = replace(reference_ops(), tensor_parallel_overlap=SymmetricMemoryOverlap())
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _gradients(
    config: MLATransformerConfig, groups: ProcessGroups, ops: TrainOps
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of the second of two micro-batches, and the sums of both's gradients in float32."""
    model = GPTModel(config, groups, ops)
    model.init_weights(0)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model, groups)
    for lengths in ([7, 5], [3, 9]):
        batch = packed_batch(lengths, config.vocab_size)
        loss_T = ddp(batch.ids_T, batch.positions_T, batch.params, batch.labels_T)
        loss_T.mean().backward()
    return loss_T.detach(), {name: param.main_grad.clone() for name, param in model.named_parameters()}


def _ranks(changes: dict[str, Any]) -> None:
    groups = initialize_model_parallel(torch.distributed.get_world_size())
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        config = replace(tiny_config(), sequence_parallel=True, params_dtype=dtype, **changes)
        expected_T, expected = _gradients(config, groups, reference_ops())
        with symmetric_memory_on_cpu() as calls, mapped_memory(is_reachable=True) as mapped:
            loss_T, found = _gradients(config, groups, OVERLAPPED)
        assert mapped == [groups.tp.group_name]
        assert set(calls) == {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"}
        assert (loss_T - expected_T).abs().max() <= tolerance * expected_T.abs().max()
        for name, want in expected.items():
            assert (found[name] - want).abs().max() <= tolerance * want.abs().max(), (dtype, name)
    with mapped_memory(is_reachable=False), pytest.raises(ValueError, match=r"ranks cannot map each other's memory \("):
        GPTModel(config, groups, OVERLAPPED)


@pytest.mark.parametrize(
    ("size", "changes"), [(2, RECOMPUTED), pytest.param(4, {}, marks=pytest.mark.slow)], ids=["2 recomputed", "4"]
)
def test_loss_and_gradients_are_those_of_products_after_collectives(size: int, changes: dict[str, Any]) -> None:
    run_ranks(_ranks, size, changes)


def test_only_the_table_of_cuda_has_it() -> None:
    pytest.importorskip("triton")
    table = resolve("megatron.core.ops.cuda:cuda_ops", {"tp_comm_overlap": True})
    assert table.names["tensor_parallel_overlap"] == "native (torch symmetric memory)"
    assert resolve("megatron.core.ops.cuda:cuda_ops").tensor_parallel_overlap is None
    with pytest.raises(ValueError, match=r"tp_comm_overlap=True, but the train ops of .*cpu_ops.* have no such form"):
        resolve("megatron.core.ops.cpu:cpu_ops", {"tp_comm_overlap": True})
