"""A policy loss in upstream's form, which takes rows [B, R], on a packed micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.trainer.ppo.aggregation import share_of_mini_batch
from verl.trainer.ppo.policy_losses import PolicyLossFn
from verl.utils.masks import finite_outside
from verl.utils.megatron.packed_batch import PackedMicroBatch
from verl.utils.megatron.reduce import reduce_over
from verl.workers.actor.loss_inputs import LossInputs
from verl.workers.config import ActorConfig


@dataclass(frozen=True)
class RowLoss:
    """What a loss of rows gives for a micro-batch.

    Attributes:
        loss: the part of the mini-batch's loss, with the gradient of the tokens of this rank.
        reported: this rank's share of it: the ranks that share the sequences have the same loss, and add theirs up.
        metrics: what the loss reports, by name.
    """

    loss: Tensor
    reported: Tensor
    metrics: dict[str, float]


def loss_of_rows(
    policy_loss: PolicyLossFn,
    config: ActorConfig,
    inputs: LossInputs,
    log_probs_S: Tensor,
    micro: PackedMicroBatch,
    cp_group: dist.ProcessGroup | None,
) -> RowLoss:
    """Calls ``policy_loss`` with the rows of ``micro`` that have response tokens.

    A loss says how the rows of a micro-batch count against each other. Against other micro-batches they count as
    ``loss_agg_mode`` says: by their tokens or their sequences. Of context-parallel ranks each gets whole rows, whose
    log-probs have a gradient where the rank computed them. Collective over ``cp_group``.

    Raises:
        ValueError: the loss returns something else than a scalar and metrics.
    """
    device = log_probs_S.device
    rows_S, cols_S = micro.places_2S
    found = log_probs_S.new_zeros(2, *inputs.weights.shape)  # log-probs, and where there are any
    found[0, rows_S, cols_S] = log_probs_S.detach()
    found[1, rows_S, cols_S] = 1.0
    if cp_group is not None:
        found = reduce_over(found, cp_group, dist.ReduceOp.SUM, device)
    rows = found[1].amax(-1) > 0
    if not rows.any():
        return RowLoss(log_probs_S.sum(), log_probs_S.detach().sum(), {})
    mask = found[1][rows] * (inputs.weights.to(device)[rows] > 0)

    def chosen(values_BR: Tensor) -> Tensor:
        return finite_outside(values_BR.to(device)[rows], mask)

    detached = found[0]
    result: Any = policy_loss(
        old_log_prob=chosen(detached if inputs.old_log_probs is None else inputs.old_log_probs),
        log_prob=finite_outside(detached.index_put((rows_S, cols_S), log_probs_S)[rows], mask),
        advantages=chosen(inputs.advantages),
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=None if inputs.rollout_is_weights is None else chosen(inputs.rollout_is_weights),
    )
    loss, metrics = _checked(result, config.policy_loss.loss_mode)
    share = share_of_mini_batch(
        mask, config.loss_agg_mode, num_tokens=inputs.num_kept_tokens, num_sequences=inputs.num_sequences
    )
    ranks = 1 if cp_group is None else cp_group.size()
    return RowLoss(share * loss, share * loss.detach() / ranks, metrics)


def _checked(result: Any, name: str) -> tuple[Tensor, dict[str, float]]:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise ValueError(f"the policy loss {name!r} returned a {type(result).__name__}; expected (scalar, metrics)")
    loss, metrics = result
    if not (isinstance(loss, Tensor) and loss.numel() == 1):
        raise ValueError(f"the policy loss {name!r} returned no scalar tensor as its first value")
    return loss.reshape(()), {key: float(torch.as_tensor(value).float().mean()) for key, value in metrics.items()}
