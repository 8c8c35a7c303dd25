"""Device memory of the communicators that a step of any layout uses, each with the buffers that its group asks for."""

from __future__ import annotations

from functools import lru_cache

from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import GROUP_AXES, PAIR, UNUSED_GROUPS
from tools.plan.rank_plan import buffer_bytes
from tools.plan.timing import RolloutShape
from vllm.distributed.parallel_state import GROUP_PREFIX


@lru_cache(maxsize=4096)
def communicator_bytes(
    kind: str, layout: ParallelLayout, dispatcher: str, rollout: RolloutShape, rebalances: bool
) -> int:
    """Bytes on a rank of a stage that has one before it and one after it.

    kind: the device's op tables · dispatcher: ``moe_token_dispatcher_type``.
    """
    used = ["world"] if layout.world_size > 1 else []
    for name in GROUP_AXES.keys() - UNUSED_GROUPS[dispatcher]:
        used += [name] if len(layout.members(0, *GROUP_AXES[name])) > 1 else []
    used += [PAIR, PAIR] if layout.pipeline_model_parallel_size > 1 else []
    shares_experts = rollout.has_expert_parallel and rollout.expert_ranks > 1
    engine = {
        "tp": rollout.tp > 1,
        "exchange": shares_experts and rollout.expert_exchange == "dispatch",
        "ep": shares_experts and rollout.expert_exchange != "dispatch",
        "dp": rollout.dp > 1 and (shares_experts or rebalances),
    }
    used += [GROUP_PREFIX + name for name, is_used in engine.items() if is_used]
    return sum(buffer_bytes(kind, name) for name in used)
