"""Parts of a decode step on a second stream of the device: the same results, eagerly and captured."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.npu.test_graphs import build_npu
from tests.vllm.test_graphs import results_of
from tests.vllm.tiny import write_checkpoint
from vllm_ascend.ops.mla_decode import PAGED_LATENT, PAGED_ROPE

EXPERTS, ATTENTION = "multistream_overlap_shared_expert", "enable_multistream_mla"
WRITE, ACTIVATION, ATTEND = "npu::npu_kv_rmsnorm_rope_cache", "npu::npu_swiglu", "npu::npu_fused_infer_attention_score"


class Streams(TorchDispatchMode):
    """Collects the streams that each op was issued on."""

    def __init__(self) -> None:
        super().__init__()
        self.of: defaultdict[str, set[int]] = defaultdict(set)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[op._schema.name].add(torch.npu.current_stream().npu_stream)
        return op(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of the kernels' sizes."""
    return write_checkpoint(
        tmp_path_factory.mktemp("wide"), kv_lora_rank=PAGED_LATENT, qk_rope_head_dim=PAGED_ROPE, num_hidden_layers=4
    )


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_results_are_the_same_bits(path: str, enforce_eager: bool) -> None:
    how = {"dtype": "bfloat16", "enforce_eager": enforce_eager}
    plain, beside = build_npu(path, **how), build_npu(path, **how, **{EXPERTS: True, ATTENTION: True})
    for count in (8, 3, 8):
        (tokens, logprobs), (expected, expected_logprobs) = results_of(beside, count), results_of(plain, count)
        assert tokens == expected and torch.equal(logprobs, expected_logprobs)


@pytest.mark.parametrize(("switch", "op"), [(ATTENTION, WRITE), (EXPERTS, ACTIVATION)])
def test_decode_steps_use_the_second_stream_and_others_do_not(path: str, switch: str, op: str) -> None:
    """A prompt's step stays on the stream of everything else, and so does what the switch does not name."""
    llm = build_npu(path, dtype="bfloat16", **{switch: True})
    with Streams() as streams:
        results_of(llm)
    (main,) = streams.of[ATTEND]
    for name in (WRITE, ACTIVATION):
        assert main in streams.of[name] and len(streams.of[name]) == (2 if name == op else 1)
