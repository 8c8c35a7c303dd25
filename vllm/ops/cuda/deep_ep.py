"""The exchange of experts by DeepEP's low-latency kernels (version 1, https://github.com/deepseek-ai/DeepEP).

A step's tokens are written into slots of fixed number on the ranks of their experts, and the results come back weighted
and added, in float32; nothing waits for the host and no shape depends on the routing, so decode steps can be captured.
They send a token to its experts alone, where `exchange` gathers all tokens on all ranks. Larger steps go as there.

Limits: bfloat16; NVIDIA devices that see each other over RDMA or NVLink. Tolerance: 1e-2. The buffer is sized for the
largest step of `max_num_seqs` sequences, beside torch's memory, and made before the cache is sized. It has not run on a
GPU; beside training with ``flex`` in the same processes it is the second buffer of DeepEP there, which is untested.

Letters: T tokens of this rank, E experts of this rank, S slots of each.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops.contract import Choices, ExpertMatrices, FusedExperts, RolloutOps
from vllm.ops.cuda.exchange import MOST_GATHERED_TOKENS, exchanged_experts
from vllm.ops.cuda.table import rollout_ops

_OTHERWISE = "otherwise set rollout_ops='vllm.ops.cuda:rollout_ops'"


def deep_ep_ops() -> RolloutOps:
    """The table for NVIDIA devices with DeepEP's exchange of experts (provider ``vllm.ops.cuda:deep_ep_ops``).

    Raises:
        ValueError: deep_ep or something of `rollout_ops` is missing.
    """
    check_deep_ep()
    return with_deep_ep(rollout_ops())


def check_deep_ep() -> None:
    """Raise a ValueError where the library is not installed."""
    if importlib.util.find_spec("deep_ep") is None:
        raise ValueError(
            "rollout_ops='vllm.ops.cuda:deep_ep_ops' needs deep_ep, which is not installed: build DeepEP 1 "
            f"(https://github.com/deepseek-ai/DeepEP) on every node, {_OTHERWISE}"
        )


def with_deep_ep(table: RolloutOps) -> RolloutOps:
    """Return `table` with DeepEP's exchange around its experts."""
    exchange = LowLatencyExchange(table.fused_experts)
    return replace(
        table,
        exchanged_experts=exchange,
        connect_exchange=exchange.connect,
        implementations=table.implementations | {"exchanged_experts": "native experts, DeepEP up to a decode step"},
        not_capturable=tuple(name for name in table.not_capturable if name != "exchanged_experts"),
        problems=lambda config: [*table.problems(config), *_problems(config)],
    )


class LowLatencyExchange:
    """See ``RolloutOps.exchanged_experts``; `experts` is the table's `fused_experts`."""

    def __init__(self, experts: FusedExperts) -> None:
        self._experts = experts
        self._buffer: Any = None
        self._most_rows = 0  # of a rank, the same on all

    def connect(self, config: VllmConfig, group: GroupCoordinator) -> None:
        """See ``RolloutOps.connect_exchange``."""
        from deep_ep import Buffer

        if group.group is None:
            return
        hf, num_ranks = config.model.hf, group.world_size
        rows = -(-config.scheduler.max_num_seqs // config.parallel.tensor_parallel_size)
        self._most_rows = min(rows, MOST_GATHERED_TOKENS // num_ranks)
        num_bytes = Buffer.get_low_latency_rdma_size_hint(
            self._most_rows, hf.hidden_size, num_ranks, hf.n_routed_experts
        )
        num_local = hf.n_routed_experts // num_ranks
        self._buffer = Buffer(group.group, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=num_local)

    def __call__(
        self, x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, num_active: int, group: GroupCoordinator
    ) -> Tensor:
        weights_TK, ids_TK = choices
        if len(x_TH) > self._most_rows:
            return exchanged_experts(x_TH, matrices, choices, num_active, group, self._experts)
        if num_active < len(x_TH):
            ids_TK = ids_TK.clone()
            ids_TK[num_active:] = -1  # padding goes nowhere
        num_experts = len(matrices[0]) * group.world_size
        x_ESH, counts_E, handle, _, _ = self._buffer.low_latency_dispatch(
            x_TH.contiguous(), ids_TK, self._most_rows, num_experts, use_fp8=False
        )
        done_ESH = self._experts_of_slots(x_ESH, matrices, counts_E)
        out_TH: Tensor
        out_TH, _, _ = self._buffer.low_latency_combine(done_ESH, ids_TK, weights_TK.float(), handle)
        return out_TH

    def _experts_of_slots(self, x_ESH: Tensor, matrices: ExpertMatrices, counts_E: Tensor) -> Tensor:
        """A slot is a token with one choice: its expert, or none where nothing has arrived."""
        num_here, slots, _ = x_ESH.shape
        is_filled_ES = torch.arange(slots, device=x_ESH.device) < counts_E.unsqueeze(1)
        experts_E1 = torch.arange(num_here, device=x_ESH.device).unsqueeze(1)
        ids_ES = torch.where(is_filled_ES, experts_E1, -1)
        ones = torch.ones(num_here * slots, 1, dtype=torch.float32, device=x_ESH.device)
        rows = self._experts(x_ESH.flatten(0, 1), matrices, (ones, ids_ES.view(-1, 1)), 0)
        return rows.view_as(x_ESH)


def _problems(config: VllmConfig) -> list[str]:
    found, parallel = [], config.parallel
    if config.model.dtype != "bfloat16":
        found.append(f"dtype={config.model.dtype}: DeepEP takes bfloat16; set dtype=bfloat16, {_OTHERWISE}")
    if parallel.expert_exchange != "dispatch" or parallel.expert_parallel_size == 1:
        found.append(
            f"DeepEP exchanges experts of several ranks by dispatch, and expert_exchange={parallel.expert_exchange} "
            f"over {parallel.expert_parallel_size}; set expert_exchange='dispatch', {_OTHERWISE}"
        )
    return found
