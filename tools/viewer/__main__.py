"""Command: ``python -m tools.viewer RUN_DIR`` writes ``RUN_DIR/samples.html`` from the run's ``samples/``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hf_formats.files import write_text
from tools.viewer.page import render
from tools.viewer.records import read_records

EXIT_BAD_INPUT = 2


def main(argv: list[str] | None = None) -> int:
    """Exit status 2 when there is nothing to show."""
    parser = argparse.ArgumentParser(prog="python -m tools.viewer", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run's OUTPUT_DIR (trainer.report_dir)")
    parser.add_argument("--steps", default=None, help="only these, for example 10,20; default: the newest that fit")
    parser.add_argument("--max-samples", type=int, default=2000, help="samples on the page (default 2000, some 10 MB)")
    parser.add_argument("--output", type=Path, default=None, help="default: RUN_DIR/samples.html")
    arguments = parser.parse_args(argv)
    output = arguments.output or arguments.run_dir / "samples.html"
    try:
        records, num_left_out = read_records(arguments.run_dir, arguments.steps, arguments.max_samples)
        write_text(output, render(arguments.run_dir.absolute().name, records))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    rest = f", {num_left_out} of earlier steps left out (--steps, --max-samples)" if num_left_out else ""
    print(f"{output}: {len(records)} samples{rest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
