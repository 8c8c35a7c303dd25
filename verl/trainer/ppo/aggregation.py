"""Token losses to one number: ``agg_loss`` of a whole batch, and the weights that give it in parts."""

from __future__ import annotations

from torch import Tensor

from verl.utils.masks import selected


def token_loss_weights(response_mask: Tensor, loss_agg_mode: str, *, num_tokens: float, num_sequences: float) -> Tensor:
    """Weights w [B, R] for which sum(w * loss) over every rank's rows is the aggregated loss of the mini-batch.

    Args:
        response_mask: fp32 [B, R], this rank's rows.
        loss_agg_mode: ``token-mean``, ``seq-mean-token-sum``, ``seq-mean-token-mean`` or ``seq-mean-token-sum-norm``
            (Dr. GRPO: token sums over the constant R, then the mean over sequences is left out as upstream does).
        num_tokens, num_sequences: response tokens and non-empty responses of the whole mini-batch over all ranks.
    """
    if loss_agg_mode == "token-mean":
        return response_mask / max(num_tokens, 1.0)
    if loss_agg_mode == "seq-mean-token-sum":
        return response_mask / max(num_sequences, 1.0)
    if loss_agg_mode == "seq-mean-token-mean":
        lengths = response_mask.sum(-1, keepdim=True).clamp(min=1.0)
        return response_mask / lengths / max(num_sequences, 1.0)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return response_mask / response_mask.shape[-1]
    raise ValueError(f"loss_agg_mode {loss_agg_mode!r} is not known")


def share_of_mini_batch(response_mask: Tensor, loss_agg_mode: str, *, num_tokens: float, num_sequences: float) -> float:
    """The factor with which ``agg_loss`` of these rows alone enters the aggregated loss of their mini-batch."""
    if loss_agg_mode == "token-mean":
        return float(response_mask.sum()) / max(num_tokens, 1.0)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return 1.0
    return float((response_mask.sum(-1) > 0).sum()) / max(num_sequences, 1.0)


def agg_loss(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str) -> Tensor:
    """A [B, R] loss to a scalar over the tokens of ``loss_mask``; see ``token_loss_weights`` for the modes.

    A loss outside the mask is not read, it may be NaN.
    """
    mask = loss_mask.to(loss_mat.dtype)
    weights = token_loss_weights(
        mask, loss_agg_mode, num_tokens=float(mask.sum()), num_sequences=float((mask.sum(-1) > 0).sum())
    )
    return (weights * selected(loss_mat, mask)).sum()
