"""The model that config.json describes, with its weights loaded by the plan, computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.core.ops.reference import reference_ops
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from mindspeed_llm.hf_config import load_hf_config
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import local_plan
from mindspeed_llm.weights import HFCheckpoint, load_weights
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "v3": {},
    "no q-lora": {"q_lora_rank": None},
    "two shared experts, no yarn": {"n_shared_experts": 2, "rope_scaling": None, "routed_scaling_factor": 1.5},
    "weights not normalised": {"norm_topk_prob": False, "first_k_dense_replace": 0, "num_experts_per_tok": 4},
}


def largest_logit_differences(paths: list[str]) -> list[float]:
    groups = initialize_model_parallel()
    differences = []
    for path in paths:
        hf = load_hf_config(path)
        model = build_model(hf, groups, reference_ops(), params_dtype=torch.float32)
        load_weights(model, local_plan(hf, groups.layout, groups.coords), HFCheckpoint(path))
        expected_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        ids = torch.randint(hf.vocab_size, (48,), generator=torch.Generator().manual_seed(3))
        packed = PackedSeqParams(cu_seqlens=torch.tensor([0, 48], dtype=torch.int32), max_seqlen=48)
        with torch.no_grad():
            logits = model(ids, torch.arange(48), packed)
            differences.append(float((logits - expected_model(ids[None]).logits[0]).abs().max()))
    destroy_model_parallel()
    return differences


def test_logits_equal_transformers(tmp_path: Path) -> None:
    for name, overrides in VARIANTS.items():
        write_tiny_checkpoint(tmp_path / name, tiny_hf_config(**overrides))
    paths = [str(tmp_path / name) for name in VARIANTS]
    [differences] = run_ranks(largest_logit_differences, 1, paths, timeout_s=180)
    assert differences == pytest.approx([0.0] * len(VARIANTS), abs=1e-4), dict(zip(VARIANTS, differences, strict=True))
