"""Whether this node has the devices that a config asks of every node."""

from __future__ import annotations

from tools.doctor import ascend, nvidia_smi
from tools.doctor.finding import Finding, JobNeeds


def devices(needs: JobNeeds) -> Finding:
    """The finding; a config for accelerators does not start on a node that has fewer."""
    if needs.device == "any":
        return Finding("devices", f"{needs.config} needs none")
    found = len(ascend.dies()) if needs.device == "npu" else _num_gpus()
    value = f"{found} of {needs.num_devices} {needs.device}"
    if found >= needs.num_devices:
        return Finding("devices", value)
    remedy = (
        f"{needs.config} uses {needs.num_devices} on each node: run it there, set NPUS_PER_NODE with a layout that "
        "fits, or examine another --config"
    )
    return Finding("devices", value, remedy, is_fatal=True)


def _num_gpus() -> int:
    """GPUs that the driver's own tool lists; 0 without it."""
    try:
        return len(nvidia_smi.query_gpus())
    except nvidia_smi.SmiError:
        return 0
