"""Whole steps with the op table of NVIDIA devices, on a CPU: nothing waits for the device, and a model generates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="kernels of the CUDA table are written in Triton, which this environment lacks")

from tests.tiny_models import CONFIGS
from tests.vllm.capturing_platform import DEVICE
from tests.vllm.fp8_tiny import ALIGNED
from tests.vllm.test_parity import as_inputs
from tests.vllm.tiny import TINY, write_checkpoint
from vllm import LLM, SamplingParams
from vllm.config import ParallelConfig
from vllm.distributed.parallel_state import GroupCoordinator, ParallelState
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import ForwardContext
from vllm.model_executor.model_loader.fp8_weight_view import hold_in_fp8
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.ops.contract import DecodeMetadata, LogitEdits, SamplingBatch, resolve
from vllm.ops.cuda import rollout_ops
from vllm.ops.cuda.launch import find_kernel
from vllm.ops.cuda.table import cuda_table
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaPlatform
from vllm.transformers_utils.config import load_config

pytestmark = pytest.mark.needs_torch(
    "2.10", "torch.nn.functional.grouped_mm, without which the CUDA table refuses to start"
)

FP32, BF16 = torch.float32, torch.bfloat16


class OnlyOnTheDevice(TorchDispatchMode):
    """Refuses every operation with a tensor of the host: no copy to it or from it. The device is "meta", whose tensors
    have no values, so that `item`, `tolist`, `nonzero` and masks as indices are errors too.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        assert all(x.device.type == "meta" for x in tensors), f"{function} of a tensor on the host"
        return result


