"""Fetches a data set or weights that the recipes name, from Hugging Face or ModelScope.

``python -m tools.download NAME --to DIR [--source modelscope] [--no-weights] [--revision R]``; without NAME it lists
the names. A download that was cut goes on where it stopped when the same command is run again. huggingface_hub reads
``HF_ENDPOINT`` and ``HF_TOKEN``. Exit codes: 0 complete, 1 the download failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_formats.tokenizer import tokenizer_problem
from tools.download_sources import SOURCES, Source

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
DESCRIPTION = ("*.json", "*.txt", "*.model", "*.jinja")  # of a model: everything but its weights


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
        first_line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        print(f"error: {request.repo_id} from {request.hub}: {first_line}", file=sys.stderr)
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
    patterns = DESCRIPTION if args.no_weights else source.patterns if args.source == "huggingface" else None
    return Request(source, args.source, patterns, args.revision, args.to.expanduser().absolute())


def missing_package(hub: str) -> str | None:
    """What to install for a hub, None when it is there."""
    package = PACKAGES[hub]
    return None if importlib.util.find_spec(package) else f"needs its package: pip install {package}"


def download(request: Request) -> None:
    """Fetch the files of ``request`` that are not there yet; OSError when the disk has no room for them."""
    if request.hub == "modelscope":
        _from_modelscope(request)
        return
    from huggingface_hub.errors import HfHubHTTPError

    # The base of its HTTP client's errors, which are OSErrors with some clients.
    transport: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    try:
        _from_huggingface(request)
    except HfHubHTTPError:
        raise
    except transport as error:
        raise OSError(
            f"no connection ({error}); HF_ENDPOINT names a mirror, --source modelscope another hub"
        ) from error


def _from_huggingface(request: Request) -> None:
    from fnmatch import fnmatchcase

    from huggingface_hub import HfApi, snapshot_download

    kind = "dataset" if request.source.is_dataset else "model"
    describe = HfApi().dataset_info if request.source.is_dataset else HfApi().model_info
    info = describe(request.repo_id, revision=request.revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    if request.patterns is not None:
        sizes = {name: size for name, size in sizes.items() if any(fnmatchcase(name, p) for p in request.patterns)}
    if not sizes:
        raise ValueError(f"it has no file {' or '.join(request.patterns or ('at all',))}")
    _check_room(request.directory, sizes)
    snapshot_download(
        request.repo_id,
        repo_type=kind,
        revision=info.sha,
        allow_patterns=sorted(sizes),
        local_dir=request.directory,
    )


def _check_room(directory: Path, sizes: dict[str, int]) -> None:
    missing = sum(size for name, size in sizes.items() if not (directory / name).is_file())
    folder = next(parent for parent in (directory, *directory.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise OSError(f"{missing / 1e9:.1f} GB are to come and {free / 1e9:.1f} GB are free on the disk of {folder}")


def _from_modelscope(request: Request) -> None:
    from modelscope.hub.snapshot_download import dataset_snapshot_download, snapshot_download

    fetch = dataset_snapshot_download if request.source.is_dataset else snapshot_download
    patterns = None if request.patterns is None else list(request.patterns)
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
