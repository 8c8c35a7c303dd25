"""The tensors of the loss for a mini-batch, and the same for the scored tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import ProcessGroups
from megatron.core.utils import async_h2d
from verl.protocol import DataProto
from verl.trainer.ppo.aggregation import token_loss_weights
from verl.trainer.ppo.policy_losses import get_policy_loss_fn, token_form
from verl.trainer.ppo.rollout_correction import LossCorrection
from verl.utils.masks import finite_outside
from verl.utils.megatron.packed_batch import PackedMicroBatch
from verl.utils.megatron.reduce import reduce_over
from verl.workers.config import ActorConfig


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """The inputs of the loss, one value per token: fp32 [B, R] of a mini-batch or [S] of a micro-batch.

    Attributes:
        weights: token weights such that sum(weights * loss) over every rank is the aggregated loss; 0 where a rollout
            correction rejected the token.
        advantages: one value per token.
        old_log_probs: log-probs of the policy that acted; None when it is provably the one being updated.
        ref_log_prob: log-probs of the reference; None without a KL loss, and on stages before the last.
        rollout_log_probs: log-probs of the rollout engine; None when it did not report them.
        rollout_is_weights: factors of the policy loss from a rollout correction; None without one.
        policy_weights: the weights of the policy loss, where it is defined with an aggregation of its own.
    """

    weights: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None = None
    ref_log_prob: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    policy_weights: Tensor | None = None

    def at(self, micro: PackedMicroBatch, device: torch.device) -> TokenInputs:
        """[S] of every input that is there for the scored tokens of ``micro``; one copy to ``device``.

        Where the weight is 0 there is no NaN, but for the rollout's log-probs, which are compared everywhere.
        """
        given = {key.name: getattr(self, key.name) for key in fields(TokenInputs)}
        found = {name: values[micro.rows_S, micro.cols_S] for name, values in given.items() if values is not None}
        for name in found.keys() - {"rollout_log_probs"}:
            found[name] = finite_outside(found[name], found["weights"])
        if device.type != "cpu":
            moved = async_h2d(torch.stack([values.float() for values in found.values()]), device)
            found = dict(zip(found, moved, strict=True))
        return TokenInputs(**found)


@dataclass(frozen=True, kw_only=True)
class LossInputs(TokenInputs):
    """The inputs of the loss for one mini-batch, [B, R] of this data-parallel rank's rows, on the host.

    Attributes:
        response_lengths: response tokens of each row, [B].
        anchors_on_rollout: ``bypass_mode``: the old log-probs are those of the rollout.
        correction: ``bypass_mode``: what the policy that is updated corrects in the loss; None where it does not.
        num_kept_tokens, num_sequences: tokens whose weight is not 0, and rows with any, of the mini-batch on all ranks.
        num_tokens: tokens of the mini-batch on all ranks, with prompts.
        num_response_tokens: response tokens of the mini-batch on all ranks.
    """

    response_lengths: Tensor
    anchors_on_rollout: bool = False
    correction: LossCorrection | None = None
    num_kept_tokens: float = 1.0
    num_sequences: float = 1.0
    num_tokens: float = 1.0
    num_response_tokens: float = 1.0

    @classmethod
    def from_batch(
        cls,
        data: DataProto,
        config: ActorConfig,
        groups: ProcessGroups,
        device: torch.device,
        *,
        anchors_on_rollout: bool = False,
        correction: LossCorrection | None = None,
    ) -> LossInputs:
        """Reads a mini-batch; the denominators are summed over the data-parallel group, by tensors on ``device``.

        Context-parallel ranks hold the same rows, so the denominators are those of whole sequences, counted once.
        Tokens that a rollout correction rejected (column ``kept_mask``) do not count in them.
        """
        batch = data.batch
        response_mask = batch["response_mask"].float()
        mask = batch.get("kept_mask", response_mask)
        counted = [mask, mask.sum(-1) > 0, response_mask, batch["attention_mask"]]
        counts = torch.stack([values.sum().int() for values in counted])
        if "row_starts" in batch:
            counts[-1] += (batch["row_starts"] - 1).clamp(min=0).sum()  # what a new row begins with is computed again
        counts = reduce_over(counts, groups.dp, dist.ReduceOp.SUM, device)
        num_kept, num_sequences, num_scored, num_tokens = (float(count) for count in counts)
        weights = token_loss_weights(mask, config.loss_agg_mode, num_tokens=num_kept, num_sequences=num_sequences)
        form, policy_weights = token_form(get_policy_loss_fn(config.policy_loss.loss_mode)), None
        if form is not None and form.loss_agg_mode not in (None, config.loss_agg_mode):
            policy_weights = token_loss_weights(
                mask, form.loss_agg_mode, num_tokens=num_kept, num_sequences=num_sequences
            )
        is_last = groups.is_last_stage
        if anchors_on_rollout and is_last and "rollout_log_probs" not in batch:
            raise ValueError("algorithm.rollout_correction.bypass_mode: the batch has no rollout_log_probs")
        return cls(
            weights=weights,
            advantages=batch["advantages"].float(),
            old_log_probs=batch.get("rollout_log_probs" if anchors_on_rollout else "old_log_probs", None),
            ref_log_prob=batch["ref_log_prob"] if config.use_kl_loss and is_last else None,
            rollout_log_probs=batch.get("rollout_log_probs", None),
            rollout_is_weights=batch.get("rollout_is_weights", None),
            policy_weights=policy_weights,
            response_lengths=response_mask.sum(-1),
            anchors_on_rollout=anchors_on_rollout,
            correction=correction,
            num_kept_tokens=num_kept,
            num_sequences=num_sequences,
            num_tokens=max(num_tokens, 1.0),
            num_response_tokens=max(num_scored, 1.0),
        )
