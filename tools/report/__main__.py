"""Command: ``python -m tools.report --run-dir OUTPUT_DIR`` draws the curves, writes the page, prints the summary.

With ``--serve PORT`` it shows a run that goes on at http://127.0.0.1:PORT/ and writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from hf_formats.files import write_text
from tools.report.curves import CHARTS, write_png
from tools.report.page import render
from tools.report.run_data import read_run
from tools.report.summary import closing_summary


def write_report(run_dir: Path) -> None:
    """Write the PNG files and ``report.html`` into ``run_dir`` and print the summary."""
    run = read_run(run_dir.absolute())
    for chart in CHARTS:
        if chart.has_file:
            write_png(run, chart)
    write_text(run.run_dir / "report.html", render(run))
    Console().print(closing_summary(run))


def main(argv: list[str] | None = None) -> int:
    """Exit status 2 when there is nothing to report on."""
    parser = argparse.ArgumentParser(prog="python -m tools.report", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="a run's OUTPUT_DIR (trainer.report_dir)")
    parser.add_argument("--serve", type=int, metavar="PORT", help="show a run that goes on at 127.0.0.1:PORT")
    arguments = parser.parse_args(argv)
    try:
        if arguments.serve is not None:
            from tools.report.live import serve

            serve(arguments.run_dir.absolute(), arguments.serve)
        else:
            write_report(arguments.run_dir)
    except (ValueError, OSError) as error:
        Console(soft_wrap=True, markup=False, highlight=False).print(f"error: {error}", style="red")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
