"""Auxiliary losses that balance the experts: how they enter the gradient, and their values for the log.

Letters: B sequences, T tokens of this rank's sequence shard, E experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import async_h2d

# Names of the values in the log, as upstream has them.
NAMES = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")


class AuxLossScaler:
    """Puts a loss into the backward pass of the activations that it belongs to (upstream: MoEAuxLossAutoScaler).

    The gradient of the attached loss is ``scale`` at the time of the backward pass. ``set_aux_loss_scale`` sets it for
    a whole model: a schedule to 1 / num_microbatches when losses are means, the caller to 1 over whatever its main loss
    is divided by when ``calculate_per_token_loss``.
    """

    def __init__(self) -> None:
        self.scale: float | Tensor = 1.0

    def attach(self, x: Tensor, loss: Tensor) -> Tensor:
        """Return x unchanged; its backward also differentiates ``scale * loss`` (a scalar)."""
        attached: Tensor = _Attach.apply(x, loss, self)
        return attached


def set_aux_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Set the scale of every module of ``model`` that has an ``aux_loss_scaler``."""
    for module in model.modules():
        scaler = getattr(module, "aux_loss_scaler", None)
        if isinstance(scaler, AuxLossScaler):
            scaler.scale = scale


class MoEAuxLosses:
    """The load balancing loss and the z-loss of one router.

    With s the scores of a token over all experts (softmax, or sigmoids divided by their sum; no bias) and f_e = E/(K n)
    times the number of the n tokens that chose expert e:

    - seq_aux_loss (DeepSeek-V3, arXiv 2412.19437, eq. 17-20): of each sequence, ``sum_e f_e mean_t(s_te)``;
    - aux_loss (Switch Transformers, arXiv 2101.03961, eq. 4-6, for K choices): the same over all of a micro-batch;
    - z-loss (ST-MoE, arXiv 2202.08906, eq. 5): ``mean_t(logsumexp_e(logits_te)^2)``.

    Each is multiplied by its coefficient. A micro-batch counts as the mean of its sequences, or, when
    ``calculate_per_token_loss``, as the sum of them, each times its tokens: with a scale of 1 over all tokens of a step
    the sequence loss and the z-loss then do not depend on packing, micro-batches or layout (aux_loss depends on what
    is in a micro-batch, that is its definition). Tokens count over all TP and CP ranks of a micro-batch, padding not at
    all. Each rank adds the part of its own tokens to the gradient: f has none, so only counts are exchanged.

    ``totals`` [3, 2]: for the log, per name of ``NAMES`` the sum over this rank's tokens of their values without
    coefficient, and the number of tokens.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, scaler: AuxLossScaler) -> None:
        assert config.num_moe_experts is not None
        self.config, self.group, self.scaler = config, groups.tp_cp, scaler
        self.num_experts = config.num_moe_experts
        self.balances = config.moe_aux_loss_coeff > 0 and config.moe_router_load_balancing_type != "none"
        self.by_sequence = config.moe_router_load_balancing_type == "seq_aux_loss"
        self.totals: Tensor | None = None

    @property
    def is_on(self) -> bool:
        """Whether there is any loss to attach."""
        return self.balances or bool(self.config.moe_z_loss_coeff)

    def attach(
        self, probs_TK: Tensor, logits_TE: Tensor, indices_TK: Tensor, rows: TokenRows, is_counting: bool
    ) -> Tensor:
        """probs_TK with the losses attached; collective over tp_cp."""
        per_token = self.config.calculate_per_token_loss
        if rows.has_padding:  # selected here, a NaN of padding reaches neither the losses nor their gradient
            logits_TE = logits_TE.masked_fill((rows.is_real_T == 0).unsqueeze(1), 0.0)
        counts_BE = self._counts(indices_TK, rows)
        tokens_B = counts_BE.sum(1) / indices_TK.shape[1]
        losses = []
        if self.balances:
            share_BE = counts_BE * self.num_experts / counts_BE.sum(1, keepdim=True).clamp(min=1)
            value_T = (self._scores(logits_TE) * share_BE[rows.sequence_T]).sum(1)
            # The mean over sequences of the mean over their tokens, as weights of tokens.
            weight_B = 1 / (tokens_B.clamp(min=1) * (tokens_B > 0).sum().clamp(min=1))
            weight_T = rows.is_real_T if per_token else rows.is_real_T * weight_B[rows.sequence_T]
            losses.append(self.config.moe_aux_loss_coeff * (value_T * weight_T).sum())
            self._log(NAMES[int(self.by_sequence)], value_T, rows, is_counting)
        if self.config.moe_z_loss_coeff:
            value_T = logits_TE.logsumexp(-1).square()
            weight_T = rows.is_real_T if per_token else rows.is_real_T / tokens_B.sum().clamp(min=1)
            losses.append(self.config.moe_z_loss_coeff * (value_T * weight_T).sum())
            self._log("z_loss", value_T, rows, is_counting)
        return self.scaler.attach(probs_TK, torch.stack(losses).sum())

    def _counts(self, indices_TK: Tensor, rows: TokenRows) -> Tensor:
        """Return how often the tokens of each sequence, on all ranks, chose each expert; float32 [B, E]."""
        flat_TK = rows.sequence_T.unsqueeze(1) * self.num_experts + indices_TK
        counts = rows.is_real_T.new_zeros(rows.num_sequences * self.num_experts)
        counts.scatter_add_(0, flat_TK.flatten(), rows.is_real_T.repeat_interleave(indices_TK.shape[1]))
        if self.group.size() > 1:
            dist.all_reduce(counts, group=self.group)
        return counts.view(rows.num_sequences, self.num_experts)

    def _scores(self, logits_TE: Tensor) -> Tensor:
        if self.config.moe_router_score_function == "softmax":
            return logits_TE.softmax(-1)
        scores_TE = logits_TE.sigmoid()
        return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)

    def _log(self, name: str, value_T: Tensor, rows: TokenRows, is_counting: bool) -> None:
        if not is_counting:
            return
        if self.totals is None:
            self.totals = value_T.new_zeros(len(NAMES), 2)
        self.totals[NAMES.index(name)] += torch.stack([(value_T.detach() * rows.is_real_T).sum(), rows.is_real_T.sum()])


@dataclass(frozen=True)
class TokenRows:
    """The sequence int64 [T] (all 0 unless asked for) and is_real float32 [T] (0: padding) of a router's rows."""

    sequence_T: Tensor
    num_sequences: int
    is_real_T: Tensor
    has_padding: bool

    @staticmethod
    def of(
        x_TH: Tensor, packed_seq_params: PackedSeqParams | None, groups: ProcessGroups, by_sequence: bool
    ) -> TokenRows:
        """Return those of ``x_TH``; computed once per micro-batch. Without parameters: one sequence, no padding."""
        num_tokens, device = x_TH.shape[0], x_TH.device
        if packed_seq_params is None:
            zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            return TokenRows(zeros_T, 1, torch.ones(num_tokens, device=device), has_padding=False)
        key = (TokenRows, num_tokens, device, by_sequence)
        if key not in packed_seq_params.derived:
            packed_seq_params.derived[key] = TokenRows._make(num_tokens, device, packed_seq_params, groups, by_sequence)
        rows = packed_seq_params.derived[key]
        assert isinstance(rows, TokenRows)
        return rows

    @staticmethod
    def _make(
        num_tokens: int, device: torch.device, params: PackedSeqParams, groups: ProcessGroups, by_sequence: bool
    ) -> TokenRows:
        mine = slice(num_tokens * groups.tp.rank(), num_tokens * (groups.tp.rank() + 1))
        is_real_T = torch.ones(num_tokens, device=device)
        if params.is_padding_T is not None:
            is_real_T -= params.is_padding_T[mine].to(is_real_T)
        if params.shared_prompts is not None:
            assert not by_sequence, "a shared prompt belongs to several sequences"
            is_real_T *= params.shared_prompts.copies_T[mine].to(is_real_T)
        sequence_T, num_sequences = torch.zeros(num_tokens, dtype=torch.int64), 1
        if by_sequence:
            # Under context parallelism every rank holds the same number of tokens of a sequence, one after another.
            lengths_B = params.cu_seqlens.cpu().diff().long() // groups.cp.size()
            num_sequences = lengths_B.numel()
            sequence_T = torch.arange(num_sequences).repeat_interleave(lengths_B)[mine]
        is_weighted = params.is_padding_T is not None or params.shared_prompts is not None
        return TokenRows(async_h2d(sequence_T, device), num_sequences, is_real_T, is_weighted)


