"""Attention on NVIDIA devices: one kernel for all decoding, one for all prefills.

Decoding cuts each context into splits that run at the same time, and a second kernel merges them. How many follows from
the batch and from the width of the block tables, never from lengths, so a captured graph stays right. Limits: float32,
bfloat16 or float16, one dtype of queries and cache; float32 multiplies without tensor cores. Tolerance: 1e-5 (float32),
1e-2 (bfloat16).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.contract import DecodeMetadata, KVCache, PrefillMetadata, Queries
from vllm.ops.cuda.launch import Launch, num_processors, tile_for
from vllm.ops.reference import head_linear
from vllm.utils import last_contiguous

_MOST_SPLITS = 64
_PROGRAMS_OF_A_PROCESSOR = 2  # enough that one waits for memory while another computes
_TILES_OF_A_SPLIT = 4  # at least: fewer cost more to merge than they save
_LEAST_TILE = 16  # of a product on tensor cores
# Stages of triton's pipeline that have two tiles on their way while one is computed. In pages a tile's addresses wait
# for the block table, which takes two more.
_PACKED_STAGES, _PAGED_STAGES = 3, 5
_LATENT_TOKENS = 1024  # that a prefill takes to latent space at a time, where queries are wider than the model's own
_EXPANDED_ELEMENTS = 1 << 28  # keys and values that a prefill expands at a time: 512 MiB in bfloat16


class Attention:
    """See ``RolloutOps.mla_decode``, ``mla_prefill``, ``gqa_decode`` and ``gqa_prefill``."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def mla_decode(self, q: Queries, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
        return self._decode(q, cache[0], 1, meta.block_tables, meta.seq_lens, scale)

    def gqa_decode(self, q_BND: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
        (pages,) = cache
        return self._decode([q_BND], pages, pages.shape[3], meta.block_tables, meta.seq_lens, scale)

    def gqa_prefill(self, q_TND: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float) -> Tensor:
        (pages,) = cache
        out_TND = q_TND.new_empty(q_TND.shape)
        k_SGD, v_SGD = pages.flatten(0, 1).unbind(1)
        self._prefill(q_TND, None, k_SGD, None, v_SGD, meta, slice(0, len(meta.seq_lens)), None, scale, out_TND)
        return out_TND

    def mla_prefill(self, q: Queries, kv_b_NCL: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float) -> Tensor:
        """Attend to expanded keys and values; where few new tokens meet a context, in latent space, as decoding does,
        which then computes less.
        """
        q_nope_TNP, q_rope_TNR = q
        (expanded, latent), (heads, nope) = kv_b_NCL.shape[1:], q_nope_TNP.shape[1:]
        if int(meta.query_lens_host.max()) * (2 * latent - expanded) <= latent * expanded:
            return self._prefill_latent(q, kv_b_NCL, cache, meta, scale)
        (pages,) = cache
        out_TNV = q_nope_TNP.new_empty(len(q_nope_TNP), heads, expanded - nope)
        for rows in _groups(meta.seq_lens_host, _EXPANDED_ELEMENTS // (heads * expanded)):
            slots_S, starts = _context_slots(meta, rows)
            kv_SD = pages.flatten(0, 1).index_select(0, slots_S)
            expanded_SNC = F.linear(kv_SD[:, :latent], kv_b_NCL.reshape(-1, latent)).unflatten(1, (heads, expanded))
            k_SNP, v_SNV = expanded_SNC.split((nope, expanded - nope), dim=2)
            self._prefill(q_nope_TNP, q_rope_TNR, k_SNP, kv_SD[:, latent:], v_SNV, meta, rows, starts, scale, out_TNV)
        return out_TNV

    def _prefill_latent(
        self, q: Queries, kv_b_NCL: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float
    ) -> Tensor:
        q_nope_TNP, q_rope_TNR = q
        nope = q_nope_TNP.shape[2]
        if "queries" not in meta.scratch:
            tables_TW, seen_T = meta.as_queries()
            visible_T = torch.from_numpy(seen_T.astype(np.int32)).to(tables_TW.device)
            meta.scratch["queries"] = tables_TW, visible_T
        tables_TW, visible_T = meta.scratch["queries"]
        w_uk_NPL, w_uv_NLV = kv_b_NCL[:, :nope], kv_b_NCL[:, nope:].transpose(1, 2)
        parts = []
        for start in range(0, len(q_nope_TNP), _LATENT_TOKENS):
            part = slice(start, start + _LATENT_TOKENS)
            q_latent_TNL = head_linear(q_nope_TNP[part], w_uk_NPL)
            seen = tables_TW[part], visible_T[part]
            attended_TNL = self._decode((q_latent_TNL, q_rope_TNR[part]), cache[0], 1, *seen, scale)
            parts.append(head_linear(attended_TNL, w_uv_NLV))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self, q: Sequence[Tensor], pages: Tensor, groups: int, tables_BW: Tensor, lens_B: Tensor, scale: float
    ) -> Tensor:
        """Without rope channels, the pages hold keys and values [2, groups, D] of a token, else latent and rope."""
        q_BND, *rotated = map(last_contiguous, q)
        assert q_BND.dtype is pages.dtype, (q_BND.dtype, pages.dtype)
        batch, heads, channels = q_BND.shape
        q_rope, rope = (rotated[0], rotated[0].shape[2]) if rotated else (q_BND, 0)
        block_size, sharing, is_float32 = pages.shape[1], heads // groups, pages.dtype is torch.float32
        tile_H = min(tile_for(sharing, _LEAST_TILE), _LEAST_TILE if is_float32 else 64)
        tile_D = tile_for(channels, _LEAST_TILE)
        tile_S = 16 if is_float32 else 64 if tile_D <= 256 else 32
        programs = batch * groups * -(-sharing // tile_H)
        num_splits = _num_splits(programs, tables_BW.shape[1] * block_size, tile_S, q_BND.device)
        out_BND = q_BND.new_empty(batch, heads, channels)
        parts, log_sums = out_BND, out_BND
        if num_splits > 1:
            parts = out_BND.new_empty(batch, heads, num_splits, channels, dtype=torch.float32)
            log_sums = parts.new_empty(batch, heads, num_splits)
        self._launch(
            "decode_attention",
            (programs * num_splits,),
            *(q_BND, *q_BND.stride()[:2], q_rope, *q_rope.stride()[:2]),
            *(pages, tables_BW, tables_BW.stride(0), lens_B, parts, log_sums, num_splits, scale),
            IS_SPLIT=num_splits > 1,
            GROUPS=groups,
            M=sharing,
            D=channels,
            R=rope,
            TOKEN_STRIDE=pages.stride(1),
            VALUE_OFFSET=0 if rope else groups * channels,
            BLOCK_SIZE=block_size,
            TILE_H=tile_H,
            TILE_S=tile_S,
            TILE_D=tile_D,
            TILE_R=tile_for(rope or 1, _LEAST_TILE),
            num_warps=8 if is_float32 or tile_H * tile_D > 8192 else 4,
            num_stages=_PAGED_STAGES,
        )
        if num_splits > 1:
            self._launch(
                "merge_splits",
                (batch * heads,),
                *(parts, log_sums, out_BND, num_splits),
                D=channels,
                TILE_SPLITS=_MOST_SPLITS,
                TILE_D=tile_D,
            )
        return out_BND

    def _prefill(
        self,
        q_TND: Tensor,
        q_rope_TNR: Tensor | None,
        keys: Tensor,
        k_rope_SR: Tensor | None,
        values: Tensor,
        meta: PrefillMetadata,
        rows: slice,
        context_starts: Tensor | None,
        scale: float,
        out_TNV: Tensor,
    ) -> None:
        """Attend from the new tokens of the sequences `rows`, to pages where no `context_starts` are given."""
        q_TND, is_float32 = last_contiguous(q_TND), keys.dtype is torch.float32
        assert q_TND.dtype is keys.dtype, (q_TND.dtype, keys.dtype)
        q_rope = q_TND if q_rope_TNR is None else last_contiguous(q_rope_TNR)
        k_rope = keys if k_rope_SR is None else k_rope_SR
        heads, rope = q_TND.shape[1], 0 if q_rope_TNR is None else q_rope.shape[2]
        most_queries = int(meta.query_lens_host[rows].max())
        tile_D, is_wide = tile_for(q_TND.shape[2], _LEAST_TILE), q_TND.shape[2] > 128
        tile_Q = min(tile_for(most_queries, _LEAST_TILE), 32 if is_float32 else 64 if is_wide else 128)
        tables = meta.block_tables[rows]
        self._launch(
            "prefill_attention",
            (-(-most_queries // tile_Q), heads, len(tables)),
            *(q_TND, *q_TND.stride()[:2], q_rope, *q_rope.stride()[:2]),
            *(keys, *keys.stride()[:2], k_rope, k_rope.stride(0), values, *values.stride()[:2]),
            *(tables, tables.stride(0), tables if context_starts is None else context_starts),
            *(meta.cu_query_lens[rows.start : rows.stop + 1], meta.seq_lens[rows], out_TNV),
            *(heads, heads // keys.shape[1], scale),
            D=q_TND.shape[2],
            R=rope,
            V=values.shape[2],
            BLOCK_SIZE=meta.block_size if context_starts is None else 0,
            TILE_Q=tile_Q,
            TILE_S=16 if is_float32 else 32 if is_wide else 64,
            TILE_D=tile_D,
            TILE_R=tile_for(rope or 1, _LEAST_TILE),
            TILE_V=tile_for(values.shape[2], _LEAST_TILE),
            num_warps=8 if is_float32 or is_wide or tile_Q > 64 else 4,
            num_stages=_PAGED_STAGES if context_starts is None else _PACKED_STAGES,
        )


def _num_splits(programs: int, most_tokens: int, tile: int, device: torch.device) -> int:
    """How many parts of each context fill the device, when there are `programs` with one."""
    wanted = -(-_PROGRAMS_OF_A_PROCESSOR * num_processors(device) // programs)
    return max(1, min(wanted, most_tokens // (tile * _TILES_OF_A_SPLIT), _MOST_SPLITS))


def _groups(seq_lens_B: np.ndarray, most_tokens: int) -> Iterator[slice]:
    """Neighbouring sequences whose contexts have `most_tokens` together; a longer one alone."""
    start = tokens = 0
    for row, length in enumerate(seq_lens_B):
        if row > start and tokens + length > most_tokens:
            yield slice(start, row)
            start, tokens = row, 0
        tokens += length
    yield slice(start, len(seq_lens_B))


def _context_slots(meta: PrefillMetadata, rows: slice) -> tuple[Tensor, Tensor]:
    """The slots of the contexts of `rows`, one after another, int64 [S], and where each begins, int32 [B]."""
    key = f"slots of {rows}"
    if key not in meta.scratch:
        lens, tables = meta.seq_lens_host[rows], meta.block_tables[rows]
        starts = np.cumsum(lens) - lens
        row_S = np.repeat(np.arange(len(lens)), lens)
        position_S = np.arange(len(row_S)) - starts[row_S]
        block_S = torch.from_numpy(row_S * tables.shape[1] + position_S // meta.block_size).to(tables.device)
        offset_S = torch.from_numpy(position_S % meta.block_size).to(tables.device)
        slots_S = tables.reshape(-1).index_select(0, block_S).long() * meta.block_size + offset_S
        meta.scratch[key] = slots_S, torch.from_numpy(starts.astype(np.int32)).to(tables.device)
    slots_S, starts_B = meta.scratch[key]
    return slots_S, starts_B
