"""`python -m tools.workshop.gpu_day --out DIR [--minutes 9]`: parity, speed and memory of both engines on this GPU.

It needs no network and no Ray: torch, triton, transformers, safetensors and numpy. Parts run in order of worth, each in
a process of its own until its share of the time is up, and what it has found by then is kept. DIR gets a JSON file
for each part, ``gpu_day.json`` and ``gpu_day.md``. Without a GPU, or with ``--device cpu``, everything runs at tiny
sizes on the CPU, kernels in Triton's interpreter, and no figure is judged. Exit status 1: something is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hf_formats.files import write_json, write_text
from recipes.common.short_folder import start_method
from tools.workshop.gpu_day.parts import PARTS, ends_of_parts, resolved_device, run_part
from tools.workshop.gpu_day.rows import CUT_OFF, ENDED, NOT_STARTED, Row, line, page, read_rows, summary

LEAST_S = 5.0  # left of the day, below which no part begins
# Each part begins as a copy of a process that has only imported torch: no device, no threads yet.
_PROCESSES: Any = multiprocessing.get_context(start_method())
_PROCESSES.set_forkserver_preload(["torch", "triton"])


def main() -> int:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    device = resolved_device(options.device)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    rows: list[Row] = []
    took: dict[str, float] = {}
    for name, end_s in ends_of_parts(options.parts, 60 * options.minutes).items():
        start = time.monotonic()
        left_s = begin + end_s - start
        if left_s < LEAST_S:
            rows.append(Row(name, NOT_STARTED, note="its time was up (--minutes)"))
            continue
        rows += _run(name, device, options.out, left_s)
        took[name] = time.monotonic() - start
        _save(options.out, device, rows, took)
    _save(options.out, device, rows, took)
    print(f"{summary(rows)} {options.out / 'gpu_day.md'}")
    return int(any(row.is_well is False for row in rows))


def _save(out: Path, device: str, rows: list[Row], took: dict[str, float]) -> None:
    """Both files of the day, after every part: a day that is ended from outside has them too."""
    seconds = ", ".join(f"{part} {part_s:.0f}" for part, part_s in took.items())
    facts = [
        torch.cuda.get_device_name() if device == "cuda" else "a CPU: tiny sizes, nothing is judged by its time",
        f"torch {torch.__version__}, Python {platform.python_version()}",
        time.strftime("%Y-%m-%d"),
        f"{sum(took.values()):.0f} s: {seconds}",
    ]
    write_json(out / "gpu_day.json", {"facts": facts, "rows": [asdict(row) for row in rows]})
    write_text(out / "gpu_day.md", page(rows, facts))


def _run(name: str, device: str, out: Path, limit_s: float) -> list[Row]:
    """The rows of one part, and one more where it did not end by itself or well."""
    path = out / f"{name.replace(' ', '_')}.json"
    path.unlink(missing_ok=True)
    process = _PROCESSES.Process(target=run_part, args=(name, path, device))
    process.start()
    process.join(limit_s)
    end = None
    if process.is_alive():
        process.kill()
        process.join()
        end = Row(name, CUT_OFF, note=f"after {limit_s:.0f} s; the rows before this one are whole")
    elif process.exitcode != 0:
        end = Row(name, ENDED, note=f"exit status {process.exitcode}", is_well=False)
    found = read_rows(path)
    if end is None or any(row.name == ENDED for row in found):  # the part has reported why
        return found
    print(line(end), flush=True)
    return [*found, end]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.workshop.gpu_day", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no part goes on")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
