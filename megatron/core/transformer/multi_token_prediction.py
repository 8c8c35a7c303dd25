"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): more tokens ahead, as a loss in training only.

Letters: T packed tokens of this context-parallel rank, W the same where no sequences share a prompt (each has a copy of
its own), H hidden, V vocabulary. Depth k counts from 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.context_parallel import ContextShard, zigzag_indices
from megatron.core.ops import TrainOps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel import collectives
from megatron.core.tensor_parallel.checkpoint import checkpoint
from megatron.core.tensor_parallel.layers import SequenceToSequenceLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.aux_loss import AuxLossScaler
from megatron.core.transformer.moe.router import without_counting
from megatron.core.transformer.norm import RMSNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import async_h2d

Rotary = tuple[Tensor, Tensor]


class MultiTokenPredictionLayer(nn.Module):
    """One depth: ``norm(layer(M [norm(embedding of token i+k); norm(hidden state of depth k-1 at i)]))``, [T/TP, H].

    The transformer layer is of the kind of the model's last one, with global number ``num_layers + k - 1``.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps, depth: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.enorm = RMSNorm(config, ops, hidden)
        self.hnorm = RMSNorm(config, ops, hidden)
        plain = replace(ops, linear_products=None)  # the report's FP8 layers are those of the decoder
        self.eh_proj = SequenceToSequenceLinear(config, groups, plain, 2 * hidden, hidden)
        self.transformer_layer = TransformerLayer(config, groups, ops, config.num_layers + depth - 1)
        self.final_layernorm = RMSNorm(config, ops, hidden)

    def forward(
        self, embedded_TH: Tensor, hidden_TH: Tensor, rotary_cos_sin: Rotary, params: PackedSeqParams
    ) -> Tensor:
        both = torch.cat([self.enorm(embedded_TH), self.hnorm(hidden_TH)], dim=-1)
        x_TH = self.eh_proj(both)
        y_TH: Tensor = self.final_layernorm(self.transformer_layer(x_TH, rotary_cos_sin, params))
        return y_TH


class MultiTokenPredictionBlock(nn.Module):
    """All depths, on the last stage, with the embedding and the output layer of the model.

    The loss is ``mtp_loss_scaling_factor`` times the mean over depths of each depth's loss: the mean over the tokens of
    the micro-batch, weighted by their loss mask, or their weighted sum when ``calculate_per_token_loss``. It enters the
    backward pass through the hidden state of the main model, at the scale that ``set_aux_loss_scale`` sets. A token has
    no loss at depth k when token i+k of its sequence does not exist or is padding: no sequence sees another. With full
    recompute only the input of each depth's layer and of its logits is kept.

    Sequences that share a prompt are whole here: each goes on behind it with a token of its own, which a depth reads at
    the prompt's last token already.

    With ``mtp_detach_encoder`` the loss trains the depths alone: hidden state, embedding and output layer are constants
    to it. The depths' gradients then have a norm of their own (``has_own_norm``), so that the main model is clipped and
    updated, to the bit, as without the loss.

    Differs from the paper: the hidden state of the main model and of each depth is taken behind its final norm (as
    upstream and the engines that speculate with these layers take it), and the mean counts the tokens that have a loss.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps) -> None:
        super().__init__()
        assert config.mtp_num_layers is not None, "multi-token prediction needs mtp_num_layers"
        self.config, self.groups = config, groups
        depths = range(1, config.mtp_num_layers + 1)
        self.layers = nn.ModuleList(MultiTokenPredictionLayer(config, groups, ops, depth) for depth in depths)
        if config.mtp_detach_encoder:
            for param in self.parameters():
                param.has_own_norm = True  # type: ignore[attr-defined]
        self.aux_loss_scaler = AuxLossScaler()
        self.loss_totals: Tensor | None = None  # [depths, 2] for the log: sum of losses, sum of weights

    def forward(
        self,
        hidden_TH: Tensor,
        input_ids_T: Tensor,
        labels_T: Tensor | None,
        loss_mask_W: Tensor | None,
        rotary_cos_sin: Rotary,
        params: PackedSeqParams,
        embed: Callable[[Tensor], Tensor],
        token_losses: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return hidden_TH [T/TP, H] unchanged, with the loss attached.

        labels_T: what the main model predicts at each token (None, as it must be where prompts are shared: the next
        token of its sequence) and loss_mask_W the weight of that prediction (None: 1). embed: ids [T] -> [T/TP, H];
        token_losses: ([T/TP, H], labels [T]) -> float32 [T].
        """
        before_TH = hidden_TH.detach() if self.config.mtp_detach_encoder else hidden_TH
        if params.shared_prompts is not None:
            assert labels_T is None, "a prompt that sequences share has no single label at its last token"
            given = (before_TH, input_ids_T, rotary_cos_sin, params)
            before_TH, input_ids_T, rotary_cos_sin, params = _whole_sequences(*given, self.groups)
        tokens = _TokensAhead(params, self.groups, input_ids_T.device)
        mask_T = torch.ones_like(input_ids_T, dtype=torch.float32)
        if loss_mask_W is not None:
            mask_T = F.pad(loss_mask_W.float(), (0, len(mask_T) - len(loss_mask_W)))
        if params.is_padding_T is not None:
            mask_T = mask_T.masked_fill(params.is_padding_T.to(mask_T.device), 0.0)
        losses, totals = [], []
        for depth, layer in enumerate(self.layers, start=1):
            ids_T, is_real_T = tokens.ahead(input_ids_T, depth)
            at_depth = replace(params, is_padding_T=~is_real_T, routing=None)  # rollouts have no such layers to replay
            embedded_TH = embed(ids_T).detach() if self.config.mtp_detach_encoder else embed(ids_T)
            before_TH = self._run(layer, embedded_TH, before_TH, rotary_cos_sin, at_depth)
            if labels_T is None:
                target_T, has_target_T = tokens.ahead(input_ids_T, depth + 1)
            else:
                target_T, has_target_T = tokens.ahead(labels_T, depth)
            weight_T = tokens.ahead(mask_T, depth)[0] * has_target_T
            if self.config.recompute_granularity == "full":  # a depth's logits are as large as the model's
                loss_T = checkpoint(token_losses, before_TH, target_T)
            else:
                loss_T = token_losses(before_TH, target_T)
            loss_T = loss_T.masked_fill(weight_T == 0, 0.0)  # a product would keep a NaN
            losses.append(self._loss(loss_T, weight_T))
            totals.append(torch.stack([(loss_T.detach() * weight_T).sum(), weight_T.sum()]))
        self.loss_totals = torch.stack(totals) + (0.0 if self.loss_totals is None else self.loss_totals)
        scale = self.config.mtp_loss_scaling_factor / len(losses)
        return self.aux_loss_scaler.attach(hidden_TH, scale * torch.stack(losses).sum())

    def _run(
        self, layer: nn.Module, embedded_TH: Tensor, hidden_TH: Tensor, rotary_cos_sin: Rotary, params: PackedSeqParams
    ) -> Tensor:
        arguments = (embedded_TH, hidden_TH, rotary_cos_sin, params)
        if self.config.recompute_granularity == "full":
            return checkpoint(layer, *arguments, recompute_context=lambda: without_counting(layer))
        y_TH: Tensor = layer(*arguments)
        return y_TH

    def _loss(self, loss_T: Tensor, weight_T: Tensor) -> Tensor:
        total = (loss_T * weight_T).sum()
        if self.config.calculate_per_token_loss:
            return total
        weight = weight_T.sum()
        collectives.all_reduce(weight, self.groups.cp)
        return total / weight.clamp(min=1e-9)


def collect_mtp_losses(model: nn.Module, config: TransformerConfig, groups: ProcessGroups) -> list[float]:
    """Mean loss of each depth over all tokens since the last call, without coefficient; the same on all ranks.

    Collective over dp_cp and pp; every rank calls it.
    """
    totals = torch.zeros(config.mtp_num_layers or 0, 2, device=next(model.parameters()).device)
    for block in model.modules():
        if isinstance(block, MultiTokenPredictionBlock) and block.loss_totals is not None:
            totals += block.loss_totals
            block.loss_totals = None
    for group in (groups.dp_cp, groups.pp):
        collectives.all_reduce(totals, group)
    return (totals[:, 0] / totals[:, 1].clamp(min=1e-9)).tolist()


def _whole_sequences(
    hidden_TH: Tensor, ids_T: Tensor, rotary_cos_sin: Rotary, params: PackedSeqParams, groups: ProcessGroups
) -> tuple[Tensor, Tensor, Rotary, PackedSeqParams]:
    """Give every sequence its own copy of the prompt that it shares; the gradients of the copies are summed.

    A dummy sequence at the end makes the tokens a multiple of TP.
    """
    assert params.shared_prompts is not None
    size, rank = groups.tp.size(), groups.tp.rank()
    num_tokens = len(params.shared_prompts.computed_F)
    num_dummy = -num_tokens % size
    computed_W = F.pad(params.shared_prompts.computed_F, (0, num_dummy))  # of the dummy any token
    is_padding_W, bounds = None, params.cu_seqlens
    if params.is_padding_T is not None:
        is_padding_W = params.is_padding_T[computed_W]
    if num_dummy:
        is_dummy_W = torch.arange(num_tokens + num_dummy, device=computed_W.device) >= num_tokens
        is_padding_W = is_dummy_W if is_padding_W is None else is_padding_W | is_dummy_W
        bounds = F.pad(bounds, (0, 1), value=num_tokens + num_dummy)
    mine = computed_W.chunk(size)[rank]
    whole_WH = gather_from_sequence_parallel_region(hidden_TH, groups.tp).index_select(0, mine)
    cos, sin = (x.index_select(0, computed_W) for x in rotary_cos_sin)
    whole = PackedSeqParams(bounds, max(params.max_seqlen, num_dummy), is_padding_W)
    return whole_WH, ids_T[computed_W], (cos, sin), whole


class _TokensAhead:
    """Per-token values [T] of later tokens in the same sequence, whichever context-parallel rank holds them."""

    def __init__(self, params: PackedSeqParams, groups: ProcessGroups, device: torch.device) -> None:
        self.group: dist.ProcessGroup = groups.cp
        self.device = device
        bounds = params.cu_seqlens.long().cpu()
        self.places_T = zigzag_indices(bounds, self.group.size(), self.group.rank())
        self.ends_T = bounds[torch.searchsorted(bounds, self.places_T, right=True)]
        self.rows = None
        if self.group.size() > 1:
            self.rows = ContextShard.of(params, self.group.size(), self.group.rank(), device).gathered_rows
        self.is_padding = None if params.is_padding_T is None else self._gather(params.is_padding_T.to(device))

    def ahead(self, values_T: Tensor, distance: int) -> tuple[Tensor, Tensor]:
        """Return values_T ``distance`` tokens ahead (0 without one), and bool [T]: there is a token, not padding."""
        target_T = self.places_T + distance
        exists_T = async_h2d(target_T < self.ends_T, self.device)
        index_T = async_h2d(torch.minimum(target_T, self.ends_T - 1), self.device)
        if self.is_padding is not None:
            exists_T = exists_T & ~self.is_padding[index_T]
        return self._gather(values_T)[index_T].masked_fill(~exists_T, 0), exists_T

    def _gather(self, values_T: Tensor) -> Tensor:
        """The values of all tokens, in the packed order."""
        if self.rows is None:
            return values_T
        return collectives.all_gather(values_T, self.group)[0][self.rows]
