"""The GRPO/PPO loss of packed micro-batches with denominators of the whole mini-batch, its metrics and correction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import ProcessGroups
from megatron.core.utils import async_h2d
from verl.protocol import DataProto
from verl.trainer.config import RolloutCorrectionSection
from verl.trainer.ppo.aggregation import token_loss_weights
from verl.trainer.ppo.kl import kl_penalty
from verl.trainer.ppo.policy_losses import SequenceMean, TokenForm, get_policy_loss_fn, token_form
from verl.trainer.ppo.rollout_correction import corrections
from verl.utils.masks import finite_outside, selected
from verl.utils.megatron.packed_batch import PackedMicroBatch
from verl.utils.megatron.reduce import mean_by_name, reduce_over
from verl.workers.actor.row_loss import loss_of_rows
from verl.workers.config import ActorConfig

_BY_TOKEN = (
    "weights",
    "policy_weights",
    "advantages",
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
    "rollout_is_weights",
)
_WEIGHTED = {"advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights"}  # no NaN where the weight is 0
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


@dataclass(frozen=True)
class LossInputs:
    """The inputs of the loss for one mini-batch, all fp32 [B, R] of this data-parallel rank's rows, on the host.

    Attributes:
        weights: token weights such that sum(weights * loss) over every rank is the aggregated loss; 0 where a rollout
            correction rejected the token.
        advantages: one value per token.
        old_log_probs: log-probs of the policy that acted; None when it is provably the one being updated.
        ref_log_prob: log-probs of the reference; None without a KL loss, and on stages before the last.
        rollout_log_probs: log-probs of the rollout engine; None when it did not report them.
        response_lengths: response tokens of each row, [B].
        rollout_is_weights: factors of the policy loss from a rollout correction; None without one.
        anchors_on_rollout: ``bypass_mode``: the old log-probs are those of the rollout.
        policy_weights: the weights of the policy loss, where it is defined with an aggregation of its own.
        num_kept_tokens, num_sequences: tokens whose weight is not 0, and rows with any, of the mini-batch on all ranks.
        num_tokens: tokens of the mini-batch on all ranks, with prompts.
        num_response_tokens: response tokens of the mini-batch on all ranks.
    """

    weights: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None
    ref_log_prob: Tensor | None
    rollout_log_probs: Tensor | None
    response_lengths: Tensor
    rollout_is_weights: Tensor | None = None
    anchors_on_rollout: bool = False
    policy_weights: Tensor | None = None
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
    ) -> LossInputs:
        """Reads a mini-batch; the denominators are summed over the data-parallel group, by tensors on ``device``.

        Context-parallel ranks hold the same rows, so the denominators are those of whole sequences, counted once.
        Tokens that a rollout correction rejected (column ``kept_mask``) do not count in them.
        """
        batch = data.batch
        response_mask = batch["response_mask"].float()
        mask = batch.get("kept_mask", response_mask)
        counted = (mask, mask.sum(-1) > 0, response_mask, batch["attention_mask"])
        counts = torch.stack([values.sum().int() for values in counted])
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
            response_lengths=response_mask.sum(-1),
            rollout_is_weights=batch.get("rollout_is_weights", None),
            anchors_on_rollout=anchors_on_rollout,
            policy_weights=policy_weights,
            num_kept_tokens=num_kept,
            num_sequences=num_sequences,
            num_tokens=max(num_tokens, 1.0),
            num_response_tokens=max(num_scored, 1.0),
        )

    def at(self, micro: PackedMicroBatch, device: torch.device) -> dict[str, Tensor]:
        """[S] of every input that is there for the scored tokens of ``micro``, by its name; one copy to ``device``."""
        given = {name: values for name in _BY_TOKEN if (values := getattr(self, name)) is not None}
        found = {name: values[micro.rows_S, micro.cols_S] for name, values in given.items()}
        for name in _WEIGHTED & found.keys():
            found[name] = finite_outside(found[name], found["weights"])
        if device.type == "cpu":
            return found
        moved = async_h2d(torch.stack([values.float() for values in found.values()]), device)
        return dict(zip(found, moved, strict=True))


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
