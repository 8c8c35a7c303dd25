"""Every finding about this machine, in the order of a reader's questions."""

from __future__ import annotations

from tools.doctor import ascend, host, links
from tools.doctor.finding import Finding, Options
from tools.doctor.tested import needs_of_config


def examine(options: Options) -> list[Finding]:
    """Every finding; ValueError for a config that the table does not have."""
    needs = needs_of_config(options.config_name)
    return [
        *host.python(),
        *host.packages(),
        *ascend.findings(),
        *host.memory(needs),
        *host.disk(options.output_dir, needs),
        *host.allocator(),
        *links.interfaces(options),
    ]
