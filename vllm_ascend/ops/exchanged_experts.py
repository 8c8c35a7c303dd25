"""The experts of a whole group: dispatch of tokens to the ranks of their experts, two grouped matmuls, combine.

Source: npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2, in both torch_npu versions. Limits of these
kernels on A3, where a rank is one die: float16 or bfloat16; H in [1024, 7168]; at most 16 choices of a token and 512
tokens of a rank in one call; 2 to 384 ranks, a rank's experts x ranks up to 1280; a communicator of their own, whose
buffer (environment HCCL_BUFFSIZE in MiB, default 200, the same on all ranks) bounds the tokens of one call. A2 has
other limits (16, 32 or 64 ranks, 256 tokens, no masked tokens in combine) and is not supported. More tokens, which
prefill has, float32 (for debugging) and other hidden sizes go through uneven all-to-alls and the same grouped matmuls,
as in the reference; that form waits for the device, so it cannot be captured as a graph.
Tolerance: 1e-2 (bfloat16), 1e-5 (float32), relative.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops.contract import Choices, ExpertMatrices
from vllm.ops.reference_moe import all_to_all_experts
from vllm_ascend.ops.fused_experts import fused_experts, grouped_matmul

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MIN_HIDDEN, MAX_HIDDEN = 1024, 7168
MAX_TOKENS, MAX_TOP_K = 512, 16
MIN_RANKS, MAX_RANKS = 2, 384
MAX_EXPERTS_TIMES_RANKS = 1280
DEFAULT_BUFFER_MIB = 200
NO_SHARED_EXPERT_RANKS = 0
ONE_TP_RANK = 1  # A3's kernels want a TP group named all the same, the EP group itself
COUNTS = 1  # expert_token_nums_type


class ExchangedExperts:
    """See ``RolloutOps.exchanged_experts``. Holds the masks of active rows, which all layers of a step share: as many
    as there are numbers of rows and active ones in a call, a few bytes each.
    """

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, num_active: int, group: GroupCoordinator
    ) -> Tensor:
        weights_TK, ids_TK = choices
        if not is_one_call(x_TH, ids_TK.shape[1], len(matrices[0]), group.world_size):
            return all_to_all_experts(x_TH, matrices, choices, num_active, group, fused_experts)
        masks = self._masks_of(len(x_TH), num_active, x_TH.device)
        return _dispatch_and_combine(x_TH, matrices, (weights_TK.float(), ids_TK.int()), masks, group)

    def _masks_of(self, rows: int, num_active: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Bool [T], whether a row is active, and bool [T, 1], whether it is not."""
        key = rows, num_active, device
        if key not in self._masks:
            # Never during a capture, whose tensors belong to its graph: a step has run before it is captured.
            is_active_T = torch.arange(rows, device=device) < num_active
            self._masks[key] = is_active_T, ~is_active_T.unsqueeze(1)
        return self._masks[key]


def exchange_problem(config: VllmConfig) -> str | None:
    """Why an engine's experts cannot be exchanged by dispatch, None when they can or are not."""
    if not _is_exchanged(config) or not has_kernel(config.model.hf.hidden_size, config.model.dtype != "float32"):
        return None
    try:
        _at_once(config)
    except ValueError as error:
        return str(error)
    return None


