"""One call of MC2, the kernels that dispatch tokens to their experts' dies and back, beside the same by all-to-alls."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist

from tools.doctor.die_check import Check, Die, difference, in_ms
from tools.doctor.finding import Finding
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops import reference
from vllm_ascend.ops import rollout_ops
from vllm_ascend.ops.exchanged_experts import environment_buffer_mib, tokens_of_a_call

NAME = "experts by MC2"
HIDDEN, WIDTH, TOP_K, LOCAL_EXPERTS = 7168, 64, 8, 16
NUM_TOKENS = 32  # of a rank in a decode step: 64 sequences of a replica of TP 2
LARGE_RUN = (HIDDEN, TOP_K, 1, 256)  # 671B over 256 dies, an expert each
TOLERANCE = 3e-2  # bfloat16, in another order
MAX_BUFFER_MIB = 4096


def check(die: Die) -> Finding:
    """A note where HCCL_BUFFSIZE is too small for a step of the 671B run; collective over all ranks, which make the
    same calls whatever each of them finds.
    """
    here = (HIDDEN, TOP_K, LOCAL_EXPERTS, die.num_dies)
    given_mib, needed_here, needed = environment_buffer_mib(), needed_mib(*here), needed_mib(*LARGE_RUN)
    if given_mib < needed_here:
        found = f"HCCL_BUFFSIZE={given_mib} takes no {NUM_TOKENS} tokens"
        return Finding(NAME, found, f"set HCCL_BUFFSIZE={needed_here} or more", is_fatal=True)
    pg = dist.new_group(list(range(die.num_dies)), pg_options=die.platform.group_options("exchange"))
    group = GroupCoordinator(die.rank, die.num_dies, pg)
    generator = torch.Generator().manual_seed(die.rank)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(die.device)

    experts = LOCAL_EXPERTS * die.num_dies
    x_TH, weights_TK = floats(NUM_TOKENS, HIDDEN), floats(NUM_TOKENS, TOP_K).float().abs() / TOP_K
    ids_TK = torch.rand(NUM_TOKENS, experts, generator=generator).topk(TOP_K).indices.to(die.device)
    w13_E2FH, w2_EHF = floats(LOCAL_EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5, floats(LOCAL_EXPERTS, HIDDEN, WIDTH) / 8
    given = (x_TH, (w13_E2FH, w2_EHF), (weights_TK, ids_TK), NUM_TOKENS, group)
    exchanged = rollout_ops().exchanged_experts
    wrong = difference(exchanged(*given), reference.rollout_ops().exchanged_experts(*given), TOLERANCE)
    took = die.seconds(lambda: exchanged(*given))
    group.destroy()
    if wrong:
        remedy = "set actor_rollout_ref.rollout.expert_exchange=all_gather, and report it with the versions of CANN"
        return Finding(NAME, f"MC2 and all-to-alls differ: {wrong}", remedy, is_fatal=True)
    figure = f"as by all-to-alls; {in_ms(took)} for {NUM_TOKENS} tokens, which need HCCL_BUFFSIZE={needed_here}"
    remedy = f"over 256 dies 671B wants HCCL_BUFFSIZE={needed} or more, here {given_mib}: set it"
    return Finding(NAME, figure, remedy if given_mib < needed else "")


def needed_mib(hidden: int, top_k: int, num_local_experts: int, num_ranks: int) -> int:
    """The least HCCL_BUFFSIZE with which a call takes a decode step's tokens."""
    for mib in range(1, MAX_BUFFER_MIB):
        with suppress(ValueError):  # takes not even one token
            environment = {"HCCL_BUFFSIZE": str(mib)}
            if tokens_of_a_call(hidden, top_k, num_local_experts, num_ranks, environment) >= NUM_TOKENS:
                return mib
    raise ValueError(f"no HCCL_BUFFSIZE takes {NUM_TOKENS} tokens over {num_ranks} ranks")


CHECK = Check(NAME, check)