@pytest.mark.parametrize(
    ("name", "dtype"), [("deepseek_v3", BF16), ("deepseek_v3 in FP8", BF16), ("qwen3-moe", FP32), ("qwen3 tied", BF16)]
)
def test_a_decode_step_and_sampling_wait_for_nothing(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    launched: set[str] = set()

    def launch_nothing(kernel: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        assert all(x.device.type == "meta" for x in arguments if isinstance(x, Tensor)), kernel
        launched.add(kernel)

    is_fp8 = name == "deepseek_v3 in FP8"
    raw = {"deepseek_v3": TINY, "deepseek_v3 in FP8": ALIGNED} | CONFIGS
    (tmp_path / "config.json").write_text(json.dumps(raw[name]))
    hf, device, ops = load_config(str(tmp_path)), torch.device("meta"), cuda_table(launch_nothing)
    alone = [GroupCoordinator(0, 1, None) for _ in range(4)]
    host_lens, vocabulary = np.array([5, 1, 130]), hf.vocab_size
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = CausalLM(hf, 160, ParallelState(ParallelConfig(1, 1, False, 0, 1), *alone), ops, device)
            if is_fp8:
                hold_in_fp8(model.weight_views)
            caches = [model.new_kv_cache(30, 16, dtype, device, "nd") for _ in model.layers]
            longs, ints, floats = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int32), torch.ones(3)
            decode = DecodeMetadata(host_lens, ints, torch.zeros(3, 10, dtype=torch.int32), 16)
            context = ForwardContext(3, 3, longs, longs, decode, None, [3])
            noise_keys = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(vocabulary, dtype=torch.int32)
            plain = SamplingBatch(floats.float(), *noise_keys, None, None, None, has_greedy=True, has_random=True)
            full = replace(plain, top_k_B=ints, max_top_k=5, top_p_B=floats.float(), min_p_B=floats.float())
            full = replace(full, edits=LogitEdits(longs, floats, longs, floats, floats), num_top_logprobs=2)
            full = replace(full, banned_BW=torch.zeros(3, vocabulary, dtype=torch.bool))
    finally:
        torch.set_default_dtype(FP32)
    with OnlyOnTheDevice():
        logits = model.compute_logits(model(longs, caches, context))
        for batch in (plain, full):
            sampled = ops.sample(logits, batch)
    assert logits.shape == (3, vocabulary) and sampled.token_ids_B.shape == (3,)
    attention = {"norm_rope_write_kv", "rotary_interleaved"} if hf.is_mla else {"rope_write_gqa"}
    experts = set() if name == "qwen3 tied" else {"topk_router", "sum_of_experts"}
    experts |= {"grouped_product"} if dtype is FP32 else set()
    experts |= {"quantize_rows", "block_product", "silu_and_mul_quantized"} if is_fp8 else set()
    assert launched - {"merge_splits"} == attention | experts | {
        "rms_norm",
        "silu_and_mul",
        "decode_attention",
        "sample_parts",
        "choose_part",
    }


def test_each_way_to_the_host_is_noticed() -> None:
    x = torch.ones(3, device="meta")
    ways: list[Any] = [Tensor.tolist, Tensor.nonzero, Tensor.cpu, lambda x: x[0].item(), lambda x: x[x > 0]]
    ways += [lambda x: x + torch.ones(3).to(x.device)]
    for way in ways:
        with pytest.raises((RuntimeError, NotImplementedError, AssertionError)), OnlyOnTheDevice():
            way(x)


def test_a_model_generates_the_reference_tables_tokens(tmp_path: Path) -> None:
    """A prompt, chunks of another one, and decode steps as graphs, with padding."""
    path, samples = write_checkpoint(tmp_path, num_hidden_layers=2), []
    sizes: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 4, "block_size": 16, "max_num_batched_tokens": 16}
    graphs: dict[str, Any] = {"enforce_eager": False, "device": DEVICE, "cudagraph_capture_sizes": [4]}
    for table, more in (("vllm.ops.reference:rollout_ops", {}), ("vllm.ops.cuda:rollout_ops", graphs)):
        llm = LLM(path, skip_tokenizer_init=True, rollout_ops=table, **sizes, **more)
        params = [SamplingParams(max_tokens=4, seed=i, ignore_eos=True) for i in range(3)]
        outputs = [o.outputs[0] for o in llm.generate(as_inputs([[3, 4], [5], list(range(40, 60))]), params)]
        samples.append(([o.token_ids for o in outputs], torch.tensor([o.sampled_logprobs for o in outputs])))
    assert samples[0][0] == samples[1][0]
    torch.testing.assert_close(samples[0][1], samples[1][1], rtol=0, atol=1e-5)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("vllm.ops.cuda:rollout_ops").not_capturable == ("exchanged_experts",)
    monkeypatch.delattr("torch.nn.functional.grouped_mm")
    with pytest.raises(ValueError, match=r"needs torch\.nn\.functional\.grouped_mm; install torch 2\.10"):
        rollout_ops()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs triton, which is not installed: install the one that this torch names"):
        rollout_ops()


def test_a_machine_without_a_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.ops.cuda.kernels.is_interpreted", False)
    with pytest.raises(RuntimeError, match="need an NVIDIA device, and torch finds none; TRITON_INTERPRET=1"):
        find_kernel.__wrapped__("rms_norm")


def test_the_table_of_cuda_devices_is_captured_but_for_a_dispatch(tmp_path: Path) -> None:
    """No device is touched."""
    path, platform = write_checkpoint(tmp_path), CudaPlatform()
    exchange: dict[str, Any] = {"enable_expert_parallel": True, "expert_exchange": "dispatch"}
    plain, dispatching = (
        EngineArgs(path, skip_tokenizer_init=True, enforce_eager=None, **more).create_engine_config(0, 1)
        for more in ({}, exchange)
    )
    ops, reference = resolve(platform.rollout_ops), resolve("vllm.ops.reference:rollout_ops")
    assert "not that of the CPU kernels" in CpuPlatform().graph_problems(plain, ops)[0]  # Triton's interpreter
    assert platform.graph_problems(plain, ops) == []
    assert platform.with_graphs_decided(plain, ops).compilation.enforce_eager is False
    (problem,) = platform.graph_problems(dispatching, ops)
    assert "what expert_exchange=dispatch sends depends on values; all_gather can be captured" in problem
    assert (
        len(platform.graph_problems(plain, reference)) == 1
        and len(platform.graph_problems(dispatching, reference)) == 2
    )
