"""What a model is: field names of core_v0.12.1 (the used subset), checked when made and never changed after."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The modules that selective recompute can run again in backward. The outputs of MLA's up-projections (and rotary
# positions), of the experts' activation function and of the norms are not kept at all; attention, the dense
# feed-forward block and the MoE layer keep only their input and output.
RECOMPUTE_MODULES = ("mla_up_proj", "core_attn", "moe_act", "layernorm", "mlp", "moe")


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
    """A decoder of dense and MoE layers: RMSNorm, SwiGLU, no dropout, no biases but ``add_qkv_bias``.

    Attention is grouped-query attention with rotary positions, or latent in ``MLATransformerConfig``.
    """

    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    ffn_hidden_size: int = 0  # width of a dense layer's SwiGLU
    vocab_size: int = 0
    layernorm_epsilon: float = 1e-5
    init_method_std: float = 0.02
    calculate_per_token_loss: bool = False
    share_embeddings_and_output_weights: bool = False  # the output layer multiplies with the embedding's weight

    num_query_groups: int | None = None  # heads of keys and values; None: as many as of queries
    kv_channels: int | None = None  # size of a head; None: hidden_size / num_attention_heads
    qk_layernorm: bool = False  # RMSNorm over each head of queries and keys
    add_qkv_bias: bool = False  # biases of queries, keys and values
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0  # share of a head's channels, the first ones, that positions turn
    rope_type: str = "rope"  # "yarn" and "llama3" stretch positions, see hf_formats/rope.py
    rotary_scaling_factor: float = 1.0
    original_max_position_embeddings: int = 4096  # context of pre-training, which is stretched
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    rope_low_freq_factor: float = 1.0  # llama3
    rope_high_freq_factor: float = 4.0
    rotary_interleaved: bool = False  # rotate neighbours; False: rotate element i with element i + size/2 (NeoX)
    cp_comm_type: str | None = None  # context parallelism: "p2p" (also None), "all_gather" or "a2a"
    cp_send_latents: bool = False  # latent attention: latents travel, and ranks make the keys and values they need

    mtp_num_layers: int | None = None  # depths of multi-token prediction; None: none
    mtp_loss_scaling_factor: float = 0.1  # weight of the mean of their losses; 0: the depths stay as they are
    mtp_detach_encoder: bool = False  # their losses train the depths alone, nothing of the main model

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
    moe_router_dtype: str | None = "fp32"  # of the gate's matmul: fp32, fp64, bf16; None: params_dtype. Scores: float32
    freeze_moe_router: bool = False  # gate and bias keep their values; the gradient still passes through the weights
    moe_router_load_balancing_type: str = "aux_loss"  # or "seq_aux_loss" (each sequence for itself), "none"
    moe_aux_loss_coeff: float = 0.0  # of the load balancing loss
    moe_z_loss_coeff: float | None = None
    moe_token_dispatcher_type: str = "alltoall"  # or "allgather", or "flex" (DeepEP, on NVIDIA devices)
    moe_shared_expert_overlap: bool = False  # compute the shared experts while tokens travel to the routed ones

    recompute_granularity: str | None = None  # None, "full" (whole layers) or "selective" (recompute_modules)
    recompute_method: str | None = None  # of "full": "uniform" or "block"
    recompute_num_layers: int | None = None  # of "full"
    recompute_modules: tuple[str, ...] = ("core_attn",)  # of "selective", see RECOMPUTE_MODULES

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ValueError("transformer config: " + "; ".join(problems))

    @property
    def multi_latent_attention(self) -> bool:
        """Whether the layers have latent attention; the class of the config says so."""
        return False

    @property
    def query_groups(self) -> int:
        """Heads of keys and values."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_size(self) -> int:
        """Size of one head of queries, keys and values (grouped-query attention)."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def rope_dim(self) -> int:
        """Channels of a head that rotary positions turn."""
        return round(self.head_size * self.rotary_percent)

    @property
    def softmax_head_size(self) -> int:
        """Width of a query or key head, whose root divides the scores."""
        return self.head_size

    @property
    def trains_mtp(self) -> bool:
        """Whether there are depths of multi-token prediction, and a loss for them."""
        return self.mtp_num_layers is not None and self.mtp_loss_scaling_factor > 0

    def is_moe_layer(self, layer: int) -> bool:
        """Whether global layer ``layer`` (0-based) has experts; layers of MTP are what the last layer is."""
        if self.num_moe_experts is None:
            return False
        layer = min(layer, self.num_layers - 1)
        if isinstance(self.moe_layer_freq, int):
            return layer % self.moe_layer_freq == 0
        return bool(self.moe_layer_freq[layer])

    def recomputes(self, module: str) -> bool:
        """Whether selective recompute is on for ``module``, one of ``RECOMPUTE_MODULES``; "moe" contains "moe_act"."""
        assert module in RECOMPUTE_MODULES, module
        if self.recompute_granularity != "selective" or (module == "moe_act" and "moe" in self.recompute_modules):
            return False
        return module in self.recompute_modules

    def _problems(self) -> list[str]:
        found = [
            f"{name} is {getattr(self, name)}; it must be at least 1"
            for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size")
            if getattr(self, name) < 1
        ]
        if self.num_moe_experts is not None:
            found.extend(self._moe_problems(self.num_moe_experts))
        found.extend(self._attention_problems())
        if self.rope_type not in ("rope", "yarn", "llama3"):
            found.append(f"rope_type is {self.rope_type!r}; use 'rope', 'yarn' or 'llama3'")
        if self.cp_comm_type not in (None, "p2p", "all_gather", "a2a"):
            found.append(f"cp_comm_type is {self.cp_comm_type!r}; use None, 'p2p', 'all_gather' or 'a2a'")
        if self.cp_send_latents and not self.multi_latent_attention:
            found.append("cp_send_latents is True; only latent attention (MLATransformerConfig) has latents")
        found.extend(self._recompute_problems())
        if self.mtp_num_layers is not None and self.mtp_num_layers < 1:
            found.append(f"mtp_num_layers is {self.mtp_num_layers}; it must be None or at least 1")
        return found

    def _attention_problems(self) -> list[str]:
        heads = self.num_attention_heads
        if heads < 1:
            return []  # already reported
        found = []
        if self.query_groups < 1 or heads % self.query_groups:
            found.append(f"num_query_groups is {self.query_groups}; it must divide num_attention_heads {heads}")
        if self.kv_channels is None and self.hidden_size % heads:
            found.append(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {heads}; give kv_channels"
            )
        elif self.rope_dim % 2 or not 0 < self.rotary_percent <= 1:
            found.append(
                f"kv_channels is {self.head_size} and rotary_percent {self.rotary_percent}; rotary positions need an "
                "even number of a head's channels"
            )
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
        for name, choices in (
            ("moe_router_dtype", (None, "fp32", "fp64", "bf16")),
            ("moe_router_load_balancing_type", ("aux_loss", "seq_aux_loss", "none")),
            ("moe_token_dispatcher_type", ("alltoall", "allgather", "flex")),
        ):
            if getattr(self, name) not in choices:
                found.append(f"{name} is {getattr(self, name)!r}; use one of {', '.join(map(repr, choices))}")
        if self.moe_shared_expert_overlap and self.moe_token_dispatcher_type == "allgather":
            found.append("moe_shared_expert_overlap needs moe_token_dispatcher_type 'alltoall' or 'flex'")
        if self.moe_token_dispatcher_type == "flex" and self.params_dtype != torch.bfloat16:
            found.append("moe_token_dispatcher_type 'flex' (DeepEP) needs params_dtype bfloat16")
        if self.moe_shared_expert_overlap and not self.moe_shared_expert_intermediate_size:
            found.append("moe_shared_expert_overlap needs shared experts (moe_shared_expert_intermediate_size)")
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            if (getattr(self, name) or 0) < 0:
                found.append(f"{name} is {getattr(self, name)}; it must not be negative")
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
        if self.recompute_granularity == "selective":
            unknown = [name for name in self.recompute_modules if name not in RECOMPUTE_MODULES]
            found = [
                f"recompute_modules has {name!r}; the modules are {', '.join(RECOMPUTE_MODULES)}" for name in unknown
            ]
            if "mla_up_proj" in self.recompute_modules and not self.multi_latent_attention:
                found.append("recompute_modules has 'mla_up_proj', but attention is not latent")
            if self.num_moe_experts is None:
                of_experts = [name for name in self.recompute_modules if name in ("moe", "moe_act")]
                found.extend(f"recompute_modules has {name!r}, but the model has no experts" for name in of_experts)
            return found
        found = []
        if self.recompute_granularity != "full":
            found.append(f"recompute_granularity is {self.recompute_granularity!r}; use None, 'selective' or 'full'")
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
    max_position_embeddings: int = 4096  # longest sequence the model is served with
    rope_type: str = "yarn"
    rotary_scaling_factor: float = 40.0
    mscale: float = 0.707
    mscale_all_dim: float = 0.707

    @property
    def multi_latent_attention(self) -> bool:
        return True

    @property
    def rope_dim(self) -> int:
        return self.qk_pos_emb_head_dim

    @property
    def softmax_head_size(self) -> int:
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    def _attention_problems(self) -> list[str]:
        return []

    def _problems(self) -> list[str]:
        found = super()._problems()
        found.extend(
            f"{name} is {getattr(self, name)}; it must be at least 1"
            for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
            if getattr(self, name) < 1
        )
        if self.qk_pos_emb_head_dim % 2:
            found.append(f"qk_pos_emb_head_dim is {self.qk_pos_emb_head_dim}; rotary positions need an even size")
        return found
