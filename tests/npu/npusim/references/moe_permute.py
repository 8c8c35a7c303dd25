"""Sorting tokens by expert and back, after "torch_npu.npu_moe_token_permute" and "torch_npu.npu_moe_token_unpermute" of
the Ascend documentation.

``sorted_indices[t K + k]`` is the row of choice k of token t. Simplified: no padded mode; sums in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npusim.reference import reference
from npusim.references.checks import require, require_floats

MAX_CHOICES = 512


@reference("npu_moe_token_permute")
def moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """tokens [T, H], indices [T, K] or [T] -> rows [T * K, H] by expert, the tokens of each in order; int32 row map."""
    op = "npu_moe_token_permute"
    require(not padded_mode, op, "padded mode is not simulated")
    require(indices.dtype in (torch.int32, torch.int64), op, f"indices of {indices.dtype}")
    require(tokens.numel() > 0 and len(tokens) == len(indices), op, "wants tokens, and a row of indices for each")
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    require(choices <= MAX_CHOICES, op, f"{choices} choices, at most {MAX_CHOICES}")
    choice_of_row = indices.flatten().sort(stable=True).indices
    row_of_choice = torch.empty(indices.numel(), dtype=torch.int32)
    row_of_choice[choice_of_row] = torch.arange(indices.numel(), dtype=torch.int32)
    rows = tokens[choice_of_row // choices]
    return rows if not num_out_tokens else rows[:num_out_tokens], row_of_choice


@reference("npu_moe_token_permute_grad")
def moe_token_permute_grad(
    tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor, padded_mode: bool = False
) -> Tensor:
    """Each token's gradient: the sum over its rows."""
    choices = sorted_indices.numel() // len(tokens)
    return moe_token_permute_grad_v2(
        grad_permuted_tokens, sorted_indices, len(tokens), tokens.dtype, choices, padded_mode
    )


@reference("npu_moe_token_permute_grad_v2")
def moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    padded_mode: bool = False,
) -> Tensor:
    """The same from the sizes of what the forward op was given; torch_npu 2.13's backward."""
    require(not padded_mode, "npu_moe_token_permute_grad", "padded mode is not simulated")
    grad = torch.zeros(tokens_size_0, grad_permuted_tokens.shape[1], dtype=torch.float64)
    rows = sorted_indices.long()
    tokens_of_choices = torch.arange(len(rows)) // num_topK
    is_kept = rows < len(grad_permuted_tokens)
    grad.index_add_(0, tokens_of_choices[is_kept], grad_permuted_tokens[rows[is_kept]].double())
    return grad.to(tokens_dtype)


@reference("npu_moe_token_unpermute")
def moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """rows [T * K, H], probs [T, K] -> ``out[t] = sum_k probs[t, k] rows[sorted_indices[t K + k]]``, or K = 1."""
    op = "npu_moe_token_unpermute"
    require(not padded_mode and restore_shape is None, op, "padded mode is not simulated")
    require_floats(op, permuted_tokens)
    require(sorted_indices.dtype == torch.int32 and permuted_tokens.numel() > 0, op, "wants rows and int32 indices")
    rows = permuted_tokens[sorted_indices.long()]
    if probs is None:
        return rows
    require(probs.shape[0] * probs.shape[1] == len(rows), op, f"probs of {tuple(probs.shape)} for {len(rows)} rows")
    return (rows.double().unflatten(0, probs.shape) * probs.double().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)


@reference("_npu_moe_token_unpermute")
def moe_token_unpermute_for_training(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, None]:
    """What torch_npu 2.13's autograd calls: the same, and the rows that the backward op will want."""
    return moe_token_unpermute(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape), None


@reference("npu_moe_token_unpermute_grad")
def moe_token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the rows, and of probs when there are any."""
    return moe_token_unpermute_grad_v2(
        grad_unpermuted_tokens,
        sorted_indices,
        len(permuted_tokens),
        permuted_tokens.dtype,
        probs,
        padded_mode,
        restore_shape,
        permuted_tokens,
    )


@reference("npu_moe_token_unpermute_grad_v2")
def moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
    permuted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same from the sizes of what the forward op was given; torch_npu 2.13's backward."""
    require(not padded_mode and restore_shape is None, "npu_moe_token_unpermute_grad", "padded mode is not simulated")
    rows = sorted_indices.long()
    choices = 1 if probs is None else probs.shape[1]
    by_choice = grad_unpermuted_tokens.double().repeat_interleave(choices, 0)
    grad_rows = torch.zeros(permuted_tokens_size_0, by_choice.shape[1], dtype=torch.float64)
    grad_rows[rows] = by_choice if probs is None else by_choice * probs.double().reshape(-1, 1)
    if probs is None:
        return grad_rows.to(permuted_tokens_dtype), None
    assert permuted_tokens is not None
    grad_probs = (permuted_tokens[rows].double() * by_choice).sum(-1).view(probs.shape)
    return grad_rows.to(permuted_tokens_dtype), grad_probs.to(probs.dtype)
