"""The sizes of captured decode steps: those that an engine captures, and the largest that it can."""

from __future__ import annotations

from hf_formats.config import HFModelConfig
from tools.plan.world import run_variables
from verl.workers.config import RolloutConfig
from vllm.ops.cuda.exchange import MOST_GATHERED_TOKENS
from vllm_ascend.ops.exchanged_experts import tokens_of_a_call

NO_LIMIT = 1 << 30


def graph_sizes(rollout: RolloutConfig, kind: str, num_drafts: int) -> tuple[int, ...]:
    """The config's, else those of the engine on the device: on an NPU one, and with drafts one for their rows too."""
    if rollout.cudagraph_capture_sizes is None and kind == "npu":
        most = rollout.max_num_seqs
        return tuple(sorted({most, min(most * (1 + num_drafts), max(most, rollout.max_num_batched_tokens))}))
    return tuple(sorted(rollout.cudagraph_capture_sizes or ()))


def most_captured(hf: HFModelConfig, kind: str, tp: int, num_ranks: int) -> int:
    """The rows of a replica in the largest step whose exchange of experts over ``num_ranks`` ranks by ``dispatch`` can
    be captured; 0 for none.
    """
    if num_ranks == 1 or kind == "cpu":
        return NO_LIMIT
    if kind == "cuda":
        return MOST_GATHERED_TOKENS // num_ranks * tp
    sizes = (hf.hidden_size, hf.num_experts_per_tok, hf.n_routed_experts // num_ranks, num_ranks)
    try:
        return tokens_of_a_call(*sizes, run_variables("ascend")) * tp
    except ValueError:
        return 0
