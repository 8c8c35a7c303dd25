"""Requests and the blocks of their cache move between devices over hccl."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.parallel.launcher import run_ranks
from tests.vllm.test_rebalance import EXPERTS, compare_with_no_moves
from tests.vllm.text_model import write_text_checkpoint
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.engine.rebalancer import exchange_blocks, exchange_objects
from vllm_ascend.ops.kv_cache import new_kv_cache

NPU = {"data_parallel_size": 2, "block_size": 16, "device": "npu", "rollout_ops": "vllm_ascend.ops:rollout_ops"}
SENT, RECEIVED = (4, 1), (0, 3)  # blocks of rank 0, and where rank 1 puts them
NUM_BLOCKS = 5


def exchange() -> tuple[list[object], dict[str, list[list[float]]]]:
    """Objects and blocks that rank 0 sends to rank 1: what each rank has then."""
    rank = dist.get_rank()
    group, device = GroupCoordinator(rank, 2, dist.new_group([0, 1])), torch.device("npu", rank)
    arrived = exchange_objects(group, [[], [2**62, "-1", 0.7] if rank == 0 else []], device)
    contents = {}
    for layout in ("nd", "nz"):
        caches = [new_kv_cache(NUM_BLOCKS, 16, 32, 16, torch.bfloat16, device, layout) for _ in range(2)]
        values = torch.arange(NUM_BLOCKS, device=device) + 10 * (rank + 1)
        pages = [tensor for cache in caches for tensor in cache]
        for tensor in pages:
            tensor += values.view(-1, *[1] * (tensor.dim() - 1)).to(tensor.dtype)
        lists = ([(), SENT], [(), ()]) if rank == 0 else ([(), ()], [RECEIVED, ()])
        exchange_blocks(group, caches, *lists)
        contents[layout] = []
        for tensor in pages:
            rows = tensor.flatten(1).float().cpu()
            assert torch.equal(rows, rows[:, :1].expand_as(rows))
            contents[layout].append(rows[:, 0].tolist())
    return arrived, contents


def test_objects_and_blocks_arrive() -> None:
    first, second = run_ranks(exchange, 2, device="npu", timeout_s=120)
    assert first[0] == [] and second[0] == [2**62, "-1", 0.7]
    for layout in ("nd", "nz"):
        assert all(values == [10, 11, 12, 13, 14] for values in first[1][layout])
        assert all(values == [14, 21, 22, 11, 24] for values in second[1][layout])
        assert len(second[1][layout]) == 4  # two layers, two tensors each


@pytest.mark.slow
def test_moves_between_devices_change_no_output(tmp_path: Path) -> None:
    layout = NPU | EXPERTS | {"kv_cache_layout": "nz"}  # the one whose pages are no rows of tokens
    compare_with_no_moves(2, write_text_checkpoint(tmp_path), [layout], device="npu", timeout_s=280)
