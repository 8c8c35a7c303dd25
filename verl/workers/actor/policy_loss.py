"""The GRPO/PPO loss of packed micro-batches with denominators of the whole mini-batch, its metrics and correction."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import ProcessGroups
from verl.protocol import DataProto
from verl.trainer.config import RolloutCorrectionSection
from verl.trainer.ppo.kl import kl_penalty
from verl.trainer.ppo.policy_losses import SequenceMean, TokenForm, get_policy_loss_fn, token_form
from verl.trainer.ppo.rollout_correction import corrections
from verl.utils.masks import finite_outside, selected
from verl.utils.megatron.packed_batch import PackedMicroBatch
from verl.utils.megatron.reduce import mean_by_name, reduce_over
from verl.workers.actor.loss_inputs import LossInputs
from verl.workers.actor.row_loss import loss_of_rows
from verl.workers.config import ActorConfig

_SUMS = (
    "pg_loss",
    "kl_loss",
    "entropy",
    "clipfrac",
    "clipfrac_lower",
    "approx_kl",
    "prob_diff",
    "prob_x",
    "prob_y",
    "prob_xx",
    "prob_yy",
    "prob_xy",
)
# Metrics that a loss of rows may report, and the sums that they are means of.
_METRICS_OF_ROWS = {
    "actor/pg_clipfrac": "clipfrac",
    "actor/pg_clipfrac_lower": "clipfrac_lower",
    "actor/ppo_kl": "approx_kl",
}


class PolicyLoss:
    """The policy loss (+ KL loss - entropy bonus) of one mini-batch, called once per micro-batch.

    loss = sum_t w_t * (u_t * pg_t + kl_loss_coef * kl_t - entropy_coeff * H_t), u_t = 1 without a rollout correction;
    the sum over micro-batches and data-parallel ranks is verl's ``agg_loss`` of the mini-batch, however it was packed.
    A loss that needs rows (``loss_of_rows``) takes the place of the first term.

    Args:
        cp_group: the ranks that share each sequence; None when one has all of its tokens.
    """

    def __init__(self, config: ActorConfig, inputs: LossInputs, cp_group: dist.ProcessGroup | None = None) -> None:
        self.config = config
        self.inputs = inputs
        self.cp_group = cp_group
        self.policy_loss = get_policy_loss_fn(config.policy_loss.loss_mode)
        self.token_form = token_form(self.policy_loss)

    def __call__(self, log_probs_S: Tensor, entropy_S: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, dict]:
        """The scalar loss and sums for ``UpdateMetrics``: fp64 on a CPU; accelerators sum in fp32."""
        config, device = self.config, log_probs_S.device
        dtype = _sum_dtype(device)
        inputs = self.inputs.at(micro, device)
        weights_S = inputs["weights"]
        # On-policy the ratio is exactly one: the same numbers are used, so two forward passes cannot round differently.
        old_S = inputs.get("old_log_probs", log_probs_S.detach())
        if self.token_form is not None:
            loss, sums, metrics = self._of_tokens(self.token_form, old_S, log_probs_S, inputs, micro)
        else:
            loss, sums, metrics = self._of_rows(old_S, log_probs_S, micro)
        sums["entropy"] = entropy_S.sum()
        if "ref_log_prob" in inputs:
            kl_S = kl_penalty(log_probs_S, inputs["ref_log_prob"], config.kl_loss_type)
            kl_loss = (weights_S * selected(kl_S, weights_S)).sum()
            loss = loss + config.kl_loss_coef * kl_loss
            sums["kl_loss"] = kl_loss
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * (weights_S * selected(entropy_S, weights_S)).sum()
        largest = zero = torch.zeros((), dtype=dtype, device=device)
        if "rollout_log_probs" in inputs and log_probs_S.numel():
            # Compare the policy that acted: later updates of the batch move away from it on purpose. In bypass mode
            # its log-probs were not computed.
            acted_S = log_probs_S.detach() if self.inputs.anchors_on_rollout else old_S
            ours, theirs = acted_S.to(dtype).exp(), inputs["rollout_log_probs"].to(dtype).exp()
            difference = (ours - theirs).abs()
            largest = difference.max()
            sums |= {"prob_diff": difference.sum(), "prob_x": ours.sum(), "prob_y": theirs.sum()}
            sums |= {"prob_xx": (ours * ours).sum(), "prob_yy": (theirs * theirs).sum()}
            sums["prob_xy"] = (ours * theirs).sum()
        packed = torch.stack([sums[name].detach().to(dtype) if name in sums else zero for name in _SUMS])
        report = {"sums": packed, "largest": largest, "tokens": log_probs_S.numel()}
        return loss, report | {"has_rollout": self.inputs.rollout_log_probs is not None, "metrics": metrics}

    def _of_tokens(
        self, form: TokenForm, old_S: Tensor, log_probs_S: Tensor, inputs: dict[str, Tensor], micro: PackedMicroBatch
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, float] | None]:
        """The part of the loss, its sums over tokens, and no metrics of its own."""
        log_probs_S = finite_outside(log_probs_S, inputs["weights"])
        policy = form.losses(old_S, log_probs_S, inputs["advantages"], self.config, self._sequence_mean(micro))
        weighted_S = inputs.get("policy_weights", inputs["weights"]) * policy.loss
        if "rollout_is_weights" in inputs:
            weighted_S = weighted_S * inputs["rollout_is_weights"]
        sums = {
            "pg_loss": weighted_S.detach().to(_sum_dtype(weighted_S.device)).sum(),
            "clipfrac": policy.is_clipped.float().sum(),
            "clipfrac_lower": policy.is_clipped_lower.float().sum(),
            "approx_kl": policy.approx_kl.sum(),
        }
        return weighted_S.sum(), sums, None

    def _of_rows(
        self, old_S: Tensor, log_probs_S: Tensor, micro: PackedMicroBatch
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, float] | None]:
        """The same of a loss of rows; of its metrics those with upstream's names become sums."""
        found = loss_of_rows(self.policy_loss, self.config, self.inputs, log_probs_S, micro, self.cp_group)
        metrics, num_tokens = dict(found.metrics), log_probs_S.numel()
        sums = {"pg_loss": found.reported, "approx_kl": (old_S - log_probs_S.detach()).sum()}
        for name, key in _METRICS_OF_ROWS.items():
            if name in metrics:
                sums[key] = log_probs_S.new_tensor(metrics.pop(name) * num_tokens)
        return found.loss, sums, metrics

    def _sequence_mean(self, micro: PackedMicroBatch) -> SequenceMean:
        """The mean over each row of ``micro``; context-parallel ranks share its tokens, micro-batches do not."""
        rows_S, cols_S = micro.places_2S

        def mean(values_S: Tensor) -> Tensor:
            rows_BR = values_S.new_zeros(self.inputs.weights.shape)
            rows_BR[rows_S, cols_S] = values_S.detach()
            sums_B = rows_BR.sum(-1)
            if self.cp_group is not None:
                sums_B = reduce_over(sums_B, self.cp_group, dist.ReduceOp.SUM, values_S.device)
            return (sums_B / self.inputs.response_lengths.clamp(min=1).to(values_S.device))[rows_S]

        return mean


