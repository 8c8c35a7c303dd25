"""The kernels of the CUDA table compile for real devices at real sizes and fit into them; no device is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels of the CUDA table are written in Triton, which this environment lacks")

pytestmark = pytest.mark.needs_torch(
    "2.10", "torch.nn.functional.grouped_mm, without which the CUDA table refuses to start"
)

PROGRAM = Path(__file__).with_name("compiled_cuda_kernels.py")
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10}  # of one program, by the CUDA programming guide
MOST_SPILLED = 64  # bytes of a thread, in registers that have no room: a few values outside of the loops
KERNELS = {
    *("decode_attention", "merge_splits", "norm_rope_write_kv", "prefill_attention", "rms_norm", "rope_write_gqa"),
    *(
        "choose_part",
        "grouped_product",
        "sample_parts",
        "rotary_interleaved",
        "silu_and_mul",
        "sum_of_experts",
        "topk_router",
    ),
}
FP8_KERNELS = {"block_product", "quantize_rows", "silu_and_mul_quantized", "sum_of_splits", "wide_product"}  # no sm_80


def compiled(architecture: str, case: str, cache: Path) -> list[dict[str, int | str]]:
    """The program's reports; it runs on its own, because kernels of this process are interpreted."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(PROGRAM), architecture, case]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(architecture: str, reports: list[dict[str, int | str]]) -> None:
    for report in reports:
        assert int(report["shared"]) <= SHARED_BYTES[architecture] and int(report["spilled"]) <= MOST_SPILLED, report


def test_latent_attention_compiles_for_hopper(tmp_path: Path) -> None:
    reports = compiled("sm_90", "of 16 heads, torch.bfloat16", tmp_path)
    check("sm_90", reports)
    latent = {"decode_attention", "merge_splits", "norm_rope_write_kv", "prefill_attention", "rotary_interleaved"}
    assert {report["kernel"] for report in reports} == latent


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_every_kernel_compiles(architecture: str, tmp_path: Path) -> None:
    reports = compiled(architecture, "", tmp_path)
    check(architecture, reports)
    assert {report["kernel"] for report in reports} == KERNELS | (FP8_KERNELS if architecture == "sm_90" else set())
