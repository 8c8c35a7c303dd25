"""What the doctor says of NVIDIA GPUs, by what nvidia-smi and the kernel show of eight of them.

The outputs have the form that NVIDIA documents (nvidia-smi's manual, ``--help-query-gpu``; NCCL's variables).
"""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from tools.doctor import devices, nvidia, nvidia_links
from tools.doctor.finding import Finding, needs_of_config
from tools.doctor.nvidia_smi import FIELDS, SLOWDOWNS

CONFIG = "deepseek_r1_671b_128gpu"
ROW = {
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "580.95.05",
    "compute_cap": "9.0",
    "memory.total": "81559",
    "memory.used": "4",
    "persistence_mode": "Enabled",
    "mig.mode.current": "Disabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "power.limit": "700.00",
    "power.default_limit": "700.00",
    **{f"clocks_event_reasons.{name}": "Not Active" for name in SLOWDOWNS},
}
VERSIONS = {"nvidia-nccl-cu13": "2.29.7", "triton": "3.7.1"}


class Node:
    """Eight GPUs whose nvidia-smi prints files of a folder; three mlx5 ports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gpus = [{"index": str(i), **ROW} for i in range(8)]
        self.write_gpus()
        self.write("--query-remapped-rows", "No, No\n" * 8)
        self.write("--query-compute-apps", "")
        names = [f"GPU{i}" for i in range(8)]
        cells = [
            "\t".join([f"GPU{i}", *(" X " if i == j else "NV18" for j in range(8)), "PIX", "0-51"]) for i in range(8)
        ]
        header = "\t".join(["\x1b[4m", *names, "NIC0", "CPU Affinity\x1b[0m"])
        self.topology = "\n".join([header, *cells, "NIC0\t" + "PIX\t" * 8 + " X ", "", "Legend:", "  X    = Self"])
        self.write("topo", self.topology)
        links = "".join(f"\t Link {i}: 26.562 GB/s\n" for i in range(18))
        self.write("nvlink", "".join(f"GPU {i}: {ROW['name']} (UUID: GPU-{i})\n{links}" for i in range(8)))
        script = (
            '#!/bin/sh\nname="${1%%=*}"\n[ -f "$0.$name.fails" ] && cat "$0.$name.fails" && exit 9\ncat "$0.$name"\n'
        )
        (folder / "nvidia-smi").write_text(script, encoding="utf-8")
        (folder / "nvidia-smi").chmod(0o755)
        for i in range(3):
            self.write_port(i, "4: ACTIVE")

    def write(self, query: str, text: str) -> None:
        (self.folder / f"nvidia-smi.{query}").write_text(text, encoding="utf-8")

    def write_gpus(self) -> None:
        rows = (", ".join(gpu[field] for field in FIELDS) for gpu in self.gpus)
        self.write("--query-gpu", "".join(f"{row}\n" for row in rows))

    def write_port(self, number: int, state: str) -> None:
        port = self.folder / "infiniband" / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True, exist_ok=True)
        for name, text in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
            (port / name).write_text(f"{text}\n", encoding="utf-8")

    def found(self, config: str = CONFIG) -> dict[str, Finding]:
        return {finding.name: finding for finding in nvidia.findings(needs_of_config(config))}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for variable in ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(nvidia, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(nvidia, "version_of", VERSIONS.get)
    monkeypatch.setattr(nvidia_links, "INFINIBAND", tmp_path / "infiniband")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    return Node(tmp_path)


def test_a_node_in_order_has_nothing_to_do(node: Node) -> None:
    found = node.found()
    assert not [finding for finding in found.values() if finding.remedy]
    assert found["GPUs"].value == "8 x NVIDIA H100 80GB HBM3" and found["compute capability"].value == "sm_90"
    assert found["NVIDIA driver"].value == "580.95.05" and found["CUDA of torch"].value == "13.0"
    assert found["NCCL"].value == "2.29.7" and found["NVLink"].value == "NV18 between all 8 GPUs"
    assert found["InfiniBand, RoCE"].value == "3 of 3 ports active (400 Gb/sec, InfiniBand)"
    assert "flash_mla not installed" in found["optional libraries"].value
    assert "tools.workshop.gpu_day" in found["ops on these GPUs"].value
    assert devices.devices(needs_of_config(CONFIG)).value == "8 of 8 cuda"


def test_each_fault_of_a_gpu_is_named_with_its_remedy(node: Node) -> None:
    faults = (  # of GPU 0, of GPU 1, ...: field, value, finding, what it shows, its remedy, whether no run starts
        ("compute_cap", "7.0", "compute capability", "sm_70", "sm_80 (A100) or newer", True),
        ("ecc.errors.uncorrected.volatile.total", "2", "ECC errors", "GPU 1: 2 uncorrected", "--gpu-reset", False),
        ("persistence_mode", "Disabled", "persistence mode", "GPU 2: Disabled", "nvidia-smi -pm 1", False),
        ("mig.mode.current", "Enabled", "MIG", "GPU 3: Enabled", "-mig 0", True),
        ("power.limit", "400.00", "power limit", "GPU 4: 400 of 700 W", "-pl WATTS", False),
        ("memory.used", "70000", "GPU memory", "GPU 5: 70000 of 81559 MiB used", "pid 4242 python3", False),
        (f"clocks_event_reasons.{SLOWDOWNS[1]}", "Active", "GPU clocks", SLOWDOWNS[1], "too hot", False),
    )
    node.write("--query-compute-apps", "4242, /usr/bin/python3\n")
    for gpu, (field, value, *_) in zip(node.gpus, faults, strict=False):
        gpu[field] = value
    node.gpus[0]["driver_version"] = "570.124.06"
    node.gpus[7]["ecc.errors.uncorrected.volatile.total"] = "[N/A]"
    node.write_gpus()
    found = node.found()
    for _, _, name, shown, remedy, is_fatal in faults:
        assert shown in found[name].value and remedy in found[name].remedy and found[name].is_fatal == is_fatal
    driver = found["NVIDIA driver"]
    assert (
        driver.is_fatal and driver.value == "570.124.06" and "older than 580, which torch's CUDA 13.0" in driver.remedy
    )
    node.gpus[0]["compute_cap"] = "8.0"
    node.write_gpus()
    capability = node.found()["compute capability"]
    assert capability.value == "sm_80: FP8 products need sm_90" and not capability.remedy


def test_remapped_rows_links_and_ports_are_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write("--query-remapped-rows", "No, No\nYes, No\nNo, Yes\n")
    node.write("nvlink", "GPU 0: x\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n")
    node.write_port(1, "1: DOWN")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0,mlx5_1:1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", f"={socket.if_nameindex()[0][1]}")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    findings = list(nvidia.findings(needs_of_config(CONFIG)))
    rows = [finding for finding in findings if finding.name == "remapped rows"]
    assert [(row.value, row.is_fatal) for row in rows] == [("GPU 2: failed", True), ("GPU 1: pending", False)]
    found = {finding.name: finding for finding in findings}
    assert found["NVLink"].value == "inactive: GPU 0 Link 1" and "fabric manager" in found["NVLink"].remedy
    assert found["InfiniBand, RoCE"].value.startswith("2 of 3 ports active")
    assert found["NCCL_IB_HCA"].is_fatal and "not there: mlx5_1:1" in found["NCCL_IB_HCA"].value
    assert not found["NCCL_SOCKET_IFNAME"].remedy
    assert "--ulimit memlock=-1" in found["locked memory"].remedy
    node.write("topo", node.topology.replace("NV18", "SYS", 1))
    node.write("nvlink", "")
    for i in range(3):
        node.write_port(i, "1: DOWN")
    found = node.found()
    assert found["NVLink"].value == "not between all GPUs (SYS)" and "tensor" in found["NVLink"].remedy
    assert found["InfiniBand, RoCE"].value.startswith("no active port (mlx5_0:1") and found["InfiniBand, RoCE"].remedy


def test_a_driver_that_does_not_answer_stops_what_needs_gpus(node: Node) -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    (node.folder / "nvidia-smi.--query-gpu.fails").write_text(f"{said}\n", encoding="utf-8")
    found = node.found()["nvidia-smi"]
    assert found.is_fatal and found.value == f"exit code 9: {said}" and "--gpus all" in found.remedy
    assert devices.devices(needs_of_config(CONFIG)).value == "0 of 8 cuda"
    assert not node.found("gsm8k")["nvidia-smi"].is_fatal, "it runs on the CPU then"


def test_a_torch_that_is_not_the_pinned_one_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "version_of", {"triton": "3.5.0"}.get)
    monkeypatch.setattr(nvidia.importlib.metadata, "requires", lambda _: ['triton==3.7.1; platform_system == "Linux"'])
    assert "torch names 3.7.1" in node.found()["triton"].remedy
    monkeypatch.setattr(nvidia, "version_of", {}.get)
    monkeypatch.setattr(nvidia, "torch_cuda", lambda: None)
    found = node.found()
    assert found["triton"].is_fatal and found["CUDA of torch"].is_fatal
    assert "setup_env.sh in a new VENV_DIR" in found["CUDA of torch"].remedy


def test_the_cuda_of_torch_is_read_without_importing_it() -> None:
    import torch

    assert nvidia.torch_cuda() == torch.version.cuda
