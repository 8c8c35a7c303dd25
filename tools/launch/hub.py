"""A MODEL_PATH that is a hub's name, such as Qwen/Qwen3-0.6B: fetched into OUTPUT_DIR before the run is checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hf_formats.stamps import is_made_from, write_stamp
from tools.download import DESCRIPTION, Request, download, missing_package
from tools.download_sources import Source

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner and model, of which neither begins with a dot


def hub_name(environment: Mapping[str, str]) -> str | None:
    """MODEL_PATH where it is a hub's name and no path that exists here; else None."""
    given = environment.get("MODEL_PATH", "").strip()
    return given if _NAME.fullmatch(given) and not Path(given).exists() else None


def fetch_model(name: str, hub: str, output_dir: Path, with_weights: bool) -> Path:
    """The directory of the model in ``output_dir``; without weights where only its description is wanted.

    A complete one needs no network any more. ValueError says why it cannot be fetched.
    """
    if advice := missing_package(hub):
        raise ValueError(f"MODEL_SOURCE={hub} {advice}")
    directory = output_dir / "hub" / name.replace("/", "--")
    if is_made_from(directory, {"model": name}):
        return directory
    source = Source("a model", name, use="", modelscope=name, is_dataset=False)
    patterns = (*DESCRIPTION, "*.safetensors") if with_weights else DESCRIPTION
    try:
        download(Request(source, hub, patterns, None, directory))
    except (OSError, ValueError, RuntimeError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"MODEL_PATH {name}: no such directory here, and {hub} does not give a model of that name ({reason}); name "
            "a directory, or fetch it where there is a network"
        ) from error
    if with_weights:
        write_stamp(directory, {"model": name}, [path for path in directory.iterdir() if path.is_file()])
    return directory
