"""Whether decode steps become graphs: what a config leaves open, and what old Ascend software excludes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.compiler import needs_compiler
from tests.vllm.test_graphs import build, captured_sizes, results_of
from tests.vllm.tiny import write_checkpoint
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import Platform
from vllm.platforms.cuda import CudaPlatform
from vllm_ascend import platform, versions
from vllm_ascend.ops import rollout_ops
from vllm_ascend.platform import NPUPlatform


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def install(root: Path, monkeypatch: pytest.MonkeyPatch, **version_of: str) -> None:
    """Make this a machine with these versions of `cann`, `torch_npu` and `driver`, by the files that they leave."""
    info = root / "cann" / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text(f"package_name=Ascend-cann-toolkit\nversion={version_of['cann']}\n", encoding="utf-8")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(root / "cann"))
    (root / "version.info").write_text(f"Version={version_of['driver']}\n", encoding="utf-8")
    monkeypatch.setattr(versions, "DRIVER_VERSION_FILE", root / "version.info")
    torch_npu = version_of["torch_npu"]
    package = root / "site" / f"torch_npu-{torch_npu}.dist-info" / "METADATA"
    package.parent.mkdir(parents=True)
    package.write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {torch_npu}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(root / "site")
    monkeypatch.delenv("TASK_QUEUE_ENABLE", raising=False)


def npu_config(path: str, **more: Any) -> VllmConfig:
    return EngineArgs(path, skip_tokenizer_init=True, max_num_seqs=8, **more).create_engine_config(0, 1)


def decided(device: Platform, config: VllmConfig) -> bool | None:
    return device.with_graphs_decided(config, rollout_ops()).compilation.enforce_eager


NEW = {"cann": "8.3.RC1", "torch_npu": "2.7.1", "driver": "25.0.RC1"}


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ({"cann": "8.2.RC1"}, "need CANN 8.3.RC1 or newer and found 8.2.RC1"),
        ({"torch_npu": "2.5.1.post1"}, "need torch_npu 2.7.1 or newer and found 2.5.1.post1"),
        ({"driver": "24.1.0"}, "need driver 25.0.RC1 or newer and found 24.1.0"),
    ],
)
def test_old_software_decodes_eagerly_and_says_so_once(
    old: dict[str, str],
    message: str,
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(tmp_path, monkeypatch, **(NEW | old))
    with caplog.at_level(logging.WARNING):
        assert decided(NPUPlatform(), npu_config(path, enforce_eager=None)) is True
    (record,) = caplog.records
    assert message in record.getMessage() and "enforce_eager is not set" in record.getMessage()
    (problem,) = NPUPlatform().config_problems(npu_config(path, enforce_eager=False), rollout_ops())
    assert message in problem and "set enforce_eager=True" in problem
    assert NPUPlatform().config_problems(npu_config(path, enforce_eager=True), rollout_ops()) == []


@pytest.mark.parametrize(
    "software", [NEW, {"cann": "9.0.0-beta.1", "torch_npu": "2.13.0", "driver": "26.0.rc1"}], ids=["oldest", "current"]
)
def test_software_that_can_captures_graphs(
    software: dict[str, str],
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(tmp_path, monkeypatch, **software)
    assert decided(NPUPlatform(), npu_config(path, enforce_eager=None)) is False and not caplog.records
    assert NPUPlatform().config_problems(npu_config(path, enforce_eager=False), rollout_ops()) == []


@pytest.mark.parametrize("enforce_eager", [None, False])
def test_sizes_for_drafts_are_left_out_where_they_alone_exclude_graphs(
    path: str,
    enforce_eager: bool | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(tmp_path, monkeypatch, **NEW)
    monkeypatch.setattr(platform, "capture_problem", lambda config: "too large" if max(sizes_of(config)) > 8 else None)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    config = npu_config(path, enforce_eager=enforce_eager, speculative_config=drafts)
    assert sizes_of(config)[-1] == 32
    chosen = NPUPlatform().with_graphs_decided(config, rollout_ops())
    assert not chosen.compilation.enforce_eager and sizes_of(chosen)[-1] == 8
    assert "steps of more than 8 rows run eagerly: too large" in caplog.text


def sizes_of(config: VllmConfig) -> tuple[int, ...]:
    return config.compilation.cudagraph_capture_sizes


def test_an_engine_that_was_asked_for_graphs_does_not_start_on_old_software(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, **(NEW | {"cann": "8.2.RC1", "torch_npu": "2.5.1.post1"}))
    with pytest.raises(ValueError, match=r"CANN 8\.3\.RC1 .* 8\.2\.RC1, torch_npu 2\.7\.1 .* 2\.5\.1\.post1"):
        build(path, block_size=16, device="npu", enforce_eager=False)


@needs_compiler
def test_a_choice_that_is_left_open_captures_what_the_device_captures(path: str) -> None:
    assert decided(CudaPlatform(), npu_config(path, enforce_eager=None)) is False
    captured = build(path, device="cpu", enforce_eager=None)
    results_of(captured)
    assert captured_sizes(captured) == [8]
    reference = "vllm.ops.reference:rollout_ops"
    assert build(path, device="cpu", rollout_ops=reference, enforce_eager=None).core.worker.graphs is None
