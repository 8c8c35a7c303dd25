"""One pipeline stage of a decoder-only language model over packed tokens, or its chunks in virtual stages.

Letters: T packed tokens (all sequences of a micro-batch, a multiple of TP), W the same with a copy of a shared prompt
for each of its sequences, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.ops import TrainOps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import OutputLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.weight_init import WeightInit, init_weights
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.rotary import RotaryEmbedding
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


class LanguageModelEmbedding(nn.Module):
    """Token ids [T] -> [T/TP, H]; positions enter in the attention."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroups) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(config, groups, config.vocab_size, config.hidden_size)

    def forward(self, input_ids_T: Tensor) -> Tensor:
        hidden_TH: Tensor = self.word_embeddings(input_ids_T)
        return hidden_TH


class GPTModel(nn.Module):
    """Embedding (first stage), this stage's layers, output layer and multi-token prediction (last stage).

    ``pre_process`` and ``post_process`` say whether the embedding and the output layer are here. With virtual
    stages the model is chunk ``vp_stage`` of its stage (``ModelChunks`` holds them all): the embedding is in the first
    chunk of the first stage, the output layer in the last chunk of the last. The constructor does not initialise
    weights: call ``init_weights`` or load them.

    With ``share_embeddings_and_output_weights`` the output layer multiplies with the embedding's weight, and
    multi-token prediction embeds with it. Where the embedding is on another stage, the last one has a copy under
    upstream's name (``output_layer.weight``, with MTP ``embedding.word_embeddings.weight``). Both are marked
    ``shared_embedding``, the copy also ``shared`` (it does not count in norms); ``finalize_model_grads`` adds up their
    gradients, so that they stay equal. Without a copy too, the embedding of several stages is ``alone`` in its buffer:
    norms then add up in one order with and without multi-token prediction.
    """

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps, vp_stage: int | None = None
    ) -> None:
        super().__init__()
        _check(config, groups, vp_stage)
        self.config = config
        self.groups = groups
        self.ops = ops
        if ops.tensor_parallel_overlap is not None and groups.tp.size() > 1:
            ops.tensor_parallel_overlap.prepare(groups.tp)
        self.vp_stage = vp_stage or 0
        is_last_chunk = self.vp_stage == groups.layout.virtual_pipeline_model_parallel_size - 1
        self.pre_process = groups.is_first_stage and self.vp_stage == 0
        self.post_process = groups.is_last_stage and is_last_chunk
        self._input_tensor: Tensor | None = None
        has_mtp = self.post_process and config.mtp_num_layers is not None
        if self.pre_process or has_mtp:
            self.embedding = LanguageModelEmbedding(config, groups)
        self.rotary_pos_emb = RotaryEmbedding(config)
        self.decoder = TransformerBlock(config, groups, ops, post_layer_norm=self.post_process, vp_stage=self.vp_stage)
        self.is_output_tied = self.post_process and config.share_embeddings_and_output_weights
        if self.post_process:
            self.output_layer = OutputLinear(
                config,
                groups,
                replace(ops, linear_products=None),
                config.hidden_size,
                config.vocab_size,
                has_weight=not (self.is_output_tied and (self.pre_process or has_mtp)),
            )
        self.mtp = MultiTokenPredictionBlock(config, groups, ops) if has_mtp else None
        if self.mtp is not None:
            self.mtp.requires_grad_(config.trains_mtp)  # else it needs no gradients and no optimizer state
        self._mark_shared_embedding()

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """The embedding's weight, or the copy of it that this stage has; None on the stages between."""
        if self.pre_process or self.mtp is not None:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.is_output_tied else None

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        packed_seq_params: PackedSeqParams,
        labels_T: Tensor | None = None,
        loss_mask_W: Tensor | None = None,
        scored_S: Tensor | None = None,
    ) -> Tensor:
        """All TP ranks pass the same T ids (T a multiple of TP: append a dummy sequence to ``cu_seqlens``).

        Last stage: logits [T, V/TP] in the params dtype, or with labels the loss float32 [T]. Other stages: the hidden
        state [T/TP, H]. Stages after the first read theirs from ``set_input_tensor``.

        scored_S: int64, the S of the T tokens whose logits are wanted; then these are [S, V/TP]. Reinforcement learning
        scores no prediction inside a prompt.

        In training the losses of multi-token prediction are attached to the result (``MultiTokenPredictionBlock``);
        loss_mask_W, the weight of each token's own prediction, is for them only: the caller weights the main loss.
        """
        tp_size = self.groups.tp.size()
        assert input_ids_T.shape[0] % tp_size == 0, f"{input_ids_T.shape[0]} tokens are not a multiple of TP {tp_size}"
        if self.pre_process:
            hidden_TH = self.embedding(input_ids_T)
        else:
            assert self._input_tensor is not None, "set_input_tensor must come before forward on a later stage"
            hidden_TH, self._input_tensor = self._input_tensor, None
        rotary_cos_sin = self.rotary_pos_emb(position_ids_T)
        hidden_TH = self.decoder(hidden_TH, rotary_cos_sin, packed_seq_params)
        if not self.post_process:
            return hidden_TH
        if self.mtp is not None and self.config.trains_mtp and self.training and torch.is_grad_enabled():
            inputs = (hidden_TH, input_ids_T, labels_T, loss_mask_W, rotary_cos_sin, packed_seq_params)
            losses = partial(self._token_losses, trains_output=not self.config.mtp_detach_encoder)
            hidden_TH = self.mtp(*inputs, embed=self.embedding, token_losses=losses)
        if labels_T is not None:
            return self._token_losses(hidden_TH, labels_T)
        if scored_S is None:
            return self._logits(hidden_TH)
        if not len(scored_S):  # not every device has a product of no rows, so it is one row, which is cut off
            return self._logits(hidden_TH, scored_S.new_zeros(1))[:0]
        return self._logits(hidden_TH, scored_S)

    def _logits(self, hidden_TH: Tensor, rows_S: Tensor | None = None, trains_output: bool = True) -> Tensor:
        weight = self.shared_embedding_or_output_weight() if self.is_output_tied else self.output_layer.weight
        assert weight is not None
        logits: Tensor = self.output_layer(hidden_TH, weight if trains_output else weight.detach(), rows_S)
        return logits

    def _token_losses(self, hidden_TH: Tensor, labels_T: Tensor, trains_output: bool = True) -> Tensor:
        logits = self._logits(hidden_TH, trains_output=trains_output)
        return vocab_parallel_cross_entropy(logits, labels_T, self.groups.tp, self.ops)

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Set the hidden state [T/TP, H] of the previous stage for the next ``forward``; the first stage ignores it."""
        self._input_tensor = None if self.pre_process else input_tensor

    def init_weights(self, seed: int) -> None:
        """Draw matrices from normal(0, ``init_method_std``), norms one, biases zero; equal in every layout."""
        init = WeightInit(seed, self.config.init_method_std)
        for name, child in self.named_children():
            is_copy = name == "output_layer" and self.is_output_tied
            init_weights(child, init, "embedding.word_embeddings" if is_copy else name)

    def _mark_shared_embedding(self) -> None:
        is_needed_last = self.config.share_embeddings_and_output_weights or self.config.mtp_num_layers is not None
        weight = self.shared_embedding_or_output_weight()
        if weight is None or (self.pre_process and self.post_process):
            return
        weight.alone = True  # type: ignore[attr-defined]
        if not is_needed_last:
            return
        weight.shared_embedding = True  # type: ignore[attr-defined]
        weight.shared = not self.pre_process  # type: ignore[attr-defined]


class ModelChunks(nn.Module):
    """Chunk v of every stage runs before chunk v + 1 of any; parameters are named ``chunks.{v}.`` + the chunk's name.

    The module has no forward of its own: the interleaved schedule calls one chunk at a time (``model_chunks``).
    """

    def __init__(self, chunks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        assert len(self.chunks) > 1, "one chunk is a plain model"
        self.config: Any = self.chunks[0].config

    def init_weights(self, seed: int) -> None:
        """Initialise every chunk; every layout gives the same model."""
        for chunk in self.chunks:
            chunk.init_weights(seed)  # type: ignore[operator]


def make_gpt_model(config: TransformerConfig, groups: ProcessGroups, ops: TrainOps) -> GPTModel | ModelChunks:
    """This rank's part of the model: one GPTModel, or one for each virtual stage."""
    num_chunks = groups.layout.virtual_pipeline_model_parallel_size
    if num_chunks == 1:
        return GPTModel(config, groups, ops)
    return ModelChunks(GPTModel(config, groups, ops, vp_stage=chunk) for chunk in range(num_chunks))


