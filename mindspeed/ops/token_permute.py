"""Sorting tokens by expert and putting them back, as one kernel each way.

Limits: float16, bfloat16 or float32; at most 512 choices of a token. The row map is the kernel's own: int32, the row
of choice k of token t at t*K + k. Tolerance: exact for the permutation, 1e-2 (bfloat16) and 1e-6 (float32) for
weighted sums. Backward: torch_npu's own (npu_moe_token_permute_grad, npu_moe_token_unpermute_grad).
"""

from __future__ import annotations

from torch import Tensor


def token_permute(tokens_TH: Tensor, indices_TK: Tensor) -> tuple[Tensor, Tensor]:
    """See ``megatron.core.ops.contract.TokenPermute``."""
    import torch_npu

    if tokens_TH.shape[0] == 0:  # a rank may get no token at all; kernels do not start on empty tensors
        return tokens_TH.reshape(0, tokens_TH.shape[1]), indices_TK.flatten().int()
    rows, row_map = torch_npu.npu_moe_token_permute(tokens_TH, indices_TK)
    return rows, row_map


def token_unpermute(rows: Tensor, row_map: Tensor, probs_TK: Tensor | None = None, topk: int = 1) -> Tensor:
    """See ``megatron.core.ops.contract.TokenUnpermute``; ``topk`` is read only when there are no probs."""
    import torch_npu

    if rows.shape[0] == 0:
        no_tokens = rows.reshape(0, rows.shape[1])
        return no_tokens if probs_TK is None else no_tokens + probs_TK.sum().to(rows.dtype)  # for probs' gradient
    if probs_TK is not None:
        weighted: Tensor = torch_npu.npu_moe_token_unpermute(rows, row_map, probs=probs_TK)
        return weighted
    by_choice: Tensor = torch_npu.npu_moe_token_unpermute(rows, row_map)
    return by_choice if topk == 1 else by_choice.unflatten(0, (-1, topk)).sum(1)
