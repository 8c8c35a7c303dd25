"""OUTPUT_DIR: one run at a time, Ray's token, the results of other trainings, and a folder of logs per attempt.

logs/latest -> attempt_3
logs/attempt_3/<stage>.log, main_ppo.log      output of each stage and of the driver
logs/attempt_3/ray_start_<address>.log        ``ray start`` of a node
logs/attempt_3/ray_<address>/                 Ray's own files of a node: a link while it runs, a copy afterwards
logs/attempt_3/rank_<N>.log                   log of a rank's code
logs/attempt_3/rank_<N>.{out,err}             all other output of its process: links into Ray's files
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_formats.files import write_text
from recipes.common.data_scripts import digest_of

RUN_FILE = "run.json"
EARLIER = "earlier_runs"
OUTPUTS = (
    "checkpoints metrics.jsonl restarts.jsonl changes.jsonl tensorboard val_generations reward_ledger samples rollouts "
    "samples.html timeline export_hf trained_hf report.html rewards.png response_len.png val_score.png"
)
LATEST = "latest"
logger = logging.getLogger(__name__)
_RANK = re.compile(r":actor_name:rank (\d+)")  # Ray writes an actor's repr into its files when it starts
_HEAD_BYTES = 1000
_PLACES, _PLACE_BYTES = 16, 4096
TOKEN_LETTERS = 64
TOKEN_WAIT_S = 5.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # of flock, on some network file systems


@contextmanager
def only_run(output_dir: Path) -> Iterator[None]:
    """Hold OUTPUT_DIR's lock; ValueError when another run on this machine holds it."""
    output_dir.mkdir(parents=True, exist_ok=True)
    with (output_dir / ".lock").open("a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            raise ValueError(
                f"OUTPUT_DIR {output_dir} is in use by another run (pid {holder}); choose another one"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "%s: its file system has no locks (%s), so a second run in this OUTPUT_DIR is not noticed: start one "
                "at a time",
                output_dir,
                error.strerror,
            )
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield


def shared_token(output_dir: Path, given: str | None) -> str:
    """Ray's token: the given one, else that of ``OUTPUT_DIR/.ray_auth_token``, made by whichever node comes first."""
    if given:
        return given
    path = output_dir / ".ray_auth_token"
    output_dir.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # never replaces the token that another node has just made
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(TOKEN_LETTERS // 2))
    deadline = time.monotonic() + TOKEN_WAIT_S
    while len(token := path.read_text(encoding="utf-8").strip()) < TOKEN_LETTERS:  # its node is about to write it
        if time.monotonic() > deadline:
            raise ValueError(f"{path} holds no whole token: remove it, and start again on every node")
        time.sleep(0.05)
    return token


def training_identity(seed: int, train_files: Iterable[Path], model_dir: Path) -> dict[str, str]:
    """Digests of what a training starts from; paths and settings that may change on a resume do not count.

    Of the weights (hundreds of GB) the sizes are read, and a few places of each file.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    sizes = [path.stat().st_size for path in files]
    shards = {path.name: size for path, size in zip(files, sizes, strict=True)}
    config = model_dir / "config.json"
    described = [config] if config.is_file() else []
    return {
        "identity": digest_of({"seed": seed, "shards": shards}, [*train_files, *described]),
        "weights": hashlib.sha256(b"".join(map(_places, files, sizes))).hexdigest(),
    }


def _places(path: Path, size: int) -> bytes:
    """Bytes from places all over a file."""
    with path.open("rb") as file:
        starts = (size * place // _PLACES for place in range(_PLACES))
        return b"".join(os.pread(file.fileno(), _PLACE_BYTES, start) for start in starts)


def archive_other_training(output_dir: Path, identity: Mapping[str, str]) -> Path | None:
    """Move the results of another training into ``earlier_runs/N`` and note this one; None when nothing was moved."""
    run_file = output_dir / RUN_FILE
    known = json.loads(run_file.read_text(encoding="utf-8")) if run_file.is_file() else {}
    is_other = any(known.get(name, value) != value for name, value in identity.items())  # an older file knows fewer
    present = [output_dir / name for name in OUTPUTS.split() if (output_dir / name).exists()]
    target = None
    if is_other and present:
        target = next_folder(output_dir / EARLIER)
        for path in present:
            os.replace(path, target / path.name)
    write_text(run_file, json.dumps(identity) + "\n")
    return target


def new_attempt(logs: Path) -> Path:
    """Make the folder of the next attempt and point ``latest`` at it."""
    folder = next_folder(logs, "attempt_")
    _point(logs / LATEST, Path(folder.name))
    return folder


def next_folder(parent: Path, prefix: str = "") -> Path:
    """Make the folder of the next number, from 1, in ``parent``."""
    names = [path.name.removeprefix(prefix) for path in parent.glob(f"{prefix}*")]
    folder = parent / f"{prefix}{max((int(name) for name in names if name.isdigit()), default=0) + 1}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def attempt_of_worker(logs: Path, address: str) -> Path:
    """The attempt that the head has started on the shared disk; a new one where this node has a disk of its own."""
    latest = logs / LATEST
    if latest.is_dir() and not start_log(latest, address).exists():
        return logs / os.readlink(latest)
    return new_attempt(logs)


def start_log(attempt: Path, address: str) -> Path:
    """The file of what ``ray start`` prints on a node; an attempt has it once that node takes part."""
    return attempt / f"ray_start_{address}.log"


def show_session(session_logs: Path, kept: Path) -> None:
    """Make ``kept`` a link to Ray's files, for as long as Ray runs."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    _point(kept, session_logs)


def keep_session(kept: Path) -> None:
    """Turn a link that ``show_session`` made into a copy, once Ray has ended, and name the files of ranks."""
    if not kept.is_symlink():
        return
    source = kept.resolve()
    kept.unlink()
    if not source.is_dir():
        return  # Ray ended before it wrote anything, or another launcher has removed its temporary folder
    shutil.copytree(source, kept, ignore=_sockets, ignore_dangling_symlinks=True)
    for path in sorted(kept.glob("worker-*"), key=lambda path: path.stat().st_mtime):  # the last process of a rank
        with path.open("rb") as log:
            match = _RANK.search(log.read(_HEAD_BYTES).decode(errors="replace"))
        if match:
            _point(kept.parent / f"rank_{match[1]}{path.suffix}", path.relative_to(kept.parent))


def keep_earlier_sessions(logs: Path, address: str) -> None:
    """Copy what Ray wrote on this node in attempts whose launcher was killed, before Ray's folders are removed."""
    for attempt in logs.glob("attempt_*"):
        keep_session(attempt / f"ray_{address}")


def _point(link: Path, target: Path) -> None:
    """Make or replace a symbolic link in one step."""
    temporary = link.with_name(f".{link.name}.tmp{secrets.token_hex(4)}")
    temporary.symlink_to(target)
    os.replace(temporary, link)


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not os.path.isfile(os.path.join(folder, name)) and "socket" in name]
