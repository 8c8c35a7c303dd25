"""`python -m tools.doctor`: one table; exit code 1 when a run would not start."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.doctor.examine import examine
from tools.doctor.finding import ROOT, Finding, Options
from tools.doctor.tested import load_table


def main() -> None:
    configs = [row.config for row in load_table()[1]]
    parser = argparse.ArgumentParser(
        prog="python -m tools.doctor",
        description="Examines this machine for a run: what it has, what is wrong, and what to do about it.",
    )
    parser.add_argument("--config", default=configs[0], choices=configs, help=f"the run (default: {configs[0]})")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs", help="where a run would write")
    parser.add_argument("--ports", type=int, nargs="*", default=[6766], help="ports that must be free")
    parser.add_argument(
        "--master-addr", default=os.environ.get("MASTER_ADDR"), help="the head node (default: MASTER_ADDR)"
    )
    parser.add_argument(
        "--socket-ifname", default=os.environ.get("SOCKET_IFNAME"), help="interface to use (default: SOCKET_IFNAME)"
    )
    args = parser.parse_args()
    options = Options(args.output_dir, tuple(args.ports), args.master_addr, args.socket_ifname, args.config)
    findings = examine(options)
    _show(Console(), findings)
    sys.exit(any(finding.is_fatal for finding in findings))


def _show(console: Console, findings: list[Finding]) -> None:
    table = Table("", "what", "found", "what to do", show_lines=False)
    for finding in findings:
        table.add_row(finding.mark, finding.name, finding.value, finding.remedy)
    console.print(table)
    problems = sum(finding.is_fatal for finding in findings)
    console.print("A run would not start: see the problems above." if problems else "Ready for a run.")


if __name__ == "__main__":
    main()
