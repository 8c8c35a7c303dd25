"""The host's op table with the exchange of experts of NVIDIA devices, which decode steps of a graph can hold."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from vllm.ops.contract import RolloutOps
from vllm.ops.cpu import default_ops
from vllm.ops.cuda.exchange import exchanged_experts

PROVIDER = "tests.vllm.gathering_ops:rollout_ops"


def rollout_ops() -> RolloutOps:
    table = default_ops()
    return replace(
        table,
        exchanged_experts=partial(exchanged_experts, experts=table.fused_experts),
        not_capturable=tuple(name for name in table.not_capturable if name != "exchanged_experts"),
    )
