"""The op table of a CPU: its own kernels for everything that a decode step runs, the reference for the rest.

Weights stay bfloat16 in memory. Products use the processor's bfloat16 instructions where it has them, and float32
registers where not. A row's result does not depend on the rows beside it or on the number of threads, and a prompt's
tokens go through the same sums as decoded ones: chunks, preemption and cached prefixes change no bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hf_formats.cpu_kernels import instructions
from vllm.ops import reference
from vllm.ops.contract import RolloutOps, add_layer_at_once, entries_of
from vllm.ops.cpu.attention import LatentAttentionOps
from vllm.ops.cpu.build import kernels, kernels_problem
from vllm.ops.cpu.calls import Bfloat16Products, KernelCalls, Launch
from vllm.ops.cpu.experts import ExpertOps
from vllm.ops.cpu.graph import launch
from vllm.ops.cpu.grouped_query import GroupedQueryOps, new_gqa_cache
from vllm.ops.cpu.linear import LinearOps
from vllm.ops.cpu.rows import RowOps
from vllm.ops.reference_moe import all_to_all_experts

logger = logging.getLogger(__name__)

_LAYER_TOKENS = 512  # given to a dense MLP at a time: products of so many take longer than reading the weights again


def rollout_ops() -> RolloutOps:
    """The table for this processor; builds the kernels when they are not there yet.

    Raises:
        RuntimeError: they cannot be built.
    """
    return cpu_table(best_products())


def default_ops() -> RolloutOps:
    """`rollout_ops` where a compiler builds the kernels; else the reference, with a warning: each still runs."""
    problem = kernels_problem()
    if problem is None:
        return rollout_ops()
    logger.warning("rollout runs on the reference ops, several times slower than on the kernels: %s", problem)
    return reference.rollout_ops()


def uncompressed_ops() -> RolloutOps:
    """`default_ops` with plain weights, neither compressed nor in panels: slower to read, the same results."""
    table = default_ops()
    return replace(table, new_weight=partial(table.new_weight, may_pack=False))


def best_products() -> Bfloat16Products:
    """The fastest way of multiplying bfloat16 that the processor has and the system permits."""
    if kernels().cpu_may_use_tiles():
        return Bfloat16Products.TILES
    return Bfloat16Products.DOT if "avx512_bf16" in instructions() else Bfloat16Products.WIDENED


def cpu_table(products: Bfloat16Products, launch: Launch = launch) -> RolloutOps:
    """Return the table that multiplies bfloat16 in one way; pairs are emulated where the processor lacks them.

    launch: runs a kernel, given its name and its arguments; the planner's does not run it.
    """
    calls = KernelCalls(products, launch)
    linear, experts, rows = LinearOps(calls), ExpertOps(calls), RowOps(calls)
    attention, grouped = LatentAttentionOps(calls, linear), GroupedQueryOps(calls)
    native = entries_of(linear, experts, rows, attention, grouped) | {"new_gqa_cache": new_gqa_cache}
    mixed = {
        "exchanged_experts": "native experts, reference exchange",
        "sample": "native without filters, reference with them",
    }
    base = reference.rollout_ops()
    return replace(
        base,
        **native,
        exchanged_experts=partial(all_to_all_experts, experts=experts.fused_experts),
        implementations=base.implementations | dict.fromkeys(native, "native") | mixed,
        not_capturable=("exchanged_experts",),
        prefill_equals_decode=True,
        new_weight=linear.new_weight,
        embedding=linear.embedding,
        as_float32=partial(calls.converted, dtype=torch.float32),
        add_layer=_add_layer_in_chunks,
    )


def _add_layer_in_chunks(x_TH: Tensor, layer: Callable[[Tensor], Tensor], given_TH: Tensor) -> Tensor:
    """See ``RolloutOps.add_layer``: a dense MLP's intermediate results, several times as wide as x, stay small."""
    if len(x_TH) <= _LAYER_TOKENS:
        return add_layer_at_once(x_TH, layer, given_TH)
    for x_tH, given_tH in zip(x_TH.split(_LAYER_TOKENS), given_TH.split(_LAYER_TOKENS), strict=True):
        x_tH += layer(given_tH)
    return x_TH