class UpdateMetrics:
    """Adds up what the micro-batches of an update report and turns it into verl's metrics."""

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._groups = groups
        self._device = device  # of the collectives
        self._outputs: list[dict] = []
        self._grad_norms: list[float] = []
        self._num_skipped = 0
        self._lr = 0.0

    def add(self, outputs: list[dict], grad_norm: float, lr: float, has_stepped: bool) -> None:
        """One optimizer step: the dicts of its micro-batches, the norm before clipping, the rate used."""
        self._outputs.extend(outputs)
        self._grad_norms.append(grad_norm)
        self._num_skipped += not has_stepped
        self._lr = lr

    def result(self) -> dict[str, float]:
        """Metrics over all replicas and their context-parallel parts; every rank of the last stage must call it."""
        group, device = self._groups.dp_cp, self._device
        num_tokens = torch.tensor([sum(out["tokens"] for out in self._outputs)])
        sums = torch.cat((torch.stack([out["sums"] for out in self._outputs]).cpu().double().sum(0), num_tokens))
        largest = torch.stack([out["largest"] for out in self._outputs]).cpu().double().max()
        sums = reduce_over(sums, group, dist.ReduceOp.SUM, device)
        largest = reduce_over(largest, group, dist.ReduceOp.MAX, device)
        total = dict(zip((*_SUMS, "tokens"), sums.tolist(), strict=True))
        tokens, steps = max(total["tokens"], 1.0), max(len(self._grad_norms), 1)
        metrics = {
            "actor/pg_loss": total["pg_loss"] / steps,
            "actor/kl_loss": total["kl_loss"] / steps,
            "actor/entropy": total["entropy"] / tokens,
            "actor/pg_clipfrac": total["clipfrac"] / tokens,
            "actor/pg_clipfrac_lower": total["clipfrac_lower"] / tokens,
            "actor/ppo_kl": total["approx_kl"] / tokens,
            "actor/grad_norm": sum(self._grad_norms) / steps,
            "actor/lr": self._lr,
            "actor/skipped_steps": float(self._num_skipped),
        }
        if any(out["has_rollout"] for out in self._outputs):
            metrics |= {
                "training/rollout_probs_diff_max": float(largest),
                "training/rollout_probs_diff_mean": total["prob_diff"] / tokens,
                "training/rollout_actor_probs_pearson_corr": _pearson(total, tokens),
            }
        if any(out["metrics"] is not None for out in self._outputs):  # the same on all ranks: it depends on the loss
            metrics |= mean_by_name([(out["metrics"] or {}, out["tokens"]) for out in self._outputs], group)
        return metrics