def collect_moe_aux_losses(model: nn.Module, groups: ProcessGroups) -> dict[str, dict[int, float]]:
    """Name -> global layer -> mean over all tokens since the last call, without coefficient; the same on all ranks.

    Collective over tp_dp_cp and pp; every rank calls it. A loss that is off is left out.
    """
    trackers: dict[int, MoEAuxLosses] = {}
    for module in model.modules():
        if isinstance(tracker := getattr(module, "aux_losses", None), MoEAuxLosses):
            trackers[module.global_layer] = tracker  # type: ignore[index]
    device = next(model.parameters()).device
    config: TransformerConfig = model.config  # type: ignore[assignment]
    num_layers = config.num_layers + (config.mtp_num_layers or 0)
    totals = torch.zeros(num_layers, len(NAMES), 2, device=device)
    for layer, tracker in trackers.items():
        if tracker.totals is not None:
            totals[layer] = tracker.totals
        tracker.totals = None
    for group in (groups.tp_dp_cp, groups.pp):
        if group.size() > 1:
            dist.all_reduce(totals, group=group)
    found: dict[str, dict[int, float]] = {}
    for layer, of_layer in enumerate(totals.tolist()):
        for name, (value, num_tokens) in zip(NAMES, of_layer, strict=True):
            if num_tokens:
                found.setdefault(name, {})[layer] = value / num_tokens
    return found


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scaler: AuxLossScaler) -> Tensor:
        ctx.scaler, ctx.dtype, ctx.device = scaler, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, torch.as_tensor(ctx.scaler.scale, dtype=ctx.dtype, device=ctx.device), None
