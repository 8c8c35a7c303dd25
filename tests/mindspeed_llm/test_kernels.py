"""Which loops copy weights: C where it can be built, else torch with one line that says why; never in silence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mindspeed_llm.conversion import kernels
from mindspeed_llm.conversion.kernels import choose_kernels, load_kernels
from mindspeed_llm.weight_source import copy_values

BROKEN = {
    "an old one": ("echo 'unknown option' >&2; exit 1", "unknown option"),
    "one that hangs": ("sleep 60", "was ended"),
    "one that writes garbage": ('for last; do :; done; echo garbage > "$last"', "is no library"),
}


@pytest.fixture(autouse=True)
def a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "_library", kernels._library.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    kernels._build_problem.cache_clear()


@pytest.mark.parametrize(("script", "reason"), BROKEN.values(), ids=BROKEN)
def test_with_a_broken_compiler_auto_is_torch_with_one_line_and_native_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, reason: str
) -> None:
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\n[ "$1" = -dumpfullversion ] && exit 0\n{script}\n')
    compiler.chmod(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    kernels._build_problem.cache_clear()
    monkeypatch.setattr(kernels, "_LIMIT_S", 0.3 if reason == "was ended" else 50)
    with caplog.at_level(logging.WARNING):
        assert choose_kernels("auto") == "torch"
    [line] = caplog.messages
    assert "copied by torch, with the same bits" in line and reason in line
    assert load_kernels("torch").copy is copy_values
    with pytest.raises(ValueError, match=reason):
        choose_kernels("native")


def test_without_a_compiler_auto_is_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-cc")
    assert choose_kernels("auto") == "torch"
    assert "'no-such-cc' is not found" in caplog.text
    with pytest.raises(ValueError, match="no-such-cc"):
        choose_kernels("native")


def test_torch_and_native_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if choose_kernels("auto") != "native":
        pytest.skip("this machine has no C compiler")
    values = torch.randn(130, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name in ("torch", "native"):
        target = torch.empty(70, 130, dtype=torch.bfloat16).T
        load_kernels(name).copy(target, values, None, (0, 0))
        assert target.equal(values)