def corrected(
    data: DataProto, config: RolloutCorrectionSection, groups: ProcessGroups, device: torch.device
) -> tuple[DataProto, dict[str, float]]:
    """``data`` with ``rollout_is_weights`` (where requested) and ``kept_mask`` [B, R], and metrics of the whole batch.

    Collective over the data-parallel ranks of the last stage. Rows are whole there, on every context-parallel rank, so
    that no level depends on how they are packed. Computed on the host: fp64 sums of a few numbers per token. ``device``
    is where collectives expect tensors.

    Raises:
        ValueError: old or rollout log-probs are missing.
    """
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    missing = [name for name in names if name not in data.batch]
    if missing:
        raise ValueError(f"algorithm.rollout_correction: the batch has no {' and no '.join(missing)}")

    def over_ranks(sums: Tensor) -> Tensor:
        return reduce_over(sums, groups.dp, dist.ReduceOp.SUM, device)

    old, rollout, mask = (data.batch[name] for name in names)
    weights, kept, metrics = corrections(old, rollout, mask, config, over_ranks)
    columns = dict(data.batch.items()) | {"kept_mask": kept}
    if weights is not None:
        columns["rollout_is_weights"] = weights
    return DataProto.from_dict(columns, data.non_tensor_batch, data.meta_info), metrics


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type == "cpu" else torch.float32


def _pearson(total: dict[str, float], count: float) -> float:
    covariance = total["prob_xy"] / count - total["prob_x"] * total["prob_y"] / count**2
    variance_x = total["prob_xx"] / count - (total["prob_x"] / count) ** 2
    variance_y = total["prob_yy"] / count - (total["prob_y"] / count) ** 2
    scale = (max(variance_x, 0.0) * max(variance_y, 0.0)) ** 0.5
    return covariance / scale if scale > 0 else 1.0