def model_chunks(module: nn.Module) -> Sequence[nn.Module]:
    """Return the modules that the schedules call: the chunks inside ``module`` and its wrappers, or ``module``."""
    inner = module
    while not isinstance(inner, ModelChunks) and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module  # type: ignore[assignment]
    return list(inner.chunks) if isinstance(inner, ModelChunks) else [module]


def _check(config: TransformerConfig, groups: ProcessGroups, vp_stage: int | None) -> None:
    problems = layout_problems(config, groups.layout)
    num_chunks = groups.layout.virtual_pipeline_model_parallel_size
    if vp_stage not in range(num_chunks) and not (vp_stage is None and num_chunks == 1):
        problems.append(
            f"vp_stage is {vp_stage}; virtual_pipeline_model_parallel_size {num_chunks} needs one of "
            f"0..{num_chunks - 1} (make_gpt_model makes all chunks of a rank)"
        )
    if problems:
        raise ValueError("model and layout do not fit: " + "; ".join(problems))


def layout_problems(config: TransformerConfig, layout: ParallelLayout) -> list[str]:
    """Return one sentence for each reason why the model does not fit the layout; needs no process group."""
    problems = layout.problems(config.num_layers, config.num_moe_experts, config.num_attention_heads, config.vocab_size)
    tp_size = layout.tensor_model_parallel_size
    if tp_size > 1 and not config.sequence_parallel:
        problems.append(f"sequence_parallel is False; tensor_model_parallel_size {tp_size} needs it to be True")
    down: dict[str, int | None] = {}
    if isinstance(config, MLATransformerConfig):
        down["kv_lora_rank + qk_pos_emb_head_dim"] = config.kv_lora_rank + config.qk_pos_emb_head_dim
        down["q_lora_rank"] = config.q_lora_rank
    elif layout.mla_down_proj_column_parallel:
        problems.append("mla_down_proj_column_parallel is True; only latent attention has down-projections")
    problems += layout.width_problems(
        {name: getattr(config, name) for name in ("ffn_hidden_size", "moe_shared_expert_intermediate_size")},
        {"moe_ffn_hidden_size": config.moe_ffn_hidden_size},
        down,
        {} if config.multi_latent_attention else {"num_query_groups": config.query_groups},
    )
    return problems + _head_problems(config, tp_size, layout.context_parallel_size)


def _head_problems(config: TransformerConfig, tp_size: int, cp_size: int) -> list[str]:
    """Return the reasons why heads do not divide over TP and, with ``cp_comm_type`` "a2a", over CP."""
    if cp_size == 1 or config.cp_comm_type != "a2a":
        return []
    found = []
    heads, groups = config.num_attention_heads, config.query_groups
    if heads % (tp_size * cp_size):
        found.append(
            f"num_attention_heads {heads} does not divide over tensor_model_parallel_size {tp_size} times "
            f"context_parallel_size {cp_size}, as cp_comm_type 'a2a' needs; use 'p2p' or 'all_gather'"
        )
    groups_here = max(1, groups // tp_size)
    if not config.multi_latent_attention and groups_here % cp_size and cp_size % groups_here:
        found.append(
            f"num_query_groups {groups}: {groups_here} of a tensor-parallel rank neither divide over "
            f"context_parallel_size {cp_size} nor divide it; use cp_comm_type 'p2p' or 'all_gather'"
        )
    return found
