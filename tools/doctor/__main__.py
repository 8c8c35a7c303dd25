"""`python -m tools.doctor`: one table; exit code 1 when a run would not start, or when --die finds a problem."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tools.doctor
from tools.doctor import ascend, host, links, nvidia, nvidia_smi
from tools.doctor.devices import devices
from tools.doctor.finding import ROOT, Finding, Options, load_table, needs_of_config


def main() -> None:
    configs = [row.config for row in load_table()[1]]
    parser = argparse.ArgumentParser(prog="python -m tools.doctor", description=tools.doctor.__doc__)
    add = parser.add_argument
    add("--config", default=configs[0], choices=configs, help=f"the run (default: {configs[0]})")
    add("--output-dir", type=Path, default=ROOT / "outputs", help="where a run would write")
    add("--ports", type=int, nargs="*", default=[], help="ports that must be free (RAY_PORT: 6766 on several nodes)")
    add("--master-addr", default=os.environ.get("MASTER_ADDR"), help="the head node (default: MASTER_ADDR)")
    interface = os.environ.get("SOCKET_IFNAME")
    add("--socket-ifname", default=interface, help="interface to use (default: SOCKET_IFNAME)")
    add("--model-path", default=os.environ.get("MODEL_PATH"), help="the run's model (default: MODEL_PATH)")
    add("--die", action="store_true", help="check the dies themselves instead: ops, a captured layer, exchanges")
    args = parser.parse_args()
    if wrong := [port for port in args.ports if not 1024 <= port <= 65535]:
        parser.error(f"argument --ports: {wrong[0]} is no port from 1024 to 65535")
    if args.die:
        from tools.doctor import die  # torch and both engines, which the other findings do without

        try:
            findings = die.examine()
        except (ValueError, ImportError) as error:  # no torch_npu, no CANN under it, or no die
            on_gpus = f"; on GPUs run {nvidia.GPU_DAY}" if nvidia_smi.is_present() else ""
            parser.error(f"--die: {error}{on_gpus}")
        has_problem = print_table(findings)
        print(die.verdict(has_problem))
    else:
        options = Options(
            args.output_dir, tuple(args.ports), args.master_addr, args.socket_ifname, args.config, args.model_path
        )
        has_problem = print_table(examine(options))
        verdict = f"Not ready: {args.config} would not start here, see the problems above."
        print(verdict if has_problem else f"Ready for {args.config}.")
    sys.exit(has_problem)


def print_table(findings: Sequence[Finding]) -> bool:
    """Print a row for each finding, and return whether any is a problem."""
    table = Table("", "what", "found", "what to do", show_lines=False)
    for finding in findings:
        table.add_row(finding.mark, finding.name, finding.value, finding.remedy)
    Console().print(table)
    return any(finding.is_fatal for finding in findings)


def examine(options: Options) -> list[Finding]:
    """Every finding, in the order of a reader's questions; ValueError for a config that the table does not have."""
    needs = needs_of_config(options.config_name)
    return [
        *host.python(),
        *host.packages(),
        *host.folders(),
        *ascend.findings(),
        *nvidia.findings(needs),
        devices(needs),
        *host.memory(needs),
        *host.disk(options.output_dir, needs),
        *host.allocator(),
        *links.interfaces(options),
        *host.tokenizer(options.model_path),
    ]


if __name__ == "__main__":
    main()