def capture_problem(config: VllmConfig) -> str | None:
    """Why the exchange of an engine's experts cannot be captured as a graph, None when it can."""
    hidden, dtype = config.model.hf.hidden_size, config.model.dtype
    if not _is_exchanged(config):
        return None
    if not has_kernel(hidden, dtype != "float32"):
        return (
            f"with expert_exchange='dispatch', dtype={dtype} and hidden_size={hidden} nothing can be captured: only "
            f"the kernels for half precision and {MIN_HIDDEN} to {MAX_HIDDEN} can be captured; set "
            "expert_exchange='all_gather'"
        )
    largest = max(config.compilation.cudagraph_capture_sizes, default=0)
    tokens, at_once = -(-largest // config.parallel.tensor_parallel_size), _at_once(config)
    if tokens <= at_once:
        return None
    return (
        f"cudagraph_capture_sizes up to {largest} with expert_exchange='dispatch': {tokens} tokens of a rank do not "
        f"fit one call, {at_once} do; raise HCCL_BUFFSIZE or capture smaller sizes"
    )


def _is_exchanged(config: VllmConfig) -> bool:
    return config.parallel.expert_exchange == "dispatch" and config.parallel.expert_parallel_size > 1


def _at_once(config: VllmConfig) -> int:
    hf, num_ranks = config.model.hf, config.parallel.expert_parallel_size
    return tokens_of_a_call(hf.hidden_size, hf.num_experts_per_tok, hf.n_routed_experts // num_ranks, num_ranks)


def is_one_call(x_TH: Tensor, top_k: int, num_local_experts: int, num_ranks: int) -> bool:
    """Whether the kernels take the tokens at once; every rank asks with as many."""
    tokens, hidden = x_TH.shape
    is_half_precision = x_TH.dtype != torch.float32
    return has_kernel(hidden, is_half_precision) and tokens <= tokens_of_a_call(
        hidden, top_k, num_local_experts, num_ranks
    )


def has_kernel(hidden: int, is_half_precision: bool) -> bool:
    """Whether the kernels take such tokens."""
    return is_half_precision and MIN_HIDDEN <= hidden <= MAX_HIDDEN


def tokens_of_a_call(
    hidden: int, top_k: int, num_local_experts: int, num_ranks: int, environment: Mapping[str, str] = os.environ
) -> int:
    """How many tokens of each rank fit the kernels and the communicator's buffer; ValueError when they take none.

    Bytes for T tokens (documentation of npu_moe_distribute_combine_v2): 2 (E G T up512(up32(2 H) + 64) + (K + 1) T
    up512(2 H)), where the 1 stands for a shared expert, which the kernels count although it is not theirs.
    """
    if top_k > MAX_TOP_K or not MIN_RANKS <= num_ranks <= MAX_RANKS:
        raise ValueError(
            f"expert_exchange='dispatch' with num_experts_per_tok={top_k} over {num_ranks} ranks: the kernels on npu "
            f"take up to {MAX_TOP_K} and {MIN_RANKS} to {MAX_RANKS} ranks; use expert_exchange='all_gather'"
        )
    if num_local_experts * num_ranks > MAX_EXPERTS_TIMES_RANKS:
        raise ValueError(
            f"expert_exchange='dispatch' with {num_local_experts} experts on each of {num_ranks} ranks: the kernels on "
            f"npu take up to {MAX_EXPERTS_TIMES_RANKS} together; use expert_exchange='all_gather'"
        )
    buffer_mib = environment_buffer_mib(environment)
    arriving = num_local_experts * num_ranks * _up(_up(2 * hidden, 32) + 64, 512)
    returning = (top_k + 1) * _up(2 * hidden, 512)
    tokens = buffer_mib * 2**20 // (2 * (arriving + returning))
    if tokens == 0:
        raise ValueError(
            f"HCCL_BUFFSIZE={buffer_mib} is too small for expert_exchange='dispatch': one token of each of {num_ranks} "
            f"ranks needs {-(-2 * (arriving + returning) // 2**20)}; set HCCL_BUFFSIZE to a multiple of it"
        )
    return min(tokens, MAX_TOKENS)


def environment_buffer_mib(environment: Mapping[str, str] = os.environ) -> int:
    """The communication buffer of groups that ask for none of their own, as HCCL and the kernels read it."""
    return int(environment.get("HCCL_BUFFSIZE", DEFAULT_BUFFER_MIB))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _dispatch_and_combine(
    x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, masks: tuple[Tensor, Tensor], group: GroupCoordinator
) -> Tensor:
    import torch_npu

    w13_E2FH, w2_EHF = matrices
    (weights_TK, ids_TK), (is_active_T, is_padding_T1) = choices, masks
    rank, num_ranks, communicator = group.rank_in_group, group.world_size, _communicator(group)
    num_experts = len(w13_E2FH) * num_ranks
    rows_AH, _, assist_info, counts_E, ep_counts, tp_counts, _ = torch_npu.npu_moe_distribute_dispatch_v2(
        x_TH,
        ids_TK,
        communicator,
        num_ranks,
        rank,
        num_experts,
        x_active_mask=is_active_T,
        group_tp=communicator,
        tp_world_size=ONE_TP_RANK,
        tp_rank_id=0,
        shared_expert_rank_num=NO_SHARED_EXPERT_RANKS,
        expert_token_nums_type=COUNTS,
    )
    hidden_AF = torch_npu.npu_swiglu(grouped_matmul(rows_AH, w13_E2FH, counts_E), dim=-1)
    combined_TH: Tensor = torch_npu.npu_moe_distribute_combine_v2(
        grouped_matmul(hidden_AF, w2_EHF, counts_E),
        ids_TK,
        assist_info,
        ep_counts,
        weights_TK,
        communicator,
        num_ranks,
        rank,
        num_experts,
        tp_send_counts=tp_counts,
        x_active_mask=is_active_T,
        group_tp=communicator,
        tp_world_size=ONE_TP_RANK,
        tp_rank_id=0,
        shared_expert_rank_num=NO_SHARED_EXPERT_RANKS,
    )
    # What the kernel leaves in the rows of masked tokens is not said.
    return combined_TH.masked_fill(is_padding_T1, 0)


def _communicator(group: GroupCoordinator) -> str:
    """The name under which the kernels find the group; made on the first call, which every rank reaches."""
    assert group.group is not None, "a group of one rank has nothing to exchange"
    backend: Any = group.group._get_backend(torch.device("npu"))
    name: str = backend.get_hccl_comm_name(group.rank_in_group)
    return name
