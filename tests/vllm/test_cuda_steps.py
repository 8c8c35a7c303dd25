"""Whole steps with the op table of NVIDIA devices, on a CPU: nothing waits for the device, and a model generates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels of the CUDA table are written in Triton, which this environment lacks")

from tests import deep_ep_form
from tests.tiny_models import CONFIGS
from tests.vllm import flash_mla_form
from tests.vllm.capturing_platform import DEVICE
from tests.vllm.fp8_tiny import ALIGNED
from tests.vllm.meta_steps import ALONE, OnlyOnTheDevice, decode_and_sample
from tests.vllm.test_parity import as_inputs
from tests.vllm.tiny import TINY, write_checkpoint
from tools.plan.world import planned_rank
from vllm import LLM, SamplingParams
from vllm.config import ParallelConfig
from vllm.distributed.parallel_state import init_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.ops.contract import RolloutOps, resolve
from vllm.ops.cuda import rollout_ops
from vllm.ops.cuda.deep_ep import with_deep_ep
from vllm.ops.cuda.flash_mla import with_flash_mla
from vllm.ops.cuda.launch import find_kernel
from vllm.ops.cuda.table import cuda_table
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaPlatform
from vllm.transformers_utils.config import load_config

pytestmark = pytest.mark.needs_torch(
    "2.10", "torch.nn.functional.grouped_mm, without which the CUDA table refuses to start"
)

FP32, BF16 = torch.float32, torch.bfloat16


DISPATCH = ParallelConfig(2, 2, True, 1, 4, expert_exchange="dispatch")


@pytest.fixture
def parallel(request: pytest.FixtureRequest) -> Iterator[ParallelConfig]:
    """The layout of the only rank that exists of its world."""
    config = request.param
    with planned_rank(config.rank, config.world_size, config.world_size):
        yield config


@pytest.mark.parametrize(
    ("name", "dtype", "parallel"),
    [
        ("deepseek_v3", BF16, ALONE),
        ("deepseek_v3 in FP8", BF16, ALONE),
        ("FlashMLA", BF16, ALONE),
        ("qwen3-moe", FP32, ALONE),
        ("qwen3 tied", BF16, ALONE),
        ("deepseek_v3", BF16, DISPATCH),
        ("DeepEP", BF16, DISPATCH),
        ("qwen3-moe", FP32, replace(DISPATCH, use_sequence_parallel_moe=True)),
    ],
    indirect=["parallel"],
)
def test_a_decode_step_and_sampling_wait_for_nothing(
    name: str, dtype: torch.dtype, parallel: ParallelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_library, is_fp8 = name == "FlashMLA", name == "deepseek_v3 in FP8"
    table, block_size = cuda_table, 16
    raw = ALIGNED if is_fp8 else CONFIGS.get(name, TINY)
    if has_library:
        raw = raw | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
        block_size = flash_mla_form.BLOCK_SIZE

        def table(launch: Callable[..., None]) -> RolloutOps:
            return with_flash_mla(cuda_table(launch), flash_mla_form)

    (tmp_path / "config.json").write_text(json.dumps(raw))
    hf = load_config(str(tmp_path))
    if name == "DeepEP":
        monkeypatch.setattr(deep_ep_form, "Buffer", deep_ep_form.ShapesOnly)
        table = partial(deep_ep_table, str(tmp_path), parallel)
    launched = decode_and_sample(hf, dtype, table, parallel, block_size, is_fp8)
    attention = {"norm_rope_write_kv", "rotary_interleaved"} if hf.is_mla else {"rope_write_gqa"}
    attention |= set() if has_library else {"decode_attention"}
    experts = set() if name == "qwen3 tied" else {"topk_router", "sum_of_experts"}
    experts |= {"grouped_product"} if dtype is FP32 else set()
    experts |= {"quantize_rows", "block_product", "silu_and_mul_quantized"} if is_fp8 else set()
    assert launched - {"merge_splits"} == attention | experts | {
        "rms_norm",
        "silu_and_mul",
        "sample_parts",
        "choose_part",
    }


def deep_ep_table(path: str, parallel: ParallelConfig, launch: Callable[..., None]) -> RolloutOps:
    """The table of a rank whose exchange has its buffer."""
    ops = with_deep_ep(cuda_table(launch))
    arguments = EngineArgs(path, skip_tokenizer_init=True, tensor_parallel_size=2, max_num_seqs=4)
    assert ops.connect_exchange is not None
    with deep_ep_form.deep_ep_installed():
        ops.connect_exchange(arguments.create_engine_config(1, 4), init_model_parallel(parallel).exchange)
    return ops


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
    assert resolve("vllm.ops.cuda:rollout_ops").not_capturable == ()
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


def test_the_table_of_cuda_devices_is_captured(tmp_path: Path) -> None:
    """No device is touched. A dispatch is captured for as many sequences as are gathered."""
    path, platform = write_checkpoint(tmp_path), CudaPlatform()
    exchange: dict[str, Any] = {"enable_expert_parallel": True, "expert_exchange": "dispatch", "max_num_seqs": 8192}
    plain, alone = (
        EngineArgs(path, skip_tokenizer_init=True, enforce_eager=None, **more).create_engine_config(0, 1)
        for more in ({}, exchange)
    )
    over_four, small = (
        EngineArgs(
            path, skip_tokenizer_init=True, tensor_parallel_size=2, data_parallel_size=2, **exchange, **more
        ).create_engine_config(0, 4)
        for more in ({}, {"cudagraph_capture_sizes": [2048, 1]})
    )
    ops, reference = resolve(platform.rollout_ops), resolve("vllm.ops.reference:rollout_ops")
    assert "not that of the CPU kernels" in CpuPlatform().graph_problems(plain, ops)[0]  # Triton's interpreter
    for config in (plain, alone, small):
        assert platform.graph_problems(config, ops) == []
    assert platform.with_graphs_decided(plain, ops).compilation.enforce_eager is False
    (problem,) = platform.graph_problems(over_four, ops)
    assert "what more than 2048 sequences of a replica send depends on values; capture sizes up to 2048" in problem
    assert len(platform.graph_problems(plain, reference)) == 1
    assert len(platform.graph_problems(over_four, reference)) == 2
