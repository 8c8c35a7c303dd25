"""What the decode ops share: attention of one new token per sequence over the pages of a cache, as one kernel, or with
a mask where they gather the pages.

The kernel takes sequence lengths from the host, which are updated beside each replay of a captured step; the mask is
computed from those on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import DecodeMetadata
from vllm_ascend.compilation.acl_graph import TaskUpdates


def paged_attention(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: DecodeMetadata,
    scale: float,
    *,
    num_heads: int,
    num_kv_heads: int,
    layout: str,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
) -> Tensor:
    """Outputs in the shape of `query`, which has one query of each sequence in `layout` (torch_npu's name for it).

    query_rope and key_rope are the channels with position, where they are tensors of their own.
    """
    import torch_npu

    if meta.renewals is None:
        out: Tensor = torch_npu.npu_fused_infer_attention_score(
            query,
            k_pages,
            v_pages,
            query_rope=query_rope,
            key_rope=key_rope,
            num_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            input_layout=layout,
            scale=scale,
            block_table=meta.block_tables,
            block_size=meta.block_size,
            actual_seq_lengths_kv=meta.seq_lens_host.tolist(),
        )[0]
        return out
    if "paged_workspace" not in meta.scratch:  # the layers run one after the other, so they share it
        meta.scratch["paged_workspace"] = torch_npu._npu_fused_infer_attention_score_get_max_workspace(
            query,
            k_pages,
            v_pages,
            query_rope=query_rope,
            key_rope=key_rope,
            num_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            input_layout=layout,
            scale=scale,
            block_table=meta.block_tables,
            block_size=meta.block_size,
            actual_seq_lengths_kv=[meta.block_tables.shape[1] * meta.block_size] * len(query),
        )
    workspace, output, no_lse = meta.scratch["paged_workspace"], torch.empty_like(query), query.new_empty(1)

    def launch() -> None:
        torch_npu.npu_fused_infer_attention_score.out(
            query,
            k_pages,
            v_pages,
            query_rope=query_rope,
            key_rope=key_rope,
            num_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            input_layout=layout,
            scale=scale,
            block_table=meta.block_tables,
            block_size=meta.block_size,
            actual_seq_lengths_kv=meta.seq_lens_host.tolist(),
            workspace=workspace,
            out=[output, no_lse],
        )

    if "task_updates" not in meta.scratch:
        meta.scratch["task_updates"] = TaskUpdates()
        meta.renewals.append(meta.scratch["task_updates"].renew)
    meta.scratch["task_updates"].capture(launch)
    return output


def gathered_attention(q_BND: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, meta: DecodeMetadata, scale: float) -> Tensor:
    """[B, N, D]: each sequence's query attends to its gathered pages, S tokens of which the last ones may be masked."""
    import torch_npu

    if "is_out_of_sight" not in meta.scratch:  # bool [B, 1, 1, S], the same in all layers
        positions_S = torch.arange(k_BGSD.shape[2], device=meta.seq_lens.device)
        meta.scratch["is_out_of_sight"] = (positions_S >= meta.seq_lens.unsqueeze(1))[:, None, None, :]
    out_BN1D: Tensor = torch_npu.npu_fusion_attention(
        q_BND.unsqueeze(2),
        k_BGSD,
        v_BGSD,
        q_BND.shape[1],
        "BNSD",
        atten_mask=meta.scratch["is_out_of_sight"],
        scale=scale,
    )[0]
    return out_BN1D.squeeze(2)
