"""The log file of a rank."""

from __future__ import annotations

import logging
import os
from pathlib import Path

LOG_DIR = "RUN_LOG_DIR"  # variable of the driver: each rank writes rank_N.log there; unset, nothing is written
FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"


def open_rank_log(place: str) -> None:
    """Sends everything that this process logs to its file, and warnings to the standard error too.

    Args:
        place: host and pid of this process, for the file's first line.
    """
    folder, rank = os.environ.get(LOG_DIR), os.environ["RANK"]
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(Path(folder) / f"rank_{rank}.log", encoding="utf-8")
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, format=FORMAT, handlers=[file, console])
    logging.getLogger(__name__).info("rank %s of %s on %s", rank, os.environ["WORLD_SIZE"], place)
