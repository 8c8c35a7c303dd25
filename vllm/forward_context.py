"""The facts about the current step that every layer of a model reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm.ops.contract import DecodeMetadata, PrefillMetadata


@dataclass
class ForwardContext:
    """One step of T packed tokens of this rank: the decode tokens first, then the new tokens of each prefilling
    sequence.
    """

    num_tokens: int
    num_decode_tokens: int
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64, where each token's latent goes in the KV cache
    decode: DecodeMetadata | None  # None when there are no decode tokens
    prefill: PrefillMetadata | None
    dp_token_counts: list[int]  # T of every DP replica that shares experts with this one; [T] without
    # int64 [B], the tokens whose results are needed: for the other tokens the layer only writes the cache. Metadata and
    # token counts are then those of these tokens. None: all tokens.
    sampled_B: Tensor | None = None
    last_layer: ForwardContext | None = None  # what the last layer gets in place of this; None: this
    # int64 [T, K], the experts of this replica's tokens in each MoE layer that has run, if they are traced.
    routed_experts: list[Tensor] | None = None
