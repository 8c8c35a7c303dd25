"""How many heads a rank may have: what the decode kernel of this machine's CANN takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.vllm.tiny import write_checkpoint
from vllm.engine.arg_utils import EngineArgs
from vllm_ascend.ops import rollout_ops
from vllm_ascend.platform import NPUPlatform


def problems(root: Path, monkeypatch: pytest.MonkeyPatch, cann: str, heads: int, dtype: str = "bfloat16") -> list[str]:
    """What a machine with this CANN has against a model of DeepSeek's sizes with so many heads."""
    info = root / "cann" / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text(f"version={cann}\n", encoding="utf-8")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(root / "cann"))
    checkpoint = write_checkpoint(root, num_attention_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64)
    config = EngineArgs(checkpoint, skip_tokenizer_init=True, dtype=dtype, block_size=16).create_engine_config(0, 1)
    return NPUPlatform().config_problems(config, rollout_ops())


@pytest.mark.parametrize(("cann", "heads"), [("8.2.RC1", 32), ("8.3.RC1", 16), ("9.0.0-beta.1", 1)])
def test_heads_that_the_kernel_takes(cann: str, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(tmp_path, monkeypatch, cann, heads) == []


@pytest.mark.parametrize(
    ("cann", "heads", "message"),
    [
        ("8.2.RC1", 16, r"16 heads .* of CANN 8\.2\.RC1 takes \[32, 64, 128\].* or CANN 8\.3 or newer"),
        ("8.3.RC1", 12, r"12 heads .* on npu takes \[1, 2, 4, 8, 16, 32, 64, 128\]; choose another tensor"),
    ],
)
def test_heads_that_it_refuses(
    cann: str, heads: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = problems(tmp_path, monkeypatch, cann, heads)
    assert re.search(message, problem)


def test_float32_decodes_without_that_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(tmp_path, monkeypatch, "8.2.RC1", 12, dtype="float32") == []
