"""Latent decoding by FlashMLA, which a form in plain torch stands for here: the reference's results, also of renewed
lengths, and what the library does not take.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the rest of the CUDA table is written in Triton, which this environment lacks")

from tests import deep_ep_form
from tests.vllm import deep_gemm_form, flash_mla_form
from tests.vllm.capturing_platform import DEVICE
from tests.vllm.test_cuda_ops import assert_near, decode_metadata, make_tables, random_latents
from tests.vllm.test_parity import as_inputs
from tests.vllm.tiny import write_checkpoint
from vllm import LLM, SamplingParams
from vllm.ops import reference
from vllm.ops.contract import resolve
from vllm.ops.cuda.flash_mla import FlashMla

pytestmark = [
    pytest.mark.filterwarnings("ignore:(divide by zero|overflow|invalid value) encountered:RuntimeWarning"),
    pytest.mark.needs_torch("2.10", "torch.nn.functional.grouped_mm, without which the CUDA table refuses to start"),
]

BF16 = torch.bfloat16
FLASH_MLA, KERNELS = "vllm.ops.cuda:flash_mla_ops", "vllm.ops.cuda:rollout_ops"
SIZES: dict[str, Any] = {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("planned", ["now", "of 2025"])
def test_layers_share_a_plan_and_every_replay_makes_its_own(planned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of one token is a captured step's padding, too."""
    torch.manual_seed(0)
    if planned == "of 2025":
        monkeypatch.setattr(flash_mla_form, "get_mla_metadata", flash_mla_form.get_mla_metadata_of_2025)
    tables, num_blocks = make_tables([130, 64, 1], 64)
    cache, decode = random_latents(num_blocks, 64, 512, 64, BF16), FlashMla(flash_mla_form).mla_decode
    q = torch.randn(2, 3, 5, 576).to(BF16)
    meta = decode_metadata([130, 64, 1], tables, 64)
    for lens in ([130, 64, 1], [65, 3, 9]):  # as in a graph's buffers
        meta.seq_lens.copy_(torch.tensor(lens))
        meta.scratch.clear()
        for q_layer in q:
            expected = decode_metadata(lens, tables, 64)
            queries = q_layer[..., :512], q_layer[..., 512:]
            found = decode(queries, cache, meta, 0.1)
            assert_near(found, reference.rollout_ops().mla_decode(queries, cache, expected, 0.1))
    assert len(meta.scratch) == 1 and np.array_equal(meta.seq_lens, [65, 3, 9])


def test_a_model_generates_the_reference_tables_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts, one of a page less a token, and decode steps as graphs of four sequences; other entries are the
    reference's, which a CPU computes sooner.
    """
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla_form)
    path, samples = write_checkpoint(tmp_path, **SIZES, num_attention_heads=2, num_key_value_heads=2), []
    sizes: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 64, "dtype": "bfloat16"}
    graphs: dict[str, Any] = {"enforce_eager": False, "device": DEVICE, "cudagraph_capture_sizes": [4]}
    plain, flash_mla = reference.rollout_ops(), resolve(FLASH_MLA)
    tables = plain, replace(plain, mla_decode=flash_mla.mla_decode, problems=flash_mla.problems)
    for table, more in zip(tables, ({}, graphs), strict=True):
        llm = LLM(path, skip_tokenizer_init=True, rollout_ops=table, **sizes, **more)
        params = [SamplingParams(max_tokens=4, seed=i, ignore_eos=True) for i in range(2)]
        outputs = [o.outputs[0] for o in llm.generate(as_inputs([[3, 4], list(range(40, 103))]), params)]
        samples.append(([o.token_ids for o in outputs], torch.tensor([o.sampled_logprobs for o in outputs])))
    assert samples[0][0] == samples[1][0]
    torch.testing.assert_close(samples[0][1], samples[1][1], rtol=0, atol=2e-2)


def test_what_flash_mla_does_not_take_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"flash_mla_ops': No module named 'flash_mla'; install https://github.com/"):
        resolve(FLASH_MLA)
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla_form)
    table = resolve(FLASH_MLA)
    assert table.implementations == resolve(KERNELS).implementations | {"mla_decode": "native (FlashMLA)"}
    with pytest.raises(ValueError) as caught:
        LLM(write_checkpoint(tmp_path), skip_tokenizer_init=True, max_model_len=48, rollout_ops=FLASH_MLA)
    for problem in (
        "kv_lora_rank=512 and qk_rope_head_dim=64, and DeepseekV3ForCausalLM has 32 and 16",
        "block_size=16: FlashMLA takes 64; set block_size=64",
        "dtype=float32: FlashMLA takes bfloat16",
    ):
        assert problem in str(caught.value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (10, 0))
    with pytest.raises(ValueError, match="decodes bfloat16 on sm_90 alone, and this GPU is sm_100"):
        resolve(FLASH_MLA)


def test_deepseeks_libraries_in_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = "vllm.ops.cuda:deepseek_ops"
    with pytest.raises(ValueError, match="needs deep_ep, which is not installed"):
        resolve(provider)
    with deep_ep_form.deep_ep_installed():
        with pytest.raises(ValueError, match="needs DeepGEMM 2"):
            resolve(provider)
        monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm_form)
        with pytest.raises(ValueError, match="No module named 'flash_mla'"):
            resolve(provider)
        monkeypatch.setitem(sys.modules, "flash_mla", flash_mla_form)
        ops = resolve(provider)
    assert "DeepGEMM" in ops.implementations["linear"] and "DeepGEMM" in ops.implementations["fused_experts"]
    assert "FlashMLA" in ops.implementations["mla_decode"] and "DeepEP" in ops.implementations["exchanged_experts"]
    assert ops.connect_exchange is not None and ops.not_capturable == () and ops.multiplies_fp8
