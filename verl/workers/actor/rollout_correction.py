"""The rollout correction of one rank's rows, before they are split into mini-batches."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import ProcessGroups
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.actor.policy_loss import reduce_over


def corrected(
    data: DataProto, config: RolloutCorrectionConfig, groups: ProcessGroups
) -> tuple[DataProto, dict[str, float]]:
    """``data`` with ``rollout_is_weights`` (where requested) and ``kept_mask`` [B, R], and metrics of the whole batch.

    Collective over the data-parallel ranks of the last stage. Rows are whole there, on every context-parallel rank, so
    that no level depends on how they are packed. Computed on the host: fp64 sums of a few numbers per token.

    Raises:
        ValueError: old or rollout log-probs are missing.
    """
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    missing = [name for name in names if name not in data.batch]
    if missing:
        raise ValueError(f"algorithm.rollout_correction: the batch has no {' and no '.join(missing)}")
    device = data.batch["response_mask"].device

    def over_ranks(sums: Tensor) -> Tensor:
        return reduce_over(sums.to(device), groups.dp, dist.ReduceOp.SUM).cpu()

    old, rollout, mask = (data.batch[name].cpu() for name in names)
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(old, rollout, mask, config, over_ranks)
    columns = dict(data.batch.items()) | {"kept_mask": kept.to(device)}
    if weights is not None:
        columns["rollout_is_weights"] = weights.to(device)
    return DataProto.from_dict(columns, data.non_tensor_batch, data.meta_info), metrics
