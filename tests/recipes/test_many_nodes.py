"""Starting a run on many nodes: from one of them through a host file, and by Slurm."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.common.recipe import ROOT, load_recipe
from tools.launch import __main__ as launch
from tools.launch import hostfile, network
from verl.utils.net_utils import free_ports

RECIPE = load_recipe("r1_dynamic_sampling")


def test_a_host_file_starts_every_other_node_over_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan shows what each node is sent; nothing secret is shown, or stands on a command line."""
    own = network.address_towards(None, None)
    lines = f"# the cluster\n192.0.2.11 slots=2\n{own} slots=2\n\n192.0.2.12 slot=2  # as slime writes it\n"
    (tmp_path / "hosts").write_text(lines)
    environment = {
        "HOSTFILE": str(tmp_path / "hosts"),
        "OUTPUT_DIR": str(tmp_path / "a folder"),
        "RAY_AUTH_TOKEN": "very-secret",
        "STEPS": "3",
    }
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    for variable in ("NNODES", "NPUS_PER_NODE", "MASTER_ADDR", "NODE_RANK"):
        monkeypatch.setenv(variable, "")  # the launcher sets them for this process; the test puts them back
    assert launch.main([RECIPE.name, "--print-plan", "trainer.save_freq=5"]) == 0
    plan = capsys.readouterr().out
    assert "3 x 2 cpu devices" in plan and "very-secret" not in plan
    for rank, address in ((1, "192.0.2.11"), (2, "192.0.2.12")):
        sent = plan.partition(f"accept-new {address} bash -s <<'END'\n")[2].partition("\nEND")[0].splitlines()
        expected = {f"export NODE_RANK={rank}", "export NNODES=3", f"export MASTER_ADDR={own}", "export STEPS=3"}
        expected |= {"export NPUS_PER_NODE=2", f"export OUTPUT_DIR='{tmp_path / 'a folder'}'"}
        assert expected | {f"export RAY_AUTH_TOKEN={hostfile.HIDDEN}"} <= set(sent)
        assert not any("HOSTFILE" in line for line in sent), "it would start the others again"
        assert sent[-2:] == [
            f"cd {shlex.quote(str(ROOT))}",
            f"exec {RECIPE.start_command} trainer.save_freq=5 </dev/null",
        ]
        assert f"Node {rank}: worker {address}" in plan


def test_what_a_node_is_sent_reaches_it(tmp_path: Path) -> None:
    """A shell in ssh's place: the script arrives on standard input, and its failure names its log."""
    own = {"NNODES": "2", "MASTER_ADDR": "192.0.2.1", "NODE_RANK": "0"}
    given = {"OUTPUT_DIR": str(tmp_path / "a 'folder'")}
    found = [hostfile.Host("192.0.2.1", None), hostfile.Host("192.0.2.2", None)]
    (start,) = hostfile.remote_starts(RECIPE, ["a=b c"], found, own, given)
    script = start.script.replace(f"exec {RECIPE.start_command}", 'printf "%s\\n" "$OUTPUT_DIR" "$NODE_RANK"')
    nodes = hostfile.RemoteNodes(
        [hostfile.RemoteStart(start.host, ("bash", "-s"), script + "exit 3\n")], tmp_path / "logs"
    )
    (problem,) = nodes.end(patience_s=60.0)
    assert "node 192.0.2.2: ssh ended with exit status 3" in problem
    output = (tmp_path / "logs" / "node_192.0.2.2.log").read_text().splitlines()
    assert output == [given["OUTPUT_DIR"], "1", "a=b c"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "names no node"),
        ("10.0.0.1 slots=8\n10.0.0.1 slots=8", "names 10.0.0.1 twice"),
        ("10.0.0.1 slots=8\n10.0.0.2 slots=4", "different slots"),
        ("10.0.0.1; rm -rf /", "line 1: '10.0.0.1; rm -rf /'"),
        ("-oProxyCommand=x", "line 1: '-oProxyCommand=x'"),
    ],
)
def test_a_bad_host_file_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match="HOSTFILE") as caught:
        hostfile.read_hosts(tmp_path / "hosts")
    assert expected in str(caught.value)


