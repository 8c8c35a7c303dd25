"""Reference MLA attention over a paged latent cache: gather each sequence's pages, padded, then batched matrix
products.

Sequences of a step are handled together when their lengths are alike and in groups of like lengths otherwise, so that
padding costs at most about twice the real work. S is the padded context length of a group, Q its padded query length, D
= L + R.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.contract import DecodeMetadata, KVCache, PrefillMetadata, Queries

MAX_PADDING_RATIO = 2.0


@dataclass
class DecodeGroup:
    rows: Tensor | None  # int64 [b] rows of the step, None = all of them in order
    blocks: Tensor  # [b, n] block ids
    mask: Tensor  # [b, 1, S] 0 or -inf
    pages: Tensor  # [b * n, block_size * D] workspace, shared by the layers of the step


@dataclass
class PrefillGroup:
    tokens: Tensor  # int64 [b * Q], each padded query among the step's new tokens; padding repeats the last one
    keep: Tensor | None  # int64 indices into b * Q of the real queries, None = all
    blocks: Tensor  # [b, n]
    mask: Tensor  # [b, 1, Q, S] 0 or -inf

    def write(self, out: Tensor, results: Tensor) -> None:
        """Write the results of the padded queries, [b * Q, ...], to their tokens' rows of `out`."""
        if self.keep is None:
            out[self.tokens] = results
        else:
            out[self.tokens[self.keep]] = results[self.keep]


def split_by_cost(costs: np.ndarray) -> list[np.ndarray]:
    """Indices in groups whose padded total (count * max) stays within MAX_PADDING_RATIO of the real one, or like
    powers of 2.
    """
    if len(costs) * int(costs.max()) <= MAX_PADDING_RATIO * int(costs.sum()):
        return [np.arange(len(costs))]
    exponents = np.ceil(np.log2(np.maximum(costs, 1))).astype(np.int64)
    return [np.flatnonzero(exponents == e) for e in np.unique(exponents)]


def _context_mask(lens: Tensor, num_positions: int, dtype: torch.dtype) -> Tensor:
    """[b, S] 0 where position < length, -inf elsewhere."""
    positions = torch.arange(num_positions, device=lens.device)
    return torch.zeros(len(lens), num_positions, dtype=dtype, device=lens.device).masked_fill_(
        positions >= lens[:, None], float("-inf")
    )


