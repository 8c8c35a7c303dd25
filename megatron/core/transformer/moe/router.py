"""The router: chooses the experts of each token and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron.core.ops import TrainOps
from megatron.core.ops.contract import RouterRule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.layers import MatmulProducts, linear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.weight_init import WeightInit
from megatron.core.transformer.moe.aux_loss import AuxLossScaler, MoEAuxLosses, TokenRows
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import async_h2d

GATE_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


class TopKRouter(nn.Module):
    """x [T/TP, H] -> (probs_TK float32, indices_TK int64, tokens_per_expert int64 [E] of this rank's tokens).

    The gate's matmul runs in ``moe_router_dtype``, everything after it in float32. ``expert_bias`` (float32,
    persistent; None without ``moe_router_enable_expert_bias``) only steers the choice. ``local_tokens_per_expert``
    (float32) adds up the counts of training passes, padding left out, until ``finalize_model_grads`` has used and
    zeroed it; ``is_counting`` is off while a layer is recomputed. ``aux_losses`` are attached to the probabilities.
    """

    expert_bias: Tensor | None
    local_tokens_per_expert: Tensor

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps, global_layer: int = 0) -> None:
        super().__init__()
        assert config.num_moe_experts is not None, "a router needs num_moe_experts"
        self.config = config
        self.num_experts = config.num_moe_experts
        self.groups = groups
        self.products, self.topk_router = MatmulProducts(ops.matmul), ops.topk_router
        self.rule = RouterRule(
            topk=config.moe_router_topk,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            score_function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            norm_topk_prob=config.moe_router_norm_topk_prob,
            scaling_factor=config.moe_router_topk_scaling_factor,
        )
        self.global_layer = global_layer
        self.is_counting = True
        self.aux_loss_scaler = AuxLossScaler()
        self.aux_losses = MoEAuxLosses(config, groups, self.aux_loss_scaler)
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=False, sequence_parallel=config.sequence_parallel)
        self.weight.requires_grad_(not config.freeze_moe_router)
        bias = torch.zeros(self.num_experts, dtype=torch.float32) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        counts = torch.zeros(self.num_experts, dtype=torch.float32)
        self.register_buffer("local_tokens_per_expert", counts, persistent=False)

    def forward(self, x_TH: Tensor, packed_seq_params: PackedSeqParams | None = None) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = self._gate(x_TH)
        probs_TK, indices_TK = self._route(logits_TE, self._replayed(logits_TE, packed_seq_params))
        counts_E = self._count(indices_TK)
        if self.training and torch.is_grad_enabled():
            rows = TokenRows.of(x_TH, packed_seq_params, self.groups, self.aux_losses.by_sequence)
            if self.is_counting:
                self.local_tokens_per_expert += (
                    self._count(indices_TK, rows.is_real_T) if rows.has_padding else counts_E
                )
            if self.aux_losses.is_on:
                probs_TK = self.aux_losses.attach(probs_TK, logits_TE, indices_TK, rows, self.is_counting)
        return probs_TK, indices_TK, counts_E

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill the gate with the tensor ``name``; the bias and the counts become zero."""
        with torch.no_grad():
            self.weight.copy_(init.normal(name, *self.weight.shape))
            self.local_tokens_per_expert.zero_()
            if self.expert_bias is not None:
                self.expert_bias.zero_()

    def _gate(self, x_TH: Tensor) -> Tensor:
        config = self.config
        dtype = self.weight.dtype if config.moe_router_dtype is None else GATE_DTYPES[config.moe_router_dtype]
        logits_TE = linear(x_TH.to(dtype), self.weight.to(dtype), self.products).float()
        return (
            _balanced_logits(logits_TE, config.moe_router_topk) if config.moe_router_force_load_balancing else logits_TE
        )

    def _replayed(self, logits_TE: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor | None:
        """Return the experts that the micro-batch replays, int64 [T/TP, K]; None without tracing or replay."""
        if packed_seq_params is None or packed_seq_params.routing is None:
            return None
        own_logits_TE = logits_TE.detach()
        chosen_TK = packed_seq_params.routing.choose(self.global_layer, lambda: self._route(own_logits_TE)[1])
        expected = (logits_TE.shape[0], self.config.moe_router_topk)
        if chosen_TK.shape != expected:
            raise ValueError(
                f"router replay of layer {self.global_layer}: choices of shape {tuple(chosen_TK.shape)} (tokens, "
                f"experts of each) for a pass with {expected}; it must be the same micro-batch in the same layout"
            )
        return async_h2d(chosen_TK, logits_TE.device)

    def _route(self, logits_TE: Tensor, chosen_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.topk_router(logits_TE, self.rule, self.expert_bias, chosen_TK)

    def _count(self, indices_TK: Tensor, is_real_T: Tensor | None = None) -> Tensor:
        """How often each expert was chosen, [E]: int64, or float32 of the real tokens only."""
        chosen = indices_TK.flatten()
        ones = torch.ones_like(chosen) if is_real_T is None else is_real_T.repeat_interleave(indices_TK.shape[1])
        # scatter_add_ where bincount would make the host wait for the device.
        return ones.new_zeros(self.num_experts).scatter_add_(0, chosen, ones)


@contextmanager
def without_counting(module: nn.Module) -> Iterator[None]:
    """Routers inside ``module`` do not count the tokens that they route again."""
    routers = [part for part in module.modules() if isinstance(part, TopKRouter)]
    for router in routers:
        router.is_counting = False
    try:
        yield
    finally:
        for router in routers:
            router.is_counting = True


def _balanced_logits(logits_TE: Tensor, topk: int) -> Tensor:
    """Logits that send token t to experts t*K .. t*K + K-1 (modulo E): every expert gets the same load."""
    num_tokens, num_experts = logits_TE.shape
    first_T = torch.arange(num_tokens, device=logits_TE.device) * topk
    chosen_TK = (first_T[:, None] + torch.arange(topk, device=logits_TE.device)) % num_experts
    far_apart = torch.full_like(logits_TE, -15.0).scatter(1, chosen_TK, 15.0)
    return far_apart + 0.0 * logits_TE  # the gate still gets a gradient
