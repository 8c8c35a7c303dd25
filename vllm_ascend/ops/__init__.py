"""The op table of the rollout engine on Ascend; one file per op."""

from __future__ import annotations

from vllm.ops.contract import RolloutOps
from vllm.ops.reference import linear
from vllm_ascend.ops.exchanged_experts import ExchangedExperts
from vllm_ascend.ops.fused_experts import fused_experts
from vllm_ascend.ops.gqa_cache import new_gqa_cache, rope_write_gqa
from vllm_ascend.ops.gqa_decode import gqa_decode
from vllm_ascend.ops.gqa_prefill import GqaPrefill
from vllm_ascend.ops.head_linear import head_linear
from vllm_ascend.ops.kv_cache import new_kv_cache, norm_rope_write_kv
from vllm_ascend.ops.mla_decode import mla_decode
from vllm_ascend.ops.mla_prefill import MlaPrefill
from vllm_ascend.ops.rms_norm import add_rms_norm, rms_norm
from vllm_ascend.ops.rotary import rotary_interleaved
from vllm_ascend.ops.sample import sample
from vllm_ascend.ops.second_stream import SecondStream
from vllm_ascend.ops.silu_and_mul import silu_and_mul
from vllm_ascend.ops.topk_router import topk_router

# Entries that are partly the reference. Products are torch's own ops, which are the device's (aclnnMatmul,
# aclnnBatchMatMul).
MIXED = {"topk_router": "native (softmax scores: reference)", "sample": "native top-k and top-p, reference draw"}


def rollout_ops() -> RolloutOps:
    """The Ascend table (provider ``vllm_ascend.ops:rollout_ops``); nothing touches a device before an op is called."""
    return RolloutOps(
        new_kv_cache=new_kv_cache,
        linear=linear,
        head_linear=head_linear,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary_interleaved=rotary_interleaved,
        norm_rope_write_kv=norm_rope_write_kv,
        mla_decode=mla_decode,
        mla_prefill=MlaPrefill(),
        new_gqa_cache=new_gqa_cache,
        rope_write_gqa=rope_write_gqa,
        gqa_decode=gqa_decode,
        gqa_prefill=GqaPrefill(),
        topk_router=topk_router,
        fused_experts=fused_experts,
        exchanged_experts=ExchangedExperts(),
        silu_and_mul=silu_and_mul,
        sample=sample,
        implementations=dict.fromkeys(RolloutOps.entries(), "native") | MIXED,
        copies_strided_weights=True,
        run_beside=SecondStream(),
    )