def plan_decode(meta: DecodeMetadata, pages: Tensor) -> list[DecodeGroup]:
    """The step's sequences in groups, with room for the pages [num_blocks, block_size, channels] of each."""
    num_blocks = -(-meta.seq_lens_host // meta.block_size)
    split = split_by_cost(num_blocks)
    groups = []
    for host_rows in split:
        rows = None if len(split) == 1 else torch.from_numpy(host_rows).to(pages.device)
        tables = meta.block_tables if rows is None else meta.block_tables[rows]
        lens = meta.seq_lens if rows is None else meta.seq_lens[rows]
        width = int(num_blocks[host_rows].max())
        mask = _context_mask(lens, width * meta.block_size, pages.dtype)[:, None]
        workspace = pages.new_empty(len(host_rows) * width, meta.block_size * pages.shape[-1])
        groups.append(DecodeGroup(rows, tables[:, :width].contiguous(), mask, workspace))
    return groups


def mla_decode(q: Queries, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    (pages,) = cache
    groups = meta.scratch.get("groups")
    if groups is None:
        groups = meta.scratch["groups"] = plan_decode(meta, pages)
    latent, q_BND = q[0].shape[-1], torch.cat(q, dim=-1)
    if len(groups) == 1:
        return _decode_group(q_BND, pages, groups[0], latent, scale)
    out_BNL = q_BND.new_empty(q[0].shape)
    for group in groups:
        out_BNL[group.rows] = _decode_group(q_BND[group.rows], pages, group, latent, scale)
    return out_BNL


def _decode_group(q_bND: Tensor, pages: Tensor, group: DecodeGroup, latent: int, scale: float) -> Tensor:
    flat = pages.view(pages.shape[0], -1)
    torch.index_select(flat, 0, group.blocks.view(-1), out=group.pages)
    kv_bSD = group.pages.view(len(q_bND), -1, pages.shape[-1])
    scores_bNS = torch.baddbmm(group.mask, q_bND, kv_bSD.transpose(1, 2), alpha=scale)
    weights_bNS = scores_bNS.softmax(dim=-1, dtype=torch.float32).to(pages.dtype)
    return torch.bmm(weights_bNS, kv_bSD[..., :latent])


def plan_prefill(meta: PrefillMetadata, pages: Tensor) -> list[PrefillGroup]:
    """The step's sequences in groups, their new tokens and contexts padded to one length."""
    starts = np.cumsum(meta.query_lens_host) - meta.query_lens_host
    groups = []
    for rows in split_by_cost(meta.query_lens_host * meta.seq_lens_host):
        query_lens, seq_lens = meta.query_lens_host[rows], meta.seq_lens_host[rows]
        num_queries = int(query_lens.max())
        width = int(-(-seq_lens.max() // meta.block_size))
        offsets = np.arange(num_queries)
        tokens = starts[rows, None] + np.minimum(offsets, query_lens[:, None] - 1)
        positions = (seq_lens - query_lens)[:, None] + np.minimum(offsets, query_lens[:, None] - 1)
        visible = torch.from_numpy(positions + 1).to(pages.device).view(-1)
        mask = _context_mask(visible, width * meta.block_size, pages.dtype).view(len(rows), 1, num_queries, -1)
        real = np.flatnonzero(offsets < query_lens[:, None])
        keep = None if len(real) == tokens.size else torch.from_numpy(real).to(pages.device)
        tables = meta.block_tables[torch.from_numpy(rows).to(pages.device), :width]
        groups.append(PrefillGroup(torch.from_numpy(tokens.ravel()).to(pages.device), keep, tables, mask))
    return groups


def mla_prefill(q: Queries, kv_b_NCL: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float) -> Tensor:
    q_nope_TNP, q_rope_TNR = q
    (pages,) = cache
    groups = meta.scratch.get("groups")
    if groups is None:
        groups = meta.scratch["groups"] = plan_prefill(meta, pages)
    heads, nope = q_nope_TNP.shape[1:]
    expanded, latent = kv_b_NCL.shape[1:]
    out_TNV = q_nope_TNP.new_empty(len(q_nope_TNP), heads, expanded - nope)
    for group in groups:
        flat = pages.view(pages.shape[0], -1)
        kv_bSD = flat.index_select(0, group.blocks.reshape(-1)).view(len(group.blocks), -1, pages.shape[-1])
        # Few queries: products in latent space cost less than expanding the context for them.
        num_queries = len(group.tokens) // len(group.blocks)
        is_absorbed = num_queries * (2 * latent - expanded) <= latent * expanded
        attend = _prefill_absorbed if is_absorbed else _prefill_expanded
        queries = q_nope_TNP[group.tokens], q_rope_TNR[group.tokens]
        group.write(out_TNV, attend(*queries, kv_b_NCL, kv_bSD, group.mask, scale))
    return out_TNV


def _prefill_absorbed(
    q_nope: Tensor, q_rope: Tensor, kv_b_NCL: Tensor, kv_bSD: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """[b * Q, N, V] from queries [b * Q, N, P] and [b * Q, N, R]; every (query, head) is a row against the latents."""
    count, nope, heads = len(kv_bSD), q_nope.shape[-1], q_nope.shape[1]
    q_latent = torch.bmm(q_nope.transpose(0, 1), kv_b_NCL[:, :nope]).transpose(0, 1)
    q_bMD = torch.cat((q_latent, q_rope), dim=-1).mul_(scale).view(count, -1, kv_bSD.shape[-1])
    scores_bQNS = torch.bmm(q_bMD, kv_bSD.transpose(1, 2)).view(count, -1, heads, kv_bSD.shape[1])
    scores_bQNS += mask.transpose(1, 2)
    weights = scores_bQNS.softmax(dim=-1, dtype=torch.float32).to(kv_bSD.dtype).view(count, -1, kv_bSD.shape[1])
    out = torch.bmm(weights, kv_bSD[..., : kv_b_NCL.shape[-1]]).view(-1, heads, kv_b_NCL.shape[-1])
    return torch.bmm(out.transpose(0, 1), kv_b_NCL[:, nope:].transpose(1, 2)).transpose(0, 1)


def _prefill_expanded(
    q_nope: Tensor, q_rope: Tensor, kv_b_NCL: Tensor, kv_bSD: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """The same through each head's keys and values."""
    (count, width, _), (heads, nope) = kv_bSD.shape, q_nope.shape[1:]
    latent = kv_b_NCL.shape[-1]
    expanded = F.linear(kv_bSD[..., :latent], kv_b_NCL.reshape(-1, latent)).view(count, width, heads, -1)
    k_rope = kv_bSD[:, :, None, latent:].expand(-1, -1, heads, -1)
    k_bNSD = torch.cat((expanded[..., :nope], k_rope), dim=-1).transpose(1, 2)
    q_bNQD = torch.cat((q_nope, q_rope), dim=-1).view(count, -1, heads, k_bNSD.shape[-1]).transpose(1, 2)
    scores = torch.matmul(q_bNQD, k_bNSD.transpose(2, 3)).mul_(scale).add_(mask)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(kv_bSD.dtype)
    out_bNQV = torch.matmul(weights, expanded[..., nope:].transpose(1, 2))
    return out_bNQV.transpose(1, 2).reshape(-1, heads, out_bNQV.shape[-1])
