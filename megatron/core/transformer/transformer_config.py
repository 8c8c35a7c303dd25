"""What a model is: field names of core_v0.12.1 (the used subset), checked when made and never changed after."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelParallelConfig:
    """What every parallel model needs beside its process groups (which hold the sizes of the axes)."""

    sequence_parallel: bool = False  # must be True when TP > 1
    params_dtype: torch.dtype = torch.float32

    @property
    def pipeline_dtype(self) -> torch.dtype:
        """Dtype of the activations that travel between pipeline stages."""
        return self.params_dtype


@dataclass(frozen=True)
class TransformerConfig(ModelParallelConfig):
    """A decoder of dense and MoE layers: RMSNorm, SwiGLU, no biases, no dropout."""

    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    ffn_hidden_size: int = 0  # width of a dense layer's SwiGLU
    vocab_size: int = 0
    layernorm_epsilon: float = 1e-5
    init_method_std: float = 0.02
    calculate_per_token_loss: bool = False

    num_moe_experts: int | None = None
    moe_ffn_hidden_size: int | None = None  # width of one expert
    moe_shared_expert_intermediate_size: int | None = None  # width of all shared experts together
    moe_layer_freq: int | list[int] | tuple[int, ...] = 1  # n: every n-th layer is MoE; or one 0/1 per layer
    moe_router_topk: int = 2
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_norm_topk_prob: bool = True  # sigmoid scores only: weights of a token are made to sum to 1
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_force_load_balancing: bool = False  # benchmarks with random weights: the gate decides nothing
    moe_router_dtype: str = "fp32"
    moe_aux_loss_coeff: float = 0.0
    moe_shared_expert_overlap: bool = False  # compute the shared experts while tokens travel to the routed ones

    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ValueError("transformer config: " + "; ".join(problems))

    def is_moe_layer(self, layer: int) -> bool:
        """Whether global layer ``layer`` (0-based) has experts."""
        if self.num_moe_experts is None:
            return False
        if isinstance(self.moe_layer_freq, int):
            return layer % self.moe_layer_freq == 0
        return bool(self.moe_layer_freq[layer])

    def _problems(self) -> list[str]:
        found = [
            f"{name} is {getattr(self, name)}; it must be at least 1"
            for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size")
            if getattr(self, name) < 1
        ]
        if self.num_moe_experts is not None:
            found.extend(self._moe_problems(self.num_moe_experts))
        found.extend(self._recompute_problems())
        return found

    def _moe_problems(self, num_experts: int) -> list[str]:
        found = []
        if not self.moe_ffn_hidden_size:
            found.append(f"moe_ffn_hidden_size is {self.moe_ffn_hidden_size}; {num_experts} experts need a width")
        if not 1 <= self.moe_router_topk <= num_experts:
            found.append(f"moe_router_topk is {self.moe_router_topk}; it must be in 1..{num_experts} (num_moe_experts)")
        if not isinstance(self.moe_layer_freq, int) and len(self.moe_layer_freq) != self.num_layers:
            found.append(f"moe_layer_freq has {len(self.moe_layer_freq)} entries; num_layers is {self.num_layers}")
        if isinstance(self.moe_layer_freq, int) and self.moe_layer_freq < 1:
            found.append(f"moe_layer_freq is {self.moe_layer_freq}; it must be at least 1")
        if self.moe_router_score_function not in ("softmax", "sigmoid"):
            found.append(f"moe_router_score_function is {self.moe_router_score_function!r}; use 'softmax' or 'sigmoid'")
        if self.moe_router_enable_expert_bias and self.moe_router_score_function != "sigmoid":
            found.append("moe_router_enable_expert_bias needs moe_router_score_function 'sigmoid'")
        if self.moe_router_dtype != "fp32":
            found.append(f"moe_router_dtype is {self.moe_router_dtype!r}; only 'fp32' is supported")
        if self.moe_shared_expert_overlap and not self.moe_shared_expert_intermediate_size:
            found.append("moe_shared_expert_overlap needs shared experts (moe_shared_expert_intermediate_size)")
        if self.moe_aux_loss_coeff != 0:
            found.append(f"moe_aux_loss_coeff is {self.moe_aux_loss_coeff}; only 0 is supported (use the expert bias)")
        groups, group_topk = self.moe_router_num_groups, self.moe_router_group_topk
        if (groups is None) != (group_topk is None):
            found.append(f"moe_router_num_groups is {groups} and moe_router_group_topk {group_topk}; give both or none")
        elif groups is not None and group_topk is not None:
            if num_experts % groups:
                found.append(f"num_moe_experts {num_experts} is not a multiple of moe_router_num_groups {groups}")
            elif not 1 <= group_topk <= groups or group_topk * (num_experts // groups) < self.moe_router_topk:
                found.append(
                    f"moe_router_group_topk is {group_topk}; it must be in 1..{groups} and its groups must hold "
                    f"moe_router_topk {self.moe_router_topk} experts"
                )
        return found

    def _recompute_problems(self) -> list[str]:
        if self.recompute_granularity is None:
            return []
        found = []
        if self.recompute_granularity != "full":
            found.append(f"recompute_granularity is {self.recompute_granularity!r}; use None or 'full'")
        if self.recompute_method not in ("uniform", "block"):
            found.append(f"recompute_method is {self.recompute_method!r}; with granularity 'full' use uniform or block")
        if self.recompute_num_layers is None or self.recompute_num_layers < 1:
            found.append(f"recompute_num_layers is {self.recompute_num_layers}; it must be at least 1")
        return found


@dataclass(frozen=True)
class MLATransformerConfig(TransformerConfig):
    """A decoder with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) and YaRN rotary positions."""

    q_lora_rank: int | None = 512  # None: queries come straight from the hidden state
    kv_lora_rank: int = 512
    qk_head_dim: int = 128  # the part of a head without position
    qk_pos_emb_head_dim: int = 64  # the rotary part of a head
    v_head_dim: int = 128
    rope_type: str = "yarn"
    rotary_base: float = 10000.0
    rotary_scaling_factor: float = 40.0
    original_max_position_embeddings: int = 4096  # context of pre-training, which YaRN stretches
    max_position_embeddings: int = 4096  # longest sequence the model is served with
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.707
    mscale_all_dim: float = 0.707

    def _problems(self) -> list[str]:
        found = super()._problems()
        found.extend(
            f"{name} is {getattr(self, name)}; it must be at least 1"
            for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
            if getattr(self, name) < 1
        )
        if self.qk_pos_emb_head_dim % 2:
            found.append(f"qk_pos_emb_head_dim is {self.qk_pos_emb_head_dim}; rotary positions need an even size")
        if self.rope_type not in ("rope", "yarn"):
            found.append(f"rope_type is {self.rope_type!r}; use 'rope' or 'yarn'")
        return found