def test_the_head_must_be_in_its_host_file() -> None:
    found = [hostfile.Host("192.0.2.1", 8), hostfile.Host("192.0.2.2", 8)]
    with pytest.raises(ValueError, match="names none of this machine's addresses"):
        hostfile.own_settings(found, {}, ["127.0.0.1"])
    with pytest.raises(ValueError, match="MASTER_ADDR 192.0.2.3 is not in HOSTFILE"):
        hostfile.own_settings(found, {"MASTER_ADDR": "192.0.2.3"}, ["192.0.2.2"])
    with pytest.raises(ValueError, match="NNODES is 3, and HOSTFILE says 2"):
        hostfile.own_settings(found, {"NNODES": "3"}, ["192.0.2.2"])
    own = hostfile.own_settings(found, {}, ["192.0.2.2"])
    assert own == {"NNODES": "2", "MASTER_ADDR": "192.0.2.2", "NODE_RANK": "0", "NPUS_PER_NODE": "8"}


# Slurm's commands: the vendor's boundary. Nodes run one after another.
SRUN = """#!/usr/bin/env bash
for word in "$@"; do [ "$word" = hostname ] && { echo 192.0.2.31 172.17.0.1; exit; }; done
while [ "$1" != bash ]; do shift; done
for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done
"""
SCONTROL = "#!/usr/bin/env bash\nprintf 'n31\\nn32\\n'\n"


def test_slurm_starts_the_script_on_every_node(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"} | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SETUP": "no",
        "VENV_DIR": str(tmp_path / "none"),
    }
    slurm = {"SLURM_JOB_NODELIST": "n[31-32]", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(ROOT)}
    script = ["bash", str(ROOT / "recipes" / "common" / "slurm.sh")]

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*script, *arguments], env=outside | more, capture_output=True, text=True, check=False, cwd=tmp_path
        )

    dry = run(RECIPE.name, "trainer.save_freq=5", DRY_RUN="yes", **slurm)
    assert dry.returncode == 0
    assert "NNODES=2 MASTER_ADDR=192.0.2.31 'srun' '--nodes=2' '--ntasks=2'" in dry.stdout
    assert dry.stdout.rstrip().endswith(f"'{ROOT}/recipes/common/start.sh' '{RECIPE.name}' 'trainer.save_freq=5'")
    assert run(RECIPE.name, **slurm).stderr.count("has no bin/python") == 2, "start.sh ran on both nodes"
    anywhere = run(RECIPE.name, DRY_RUN="yes", SLURM_SUBMIT_DIR=str(ROOT))
    assert anywhere.stdout.startswith("NNODES=<nodes> MASTER_ADDR=<address of node 0> 'srun'"), anywhere.stderr
    refused = run(RECIPE.name, SLURM_SUBMIT_DIR=str(ROOT))
    assert refused.returncode != 0 and "start this with sbatch" in refused.stderr
    assert "no recipe r1_one" in run("r1_one", **slurm).stderr


HEAD = "import sys; sys.executable = {!r}; from tools.launch.__main__ import main; sys.exit(main(sys.argv[1:]))"
WITHOUT_RAY = '#!/bin/sh\ncase "$*" in *ray.scripts*) exit 7;; esac\nexec {} "$@"\n'


@pytest.mark.parametrize(
    ("has_ray", "problem"),
    [
        (False, "ended with exit status 7"),  # the head's Ray fails at once
        # test_nodes.py has nodes that are missing.
        pytest.param(True, "1 of 2 nodes were there after 1 s", marks=pytest.mark.slow),
    ],
)
def test_a_node_that_cannot_be_reached_is_named(tmp_path: Path, has_ray: bool, problem: str) -> None:
    """An ``ssh`` that fails: the head says who is missing and where to look, and ends."""
    own = network.address_towards(None, None)
    (tmp_path / "hosts").write_text(f"{own} slots=1\n192.0.2.11 slots=1\n")
    (tmp_path / "ssh").write_text("#!/usr/bin/env bash\necho no route to host >&2\nexit 255\n")
    (tmp_path / "python").write_text(WITHOUT_RAY.format(sys.executable))
    for name in ("ssh", "python"):
        (tmp_path / name).chmod(0o755)
    python = sys.executable if has_ray else str(tmp_path / "python")
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOSTFILE": str(tmp_path / "hosts"),
        "OUTPUT_DIR": str(tmp_path / "out"),
        "JOIN_TIMEOUT_S": "1",
        "RAY_PORT": str(free_ports(1)[0]),
    }
    command = [sys.executable, "-c", HEAD.format(python), RECIPE.name, "--no-plan"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 1, run.stdout + run.stderr
    assert problem in run.stdout
    log = tmp_path / "out" / "logs" / "attempt_1" / "node_192.0.2.11.log"
    assert f"node 192.0.2.11: ssh ended with exit status 255; its output is in {log}" in run.stdout
    assert log.read_text() == "no route to host\n"
