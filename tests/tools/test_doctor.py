"""The doctor sees what is there and names what is wrong, with what to do."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools import doctor


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
        findings = {f.name: f for f in doctor.examine(options(tmp_path, (port,)))}
    assert findings[f"port {port}"].value == "in use" and "set port to a free port" in findings[f"port {port}"].remedy
    findings = {f.name: f for f in doctor.examine(options(tmp_path, ifname="eth77"))}
    assert findings["interfaces"].is_fatal and "eth77" in findings["interfaces"].remedy


def test_another_version_than_the_pinned_one_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions = {"torch": "2.13.0+cpu", "ray": "1.0", "transformers": None, "tensordict": "0.15.3"}
    monkeypatch.setattr(doctor, "version_of", versions.get)
    findings = {f.name: f for f in doctor.examine(options(tmp_path))}
    assert not findings["torch"].remedy
    assert "pinned is" in findings["ray"].remedy and not findings["ray"].is_fatal
    assert findings["transformers"].is_fatal


def test_command_prints_a_report_and_says_whether_a_run_would_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.doctor", "--output-dir", str(tmp_path), "--ports"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ready for a run" in done.stdout
    bad = subprocess.run([*command, "--socket-ifname", "eth77"], capture_output=True, text=True, timeout=60)
    assert bad.returncode == 1 and "would not start" in bad.stdout
