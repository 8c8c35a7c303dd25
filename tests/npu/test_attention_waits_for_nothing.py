"""Attention over a packed micro-batch never makes the host wait for the device, however many layers there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.ops import train_ops
from verl.utils.megatron.packed_batch import pack_micro_batch


class HostReads(TorchDispatchMode):
    """The ops inside that bring device values to the host, for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_read = func is torch.ops.aten._local_scalar_dense.default
        is_copied = func is torch.ops.aten._to_copy.default and out.device.type == "cpu"
        if (is_read or is_copied) and args[0].device.type == "npu":
            self.seen.append(str(func))
        return out


@pytest.mark.parametrize("is_on_host", [True, False])
def test_sequence_ends_are_known_on_the_host(is_on_host: bool) -> None:
    ids_BL = torch.arange(12).view(2, 6)
    packed = pack_micro_batch(ids_BL, torch.ones_like(ids_BL), torch.ones_like(ids_BL[:, 3:]), [0, 1], 1)
    packed = packed.to(torch.device("npu:0"))
    cu_seqlens = packed.packed_seq_params.cu_seqlens
    q, k, v = (torch.randn(12, 2, size, device="npu", dtype=torch.bfloat16) for size in (24, 24, 16))
    attention = train_ops().core_attention
    with HostReads() as reads:
        out = attention(q, k, v, cu_seqlens if is_on_host else cu_seqlens.to("npu"), 6, 0.3)
    assert out.shape == (12, 2, 16)
    assert bool(reads.seen) == (not is_on_host), reads.seen
