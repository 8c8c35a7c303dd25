"""The doctor sees what is there, names what is wrong, and picks the interface that leads to the master."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools import doctor, network
from tools.network import Interface

LOOPBACK = Interface("lo", "127.0.0.1", 0)
BRIDGE = Interface("docker0", "172.17.0.1", 10_000)
SLOW, FAST = Interface("eth0", "10.0.0.5", 1_000), Interface("eth1", "10.1.0.5", 25_000)


def options(tmp_path: Path, ports: tuple[int, ...] = (), ifname: str | None = None) -> doctor.Options:
    return doctor.Options(tmp_path / "not" / "there" / "yet", ports, None, ifname)


def test_this_machine_can_run(tmp_path: Path) -> None:
    findings = doctor.examine(options(tmp_path))
    assert not [finding for finding in findings if finding.is_fatal]
    names = {finding.name for finding in findings}
    assert {"python", "torch", "ray", "NPUs", "cores", "host memory", "disk", "jemalloc", "interfaces"} <= names


def test_a_port_in_use_and_a_missing_interface_are_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        findings = {f.name: f for f in doctor.examine(options(tmp_path, (port,), "eth77"))}
    assert "in use" in findings[f"port {port}"].value and findings[f"port {port}"].remedy
    assert findings["interfaces"].is_fatal and "eth77" in findings["interfaces"].remedy


def test_another_version_than_the_pinned_one_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions = {"torch": "2.13.0+cpu", "ray": "1.0", "transformers": None, "tensordict": "0.15.3"}
    monkeypatch.setattr(doctor, "version_of", versions.get)
    findings = {f.name: f for f in doctor.examine(options(tmp_path))}
    assert not findings["torch"].remedy
    assert "pinned is" in findings["ray"].remedy and not findings["ray"].is_fatal
    assert findings["transformers"].is_fatal


@pytest.mark.parametrize(
    ("found", "master", "asked", "expected"),
    [
        ([LOOPBACK, BRIDGE, SLOW, FAST], None, None, FAST),
        ([LOOPBACK, BRIDGE, SLOW, FAST], None, "eth0", SLOW),
        ([LOOPBACK, BRIDGE, SLOW, FAST], "127.0.0.1", None, LOOPBACK),
        ([LOOPBACK, SLOW], None, "ib0", None),
        ([LOOPBACK], None, None, LOOPBACK),
        ([], None, None, None),
    ],
)
def test_choice_of_interface(
    found: list[Interface], master: str | None, asked: str | None, expected: Interface | None
) -> None:
    assert network.choose(found, master, asked) == expected


def test_command_prints_a_report_and_says_whether_a_run_would_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.doctor", "--output-dir", str(tmp_path), "--ports"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ready for a run" in done.stdout
    bad = subprocess.run([*command, "--socket-ifname", "eth77"], capture_output=True, text=True, timeout=60)
    assert bad.returncode == 1 and "would not start" in bad.stdout
