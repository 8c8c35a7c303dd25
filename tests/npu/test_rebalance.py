"""Requests and the blocks of their cache move between devices over hccl."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.test_rebalance import EXPERTS, compare_with_no_moves
from tests.vllm.tiny import write_checkpoint

NPU = {"data_parallel_size": 2, "block_size": 16, "device": "npu", "rollout_ops": "vllm_ascend.ops:rollout_ops"}


def test_moves_between_devices_change_no_output(tmp_path: Path) -> None:
    layout = NPU | EXPERTS | {"kv_cache_layout": "nz"}  # the one whose pages are no rows of tokens
    compare_with_no_moves(2, write_checkpoint(tmp_path), [layout], device="npu", timeout_s=250)
