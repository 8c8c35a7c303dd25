"""A decode step with the op table of NVIDIA devices on a device without values, which no host can wait for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tools.plan.collectives import describe, done_work, returned
from vllm.config import ParallelConfig
from vllm.distributed.parallel_state import init_model_parallel
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.fused_moe import new_choices_cache
from vllm.model_executor.model_loader.fp8_weight_view import hold_in_fp8
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.ops.contract import DecodeMetadata, LogitEdits, RolloutOps, SamplingBatch
from vllm.transformers_utils.config import HFConfig

ALONE = ParallelConfig(1, 1, False, 0, 1)


class OnlyOnTheDevice(TorchDispatchMode):
    """Refuses every operation with a tensor of the host: no copy to it or from it. The device is "meta", whose tensors
    have no values, so that `item`, `tolist`, `nonzero` and masks as indices are errors too. Nobody is on the other side
    of a collective; one with split sizes would have had to learn them.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            assert all(x.device.type == "meta" for x in tree_leaves(args) if isinstance(x, Tensor)), function
            assert describe(function, args).splits is None, "split sizes are values"
            return returned(function, args, done_work(args))
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        assert all(x.device.type == "meta" for x in tensors), f"{function} of a tensor on the host"
        return result


def decode_and_sample(
    hf: HFConfig,
    dtype: torch.dtype,
    table: Callable[[Callable[..., None]], RolloutOps],
    parallel: ParallelConfig = ALONE,
    block_size: int = 16,
    is_fp8: bool = False,
) -> set[str]:
    """Run a step of three sequences, and sample plainly and with every setting; the experts' choices are kept.

    Returns the kernels that were launched, by the launch function that ``table`` is given. Raises where something would
    wait for the device.
    """
    launched: set[str] = set()

    def launch_nothing(kernel: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        assert all(x.device.type == "meta" for x in arguments if isinstance(x, Tensor)), kernel
        launched.add(kernel)

    device, ops = torch.device("meta"), table(launch_nothing)
    host_lens, vocabulary = np.array([5, 1, 130]), hf.vocab_size
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = CausalLM(hf, 160, init_model_parallel(parallel), ops, device)
            if is_fp8:
                hold_in_fp8(model.weight_views)
            caches = [model.new_kv_cache(30, block_size, dtype, device, "nd") for _ in model.layers]
            caches += [new_choices_cache(hf, 30, block_size, device)] if hf.n_routed_experts else []
            longs, ints, floats = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int32), torch.ones(3)
            decode = DecodeMetadata(host_lens, ints, torch.zeros(3, 10, dtype=torch.int32), block_size)
            context = ForwardContext(3, 3, longs, longs, decode, None, [3] * parallel.data_parallel_size)
            noise_keys = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(vocabulary, dtype=torch.int32)
            plain = SamplingBatch(floats.float(), *noise_keys, None, None, None, has_greedy=True, has_random=True)
            full = replace(plain, top_k_B=ints, max_top_k=5, top_p_B=floats.float(), min_p_B=floats.float())
            full = replace(full, edits=LogitEdits(longs, floats, longs, floats, floats), num_top_logprobs=2)
            full = replace(full, banned_BW=torch.zeros(3, vocabulary, dtype=torch.bool))
    finally:
        torch.set_default_dtype(default_dtype)
    with OnlyOnTheDevice():
        logits = model.compute_logits(model(longs, caches, context))
        for batch in (plain, full):
            sampled = ops.sample(logits, batch)
    assert logits.shape == (3, vocabulary) and sampled.token_ids_B.shape == (3,)
    return launched
