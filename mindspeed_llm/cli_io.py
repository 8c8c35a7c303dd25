"""What the conversion commands share: whole-or-nothing output directories, and skipping work that is already done."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TimeElapsedColumn, TransferSpeedColumn

from hf_formats.config import GENERATION_CONFIG
from hf_formats.end_tokens import with_end_token
from hf_formats.files import sync_path, try_remove, write_json
from hf_formats.stamps import is_made_from, read_stamp, write_stamp

MANIFEST_NAME = "manifest.json"
_FULL_HASH_BYTES = 16 << 20
_SAMPLES = 256
_SAMPLE_BYTES = 64 << 10
_OLD = ".old"  # of a directory that is being replaced
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield an empty sibling directory that becomes ``target`` when the block ends well and vanishes when it does not.

    An existing ``target`` is replaced (the caller has decided that); leftovers of killed runs on this host are removed.
    """
    target = target.absolute()
    create_parent(target)
    _remove_leftovers(target)
    building = target.parent / f"{target.name}.tmp-{socket.gethostname()}-{os.getpid()}"
    building.mkdir()
    try:
        yield building
        replace_directory(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def replace_directory(building: Path, target: Path) -> None:
    """Make ``building``, all of it durable, ``target``; what was there before goes."""
    for path in [*building.rglob("*"), building]:
        sync_path(path)
    replaced = target.parent / f"{building.name}{_OLD}"
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.replace(target, replaced)
    os.replace(building, target)
    sync_path(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def run_once(
    output: Path, command: str, arguments: dict[str, Any], inputs: Iterable[Path], build: Callable[[Path], None]
) -> bool:
    """Let ``build`` fill a new directory that becomes ``output``; False when ``output`` already is that result.

    It already is when its stamp names the same command, arguments (no paths among them) and input contents, and
    every file that the stamp lists is there with its size. ValueError rather than replace a directory that this
    command did not make.
    """
    digests = [[file.name, digest_file(file)] for file in inputs]  # names only: a copy elsewhere is the same input
    made_from = {"command": command, "arguments": arguments, "inputs": digests}
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        if read_stamp(output).get("command") != command:
            raise ValueError(f"{output} exists and was not made by {command}; remove it or choose another output path")
        if is_made_from(output, made_from):
            return False
    with atomic_directory(output) as building:
        build(building)
        write_stamp(building, made_from)
    return True


def digest_file(file: Path) -> str:
    """sha256 over size and content; of a file above 16 MiB, over 256 evenly spread 64 KiB samples (first and last too).

    Samples rather than headers, because new weights of the same model have the same headers.
    """
    size = file.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        if size <= _FULL_HASH_BYTES:
            sha.update(stream.read())
        else:
            for sample in range(_SAMPLES):
                stream.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                sha.update(stream.read(_SAMPLE_BYTES))
    return sha.hexdigest()


def companion_files(hf_dir: Path) -> list[Path]:
    """Tokenizer, generation config and whatever else lies beside the weights of an HF directory, config.json apart."""
    return sorted(
        file
        for file in hf_dir.iterdir()
        if file.is_file()
        and not file.name.startswith(".")
        and file.name not in ("config.json", MANIFEST_NAME)  # a manifest is of the weights beside it
        and not file.name.endswith((*_WEIGHT_SUFFIXES, ".safetensors.index.json"))
    )


def hf_files(hf_dir: Path) -> list[Path]:
    """Every file of an HF directory that decides the result of a conversion."""
    weights = sorted(hf_dir.glob("*.safetensors")) + sorted(hf_dir.glob("*.safetensors.index.json"))
    return [hf_dir / "config.json", *weights, *companion_files(hf_dir)]


def copy_companions(hf_dir: Path, out_dir: Path) -> None:
    """Copy tokenizer files and the like; the config is the caller's."""
    for file in companion_files(hf_dir):
        shutil.copyfile(file, out_dir / file.name)


def name_end_token(hf_dir: Path) -> None:
    """Let a whole HF directory name its end token in generation_config.json, where only its tokenizer does."""
    content = with_end_token(hf_dir)
    if content is not None:
        write_json(hf_dir / GENERATION_CONFIG, content)


@contextmanager
def progress(description: str, total_bytes: int, line_interval_s: float = 60.0) -> Iterator[Callable[[int], None]]:
    """A bar with bytes, rate and time left on standard error; yields the function that advances it.

    Where that is no terminal a line every ``line_interval_s`` seconds takes the bar's place. The function raises
    KeyboardInterrupt when ``run_cli`` was asked to stop.
    """
    columns = (*Progress.get_default_columns(), TimeElapsedColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True, soft_wrap=True)
    started = last_line = time.monotonic()
    num_done = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total_bytes)

        def advance(num_bytes: int) -> None:
            nonlocal num_done, last_line
            _stop_request.check()
            bar.advance(task, num_bytes)
            num_done += num_bytes
            now = time.monotonic()
            if not console.is_terminal and now - last_line > line_interval_s:
                last_line, rate = now, num_done / (now - started)
                text = f"{num_done / total_bytes:.0%} of {total_bytes / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s"
                console.print(f"{description}: {text}", markup=False, highlight=False)

        yield advance
        bar.update(task, completed=total_bytes)  # what is read is less than what is written, by the files' headers


def say(message: str) -> None:
    """One line of a command's output, without markup."""
    Console(soft_wrap=True).print(message, markup=False, highlight=False)


class _StopRequest:
    """A signal handler that raises KeyboardInterrupt, and remembers: Python drops what is raised while it runs the
    callback of a weak reference (a thread's end has one) or a finaliser, and the command would go on to its end."""

    def __init__(self) -> None:
        self.is_made = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.is_made = True
        self.check()

    def check(self) -> None:
        """KeyboardInterrupt if there was a signal."""
        if self.is_made:
            raise KeyboardInterrupt


_stop_request = _StopRequest()  # one per process, as its signal handlers are


def run_cli(parser: argparse.ArgumentParser, body: Callable[[argparse.Namespace], None], argv: list[str] | None) -> int:
    """Parse and run; a user's error is one message on standard error and exit status 1, never a traceback."""
    arguments = parser.parse_args(argv)
    is_main_thread = threading.current_thread() is threading.main_thread()
    previous: dict[signal.Signals, Any] = {}
    if is_main_thread:  # a terminated command cleans up like an interrupted one
        _stop_request.is_made = False
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                previous[number] = signal.signal(number, _stop_request)
    try:
        body(arguments)
    except (ValueError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"{parser.prog}: {error}", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"{parser.prog}: interrupted; nothing half-written stands under an output's name\n")
        return 130
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0


def create_parent(target: Path) -> None:
    """The directory that ``target`` is to lie in, made and writable; ValueError when it cannot be."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot create {target.parent} for the output {target}: {error.strerror}") from error
    if not os.access(target.parent, os.W_OK):
        raise ValueError(f"{target.parent} is not writable, so {target} cannot be made; choose another output path")


def _remove_leftovers(target: Path) -> None:
    prefix = f"{target.name}.tmp-{socket.gethostname()}-"
    for path in sorted(target.parent.iterdir()):
        pid = path.name.removeprefix(prefix).removesuffix(_OLD)
        if path.name.startswith(prefix) and pid.isdigit() and not _is_alive(int(pid)):
            if path.name.endswith(_OLD) and not target.exists():  # killed between the two renames
                os.replace(path, target)
            else:
                try_remove(path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
