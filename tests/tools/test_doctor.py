"""The doctor sees what is there and names what is wrong, with what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hf_formats.config import load_hf_config
from recipes.common.recipe import ROOT, load_recipe
from tests.tools.doctor_needs import needs_of
from tools.doctor import ascend, host, links
from tools.doctor.__main__ import examine
from tools.doctor.finding import GIB, Finding, Options, Stack, load_table, needs_of_config
from tools.plan.setup import MODEL_OF_CONFIG, MODELS
from verl.trainer.config import load_config
from vllm_ascend import versions

CONFIGS = list((ROOT / "recipes").glob("*/config/*.yaml"))


def options(tmp_path: Path, ports: tuple[int, ...] = (), ifname: str | None = None) -> Options:
    return Options(tmp_path / "not" / "there" / "yet", ports, None, ifname)


def test_this_machine_can_run(tmp_path: Path) -> None:
    findings = examine(options(tmp_path))
    assert not [finding for finding in findings if finding.is_fatal]
    names = {finding.name for finding in findings}
    assert {"python", "torch", "ray", "NPUs", "cores", "host memory", "disk", "jemalloc", "interfaces"} <= names


def test_a_port_in_use_and_a_missing_interface_are_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        findings = {f.name: f for f in examine(options(tmp_path, (port,)))}
    assert findings[f"port {port}"].value == "in use" and "set port to a free port" in findings[f"port {port}"].remedy
    findings = {f.name: f for f in examine(options(tmp_path, ifname="eth77"))}
    assert findings["interfaces"].is_fatal and "eth77" in findings["interfaces"].remedy


def test_machine_faults_that_end_a_run_late_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A TMPDIR, a home, an environment or a compiler that other people's machines have, or lack."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setenv("HOME", "/proc/nobody")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(("/proc", str(tmp_path / "absent"))))
    monkeypatch.setattr(sys, "prefix", "/opt/my env")
    findings = {f.name: f for f in host.folders()}
    assert findings["environment"].is_fatal and "a folder without it" in findings["environment"].remedy
    assert findings["temporary files"].is_fatal and "absent" in findings["temporary files"].remedy
    assert "the home cannot hold libraries" in findings["caches"].remedy and not findings["caches"].is_fatal
    assert findings["C++ compiler"].value == "no no-such-compiler" and "g++ 12" in findings["C++ compiler"].remedy


def test_another_version_than_the_pinned_one_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions = {"torch": "2.13.0+cpu", "ray": "1.0", "transformers": None, "tensordict": "0.15.3"}
    monkeypatch.setattr(host, "version_of", versions.get)
    findings = {f.name: f for f in examine(options(tmp_path))}
    assert not findings["torch"].remedy
    assert "pinned is" in findings["ray"].remedy and not findings["ray"].is_fatal
    assert findings["transformers"].is_fatal


def test_command_prints_a_report_and_says_whether_a_run_would_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.doctor", "--output-dir", str(tmp_path), "--ports"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ready for r1_zero_tiny." in done.stdout
    bad = subprocess.run([*command, "--socket-ifname", "eth77"], capture_output=True, text=True, timeout=60)
    assert bad.returncode == 1 and "Not ready: r1_zero_tiny would not start here" in bad.stdout


@pytest.mark.parametrize("name", ["r1_ascend_671b_256die", "deepseek_r1_671b_128gpu"])
def test_a_job_of_671b_is_not_ready_on_a_machine_without_devices(tmp_path: Path, name: str) -> None:
    findings = {finding.name: finding for finding in examine(Options(tmp_path, (), None, None, name))}
    assert findings["devices"].is_fatal and "0 of" in findings["devices"].value
    assert findings["host memory"].is_fatal and findings["disk"].is_fatal


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two dies, a driver, CANN and the vendor's two tools, as the doctor sees one."""
    for name in ("davinci0", "davinci1"):
        (tmp_path / "dev" / name).mkdir(parents=True)
    info = tmp_path / "cann" / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text("package_name=Ascend-cann-toolkit\nversion=9.2.0\n", encoding="utf-8")
    (tmp_path / "version.info").write_text("Version=26.2.0\n", encoding="utf-8")
    monkeypatch.setattr(ascend, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(versions, "DRIVER_VERSION_FILE", tmp_path / "version.info")
    monkeypatch.setattr(ascend, "version_of", {"torch-npu": "2.13.0", "torch": "2.13.0+cpu"}.get)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    monkeypatch.setenv("HCCL_HOST_SOCKET_PORT_RANGE", "auto")
    tool(tmp_path, "npu-smi", "exit 0")
    tool(tmp_path, "hccn_tool", "echo 'link status: UP'")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return tmp_path


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def found_on_the_node() -> dict[str, Finding]:
    return {finding.name: finding for finding in ascend.findings()}


def test_a_node_in_order_has_nothing_to_do(node: Path) -> None:
    found = found_on_the_node()
    assert not [finding for finding in found.values() if finding.remedy]
    assert found["HCCL links"].value == "2 of 2 up" and found["CANN"].value == "9.2.0"


def test_each_ascend_fault_is_named_with_its_remedy(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(node, "hccn_tool", 'if [ "$2" = 1 ]; then echo "link status: DOWN"; else echo "link status: UP"; fi')
    tool(node, "npu-smi", "exit 3")
    (node / "version.info").write_text("Version=24.1.rc3\n", encoding="utf-8")
    info = node / "cann" / "aarch64-linux" / "ascend_toolkit_install.info"
    info.write_text("version=8.2.RC1\n", encoding="utf-8")
    found = found_on_the_node()
    assert found["HCCL links"].is_fatal and found["HCCL links"].value == "die 1: DOWN"
    assert found["npu-smi"].is_fatal and "3" in found["npu-smi"].value
    assert "older than 26.2" in found["driver"].remedy
    assert "belongs to CANN 9.2" in found["CANN"].remedy
    monkeypatch.setattr(ascend, "version_of", {"torch-npu": "2.13.0", "torch": "2.9.0"}.get)
    assert found_on_the_node()["torch_npu"].is_fatal
    monkeypatch.setattr(ascend, "version_of", {"torch-npu": "2.9.0"}.get)
    assert "not among the tested" in found_on_the_node()["torch_npu"].remedy


def test_apex_is_named_with_the_reason_why_it_is_not_used(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "apex" not in found_on_the_node()
    monkeypatch.setattr(ascend, "version_of", {"torch-npu": "2.13.0", "torch": "2.13.0", "apex": "0.1+ascend"}.get)
    found = found_on_the_node()["apex"]
    assert found.value.startswith("0.1+ascend, not used: its fused AdamW keeps the state itself")
    assert not found.remedy and not found.is_fatal


@pytest.mark.parametrize(
    ("driver", "remedy"),
    [
        ("24.1.rc3", "older than 25.0.RC1, which graphs of decode steps need"),
        ("25.0.rc1.1", "older than 25.5.1: few graphs fit its streams"),
        ("25.5.1", "older than 26.2, which belongs to torch_npu 2.13.0: update"),
    ],
)
def test_a_driver_is_told_what_graphs_need_of_it(node: Path, driver: str, remedy: str) -> None:
    (node / "version.info").write_text(f"Version={driver}\n", encoding="utf-8")
    assert remedy in found_on_the_node()["driver"].remedy


def test_hccl_ports_that_are_taken_or_cannot_be_read_are_told() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = links.hccl_ports({"HCCL_HOST_SOCKET_PORT_RANGE": f"{port}"})
    assert found.is_fatal and str(port) in found.value and "auto" in found.remedy
    assert links.hccl_ports({"HCCL_HOST_SOCKET_PORT_RANGE": "sixty"}).is_fatal
    assert "auto" in links.hccl_ports({"HCCL_HOST_SOCKET_PORT_RANGE": "auto"}).value


def test_expansion_on_the_vector_cores_of_a_whole_job_is_refused() -> None:
    everywhere = {"HCCL_OP_EXPANSION_MODE": "AIV"}
    assert links.hccl_expansion("9.2.0", everywhere).is_fatal and links.hccl_expansion(None, everywhere).is_fatal
    allowed = links.hccl_expansion("8.2.RC1", everywhere)
    assert allowed.remedy and not allowed.is_fatal
    assert not links.hccl_expansion("9.2.0", {}).remedy


@pytest.mark.slow
def test_the_table_has_what_the_big_configs_need() -> None:
    """Memory with a quarter on top, disk with all checkpoints at once: the figures of tested.toml, computed again."""
    recipes = {path.stem: path.parts[-3] for path in CONFIGS}
    for row in load_table()[1]:
        if row.device == "any":
            continue  # measured
        config = load_config([], config_name=row.config, config_dir=load_recipe(recipes[row.config]).config_dir)
        assert (row.device, row.num_devices) == (config.trainer.device, config.trainer.n_gpus_per_node)
        model = next(model for mark, model in MODEL_OF_CONFIG.items() if mark in row.config)
        needs = needs_of(config, load_hf_config(str(MODELS / model)))
        assert row.memory_gib * 0.97 < needs.host_bytes * 1.25 / GIB <= row.memory_gib
        num_checkpoints = 2 if config.trainer.save_freq > 0 else int(config.trainer.save_last)
        checkpoints = num_checkpoints * needs.checkpoint_bytes
        assert (needs.input_bytes + checkpoints) / GIB <= row.disk_gib


def test_every_recipes_configs_have_a_row_and_others_are_refused() -> None:
    assert sorted(path.stem for path in CONFIGS) == sorted(row.config for row in load_table()[1])
    with pytest.raises(ValueError, match="r1_zero_tiny"):
        needs_of_config("nothing")


@pytest.mark.parametrize("stack", load_table()[0], ids=lambda stack: stack.name)
def test_every_stack_is_the_one_that_its_folder_pins(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = host.ROOT / stack.requirements
    pins = host.pinned(folder / "base.txt")
    assert stack.torch == pins["torch"]
    assert stack.torch_npu == host.pinned(folder / "npu.txt")["torch-npu"]
    monkeypatch.setattr(host, "version_of", pins.get)
    found = list(host.packages())
    assert found[0].value.startswith(stack.name) and not [finding for finding in found if finding.remedy]
