"""The GRPO/PPO loss of packed micro-batches with denominators of the whole mini-batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from verl.trainer.ppo.kl import kl_penalty
from verl.utils.masks import selected
from verl.utils.megatron.packed_batch import PackedMicroBatch
from verl.workers.actor.loss_inputs import LossInputs
from verl.workers.actor.policy_term import policy_term
from verl.workers.actor.update_metrics import MicroReport, sum_dtype
from verl.workers.config import ActorConfig


class PolicyLoss:
    """The policy loss (+ KL loss - entropy bonus) of one mini-batch, called once per micro-batch.

    loss = sum_t w_t * (u_t * pg_t + kl_loss_coef * kl_t - entropy_coeff * H_t), u_t = 1 without a rollout correction;
    the sum over micro-batches and data-parallel ranks is verl's ``agg_loss`` of the mini-batch, however it was packed.
    A loss that needs rows (``LossOfRows``) takes the place of the first term.

    Args:
        cp_group: the ranks that share each sequence; None when one has all of its tokens.
    """

    def __init__(self, config: ActorConfig, inputs: LossInputs, cp_group: dist.ProcessGroup | None = None) -> None:
        self.config = config
        self.inputs = inputs
        self._term = policy_term(config, inputs, cp_group)

    def __call__(self, log_probs_S: Tensor, entropy_S: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, MicroReport]:
        """The scalar loss, and the report for ``UpdateMetrics``."""
        config, device = self.config, log_probs_S.device
        tokens = self.inputs.at(micro, device)
        # On-policy the ratio is exactly one: the same numbers are used, so two forward passes cannot round differently.
        old_S = log_probs_S.detach() if tokens.old_log_probs is None else tokens.old_log_probs
        term = self._term(old_S, log_probs_S, tokens, micro)
        loss, sums = term.loss, term.sums._replace(entropy=entropy_S.sum())
        if tokens.ref_log_prob is not None:
            kl_S = kl_penalty(log_probs_S, tokens.ref_log_prob, config.kl_loss_type)
            kl_loss = (tokens.weights * selected(kl_S, tokens.weights)).sum()
            loss = loss + config.kl_loss_coef * kl_loss
            sums = sums._replace(kl_loss=kl_loss)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * (tokens.weights * selected(entropy_S, tokens.weights)).sum()
        largest = zero = torch.zeros((), dtype=sum_dtype(device), device=device)
        if tokens.rollout_log_probs is not None and log_probs_S.numel():
            # Compare the policy that acted: later updates of the batch move away from it on purpose. In bypass mode
            # its log-probs were not computed.
            acted_S = log_probs_S.detach() if self.inputs.anchors_on_rollout else old_S
            ours, theirs = acted_S.to(largest.dtype).exp(), tokens.rollout_log_probs.to(largest.dtype).exp()
            difference = (ours - theirs).abs()
            largest = difference.max()
            sums = sums._replace(prob_diff=difference.sum(), prob_x=ours.sum(), prob_y=theirs.sum())
            sums = sums._replace(prob_xx=(ours * ours).sum(), prob_yy=(theirs * theirs).sum())
            sums = sums._replace(prob_xy=(ours * theirs).sum())
        has_rollout = self.inputs.rollout_log_probs is not None
        return loss, MicroReport(sums.packed(zero), largest, log_probs_S.numel(), has_rollout, term.metrics)
