"""Latent decoding by FlashMLA, DeepSeek's library (https://github.com/deepseek-ai/FlashMLA).

Limits: a Hopper GPU (sm_90); bfloat16; pages of 64 tokens; 512 latent and 64 rope channels, in this order, which is the
reference's cache as it lies. Tolerance: 1e-2.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.ops.contract import DecodeMetadata, KVCache, Queries, RolloutOps
from vllm.ops.cuda.table import rollout_ops

_BLOCK_SIZE, _LATENT, _ROPE = 64, 512, 64
_HOPPER = 9
_OTHERWISE = "otherwise set rollout_ops='vllm.ops.cuda:rollout_ops'"


def flash_mla_ops() -> RolloutOps:
    """The table for NVIDIA devices with FlashMLA's decoding (provider ``vllm.ops.cuda:flash_mla_ops``).

    Raises:
        ValueError: flash_mla or something of `rollout_ops` is missing, or this machine's GPU is no Hopper.
    """
    return with_flash_mla(rollout_ops(), find_flash_mla())


def find_flash_mla() -> Any:
    """Return the library; ValueError where it is not installed, or the GPU is no Hopper."""
    named = "rollout_ops='vllm.ops.cuda:flash_mla_ops'"
    try:
        library = importlib.import_module("flash_mla")
    except ImportError as error:
        raise ValueError(
            f"{named}: {error}; install https://github.com/deepseek-ai/FlashMLA from its sources, {_OTHERWISE}"
        ) from error
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability())[0] != _HOPPER:
        raise ValueError(
            f"{named}: FlashMLA decodes bfloat16 on sm_90 alone, and this GPU is sm_{''.join(map(str, capability))}; "
            f"{_OTHERWISE}"
        )
    return library


def with_flash_mla(table: RolloutOps, library: Any) -> RolloutOps:
    """Return `table` with the decoding of `library`, the module ``flash_mla``."""
    return replace(
        table,
        mla_decode=FlashMla(library).mla_decode,
        implementations=table.implementations | {"mla_decode": "native (FlashMLA)"},
        problems=lambda config: [*table.problems(config), *_problems(config)],
    )


class FlashMla:
    """See ``RolloutOps.mla_decode``."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def mla_decode(self, q: Queries, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
        (pages,) = cache
        if "flash_mla" not in meta.scratch:
            # How a step's sequences are split follows from lengths on the device, for all layers. A kernel finds it,
            # which is captured with the step, so every replay splits its own lengths.
            splits = self._library.get_mla_metadata(meta.seq_lens, q[0].shape[1], 1)
            meta.scratch["flash_mla"] = splits
        out_B1NL, _ = self._library.flash_mla_with_kvcache(
            torch.cat(q, dim=-1).unsqueeze(1),
            pages.unsqueeze(2),
            meta.block_tables,
            meta.seq_lens,
            q[0].shape[2],
            *meta.scratch["flash_mla"],
            softmax_scale=scale,
        )
        out_BNL: Tensor = out_B1NL.squeeze(1)
        return out_BNL


def _problems(config: VllmConfig) -> list[str]:
    hf, block_size, dtype = config.model.hf, config.cache.block_size, config.model.dtype
    if not hf.is_mla:
        return [f"FlashMLA is for latent attention, which {hf.architecture} has not; {_OTHERWISE}"]
    found = []
    if (hf.kv_lora_rank, hf.qk_rope_head_dim) != (_LATENT, _ROPE):
        found.append(
            f"FlashMLA takes kv_lora_rank={_LATENT} and qk_rope_head_dim={_ROPE}, and {hf.architecture} has "
            f"{hf.kv_lora_rank} and {hf.qk_rope_head_dim}; {_OTHERWISE}"
        )
    if block_size != _BLOCK_SIZE:
        found.append(f"block_size={block_size}: FlashMLA takes {_BLOCK_SIZE}; set block_size={_BLOCK_SIZE}")
    if dtype != "bfloat16":
        found.append(f"dtype={dtype}: FlashMLA takes bfloat16; set dtype=bfloat16, {_OTHERWISE}")
    return found
