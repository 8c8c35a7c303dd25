"""The op table of the training engine on Ascend; one file per op that needs code of its own there."""

from __future__ import annotations

from functools import partial

from megatron.core.ops.contract import TrainOps
from megatron.core.ops.fused_adamw import adamw_step
from megatron.core.ops.reference import cross_entropy_grad, log_sum_exp, matmul, reference_ops
from mindspeed.ops.fusion_attention import FusionAttention
from mindspeed.ops.gating_topk import topk_router
from mindspeed.ops.grouped_matmul import grouped_matmul
from mindspeed.ops.rms_norm import rms_norm
from mindspeed.ops.rotary import rotary_interleaved
from mindspeed.ops.swiglu import swiglu
from mindspeed.ops.token_permute import token_permute, token_unpermute


def train_ops(mla_fa_without_pad: bool = False, gemm_gradient_accumulation_fusion: bool = True) -> TrainOps:
    """The Ascend table (provider ``mindspeed.ops:train_ops``); nothing touches a device before an op is called.

    mla_fa_without_pad: values narrower than keys go to the attention kernel as they are, which old CANN refuses ·
    gemm_gradient_accumulation_fusion: experts' weight gradients are added to float32 sums by the kernel that computes
    them. Both are MindSpeed's names.
    """
    attention = FusionAttention(pads_values=not mla_fa_without_pad)
    names = dict.fromkeys(reference_ops().names, "native")
    if mla_fa_without_pad:
        names |= dict.fromkeys(
            ("core_attention", "attention_block", "attention_block_grad"), "native (without padding)"
        )
    if gemm_gradient_accumulation_fusion:
        names["grouped_matmul"] = "native (adds half-precision weight gradients in float32: npu_grouped_matmul_add_)"
    names |= dict.fromkeys(("log_sum_exp", "cross_entropy_grad"), "reference")
    names["topk_router"] = "native choice for sigmoid scores, reference for softmax"
    return TrainOps(
        rms_norm=rms_norm,
        swiglu=swiglu,
        rotary_interleaved=rotary_interleaved,
        core_attention=attention,
        attention_block=attention.block,
        attention_block_grad=attention.block_grad,
        matmul=matmul,  # torch_npu runs torch's own on the cube unit, and reads transposed operands as they lie
        grouped_matmul=partial(grouped_matmul, adds_to_main_grad=gemm_gradient_accumulation_fusion),
        token_permute=token_permute,
        token_unpermute=token_unpermute,
        topk_router=topk_router,
        log_sum_exp=log_sum_exp,
        cross_entropy_grad=cross_entropy_grad,
        adamw_step=adamw_step,
        names=names,
    )


__all__ = ["train_ops"]
