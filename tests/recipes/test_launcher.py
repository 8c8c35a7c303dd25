"""The launcher: settings, checks that refuse, plans for many nodes, Ray's command, processes that all end."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from recipes.common.recipe import ROOT, load_recipe, recipe_names
from tools.launch import __main__ as launch
from tools.launch import checks, hostfile, network, nodes, ray_node
from tools.launch.head_run import HeadRun
from tools.launch.job import FREE_PORT, Job, resolve_config
from tools.launch.output_dir import archive_other_training, only_run, shared_token, training_identity
from tools.launch.processes import OwnProcesses
from tools.launch.roles import NodeRole, find_role
from tools.launch.settings import Settings, read_settings, variables
from tools.launch.stages import driver_stage, stages
from verl.trainer.config import validate_config
from verl.trainer.config.override_text import override
from verl.utils.net_utils import free_ports
from verl.utils.trackers import TRACKERS

R1_ZERO = load_recipe("r1_zero")


def job_of(tmp_path: Path, environment: Mapping[str, str] | None = None, *overrides: str) -> Job:
    settings = read_settings(R1_ZERO, overrides, {"OUTPUT_DIR": str(tmp_path / "out"), **(environment or {})})
    return Job(settings, resolve_config(settings))


def launch_with(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], *arguments: str) -> int:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return launch.main(["r1_zero", *arguments])


def test_every_bad_variable_is_named_at_once() -> None:
    environment = {"NNODES": "two", "RAY_PORT": "80", "SEED": "-1", "JOIN_TIMEOUT_S": "0"}
    with pytest.raises(ValueError, match="NNODES") as caught:
        read_settings(R1_ZERO, ["--fast"], environment)
    for name in ("RAY_PORT", "SEED", "JOIN_TIMEOUT_S", "--fast"):
        assert name in str(caught.value)


def test_a_removed_variable_is_refused_with_what_replaces_it() -> None:
    with pytest.raises(ValueError, match="CONTROL_PORT is not used any more: nodes meet at RAY_PORT"):
        read_settings(R1_ZERO, [], {"CONTROL_PORT": "6767"})


def test_the_config_follows_the_machine_and_overrides_win(tmp_path: Path) -> None:
    assert read_settings(R1_ZERO, [], {}).config_name == "r1_zero_tiny"
    assert read_settings(R1_ZERO, [], {}, "cuda").config_name == "r1_zero_tiny"
    assert read_settings(R1_ZERO, [], {}, "npu").config_name == "r1_ascend_671b_256die"
    job = job_of(tmp_path, {"STEPS": "3", "SEED": "7"}, "actor_rollout_ref.rollout.n=4", "data.seed=9")
    assert job.config.trainer.total_training_steps == 3
    assert job.config.actor_rollout_ref.rollout.n == 4
    assert job.config.data.seed == 9
    assert job.config.actor_rollout_ref.actor.megatron.seed == 7


def test_a_path_with_syntax_characters_survives(tmp_path: Path) -> None:
    folder = tmp_path / "a b,c={d}'e"
    job = job_of(folder)
    assert job.config.trainer.report_dir == str(folder / "out")


def test_role_by_address_and_rank() -> None:
    own = network.address_towards(None, None)
    assert find_role(Settings(R1_ZERO, "c", Path("/o")), 1) == NodeRole(True, "127.0.0.1", "127.0.0.1", "lo")
    assert find_role(Settings(R1_ZERO, "c", Path("/o"), master_addr=own), 1).own_addr == "127.0.0.1"
    with_name = find_role(Settings(R1_ZERO, "c", Path("/o"), socket_ifname=network.own_addresses()[own]), 1)
    assert (with_name.own_addr, with_name.master_addr) == (own, own)
    assert find_role(Settings(R1_ZERO, "c", Path("/o"), master_addr=own, node_rank=0), 2).is_head
    with pytest.raises(ValueError, match="MASTER_ADDR is not set"):
        find_role(Settings(R1_ZERO, "c", Path("/o")), 2)
    with pytest.raises(ValueError, match="NODE_RANK is 1"):
        find_role(Settings(R1_ZERO, "c", Path("/o"), master_addr=own, node_rank=1), 2)
    with pytest.raises(ValueError, match="SOCKET_IFNAME"):
        find_role(Settings(R1_ZERO, "c", Path("/o"), socket_ifname="nothing0"), 1)
    other = find_role(Settings(R1_ZERO, "c", Path("/o"), master_addr="192.0.2.77"), 2)
    assert not other.is_head


def test_a_host_whose_name_means_loopback_is_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's and Ubuntu's /etc/hosts give a machine's own name as 127.0.1.1; other nodes need its real address."""
    own, resolved = network.address_towards(None, None), {"myhost": "127.0.1.1", "other": "192.0.2.77"}
    monkeypatch.setattr(socket, "gethostbyname", resolved.__getitem__)
    here = replace(Settings(R1_ZERO, "c", Path("/o")), master_addr="myhost")
    assert find_role(here, 1) == NodeRole(True, "127.0.0.1", "127.0.0.1", "lo")
    hosts = [hostfile.Host("other", None), hostfile.Host("myhost", None)]
    assert hostfile.own_settings(hosts, {}, [own])["MASTER_ADDR"] == "myhost"
    resolved["localhost"] = "127.0.0.1"
    with pytest.raises(ValueError, match="MASTER_ADDR is localhost and the run has 2 nodes: every node would take"):
        find_role(replace(here, master_addr="localhost"), 2)
    if not network.is_loopback(own):
        role = find_role(here, 2)
        assert (role.is_head, role.own_addr, role.master_addr) == (True, own, own)


def test_a_head_without_a_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(Settings(R1_ZERO, "c", Path("/o")), master_addr="myhost")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(network, "own_addresses", lambda: {"127.0.0.1": "lo"})
    monkeypatch.setattr(socket.socket, "getsockname", lambda self: ("127.0.0.1", 9))
    with pytest.raises(ValueError, match="MASTER_ADDR myhost means 127.0.0.1 here, where other nodes cannot reach"):
        find_role(here, 2)


def test_one_node_takes_a_free_port_and_several_the_known_one(tmp_path: Path) -> None:
    one = job_of(tmp_path)
    assert one.ray_port == FREE_PORT, "a plan does not choose it"
    ports = {one.with_ray_port().ray_port for _ in range(3)}
    assert len(ports) > 1 and all(isinstance(port, int) for port in ports)
    several = job_of(tmp_path, {"NNODES": "2", "MASTER_ADDR": "192.0.2.77"})
    assert several.ray_port == several.with_ray_port().settings.ray_port == 6766
    assert job_of(tmp_path, {"RAY_PORT": "7000"}).with_ray_port().ray_port == 7000


@pytest.mark.parametrize("path", ["/tmp/a\nb", "/tmp/a\x1b[2J", os.fsdecode(b"/tmp/\xff"), "~no_such_user_here/x"])
def test_a_path_that_no_record_could_hold_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="OUTPUT_DIR=.*expected a path in UTF-8 without control characters"):
        read_settings(R1_ZERO, [], {"OUTPUT_DIR": path})


def test_the_watch_is_replaced_when_it_dies(tmp_path: Path) -> None:
    """Else nobody notices a lost node, or tells the others how a run ended that succeeds."""
    job = job_of(tmp_path, {"NNODES": "2", "MASTER_ADDR": "192.0.2.77"}).with_ray_port()
    run = HeadRun(job, NodeRole(True, "127.0.0.1", "127.0.0.1", "lo"), Console(file=io.StringIO()))
    try:
        run.watches_left, run.others_wait = 1, True
        first = run.watch = run.processes.start(["/bin/false"], os.environ, subprocess.DEVNULL)
        first.wait(60)
        run._check()
        assert run.watch is not None and run.watch is not first
        run.watch.kill()
        run.watch.wait(60)
        run._check()
        assert run.watch is None and run.others_wait, "the run goes on, and the other nodes are still to be told"
    finally:
        run.processes.end_all()


def test_the_tiny_run_takes_one_device(tmp_path: Path) -> None:
    """As on a machine with one GPU: no layout has to be given."""
    settings = read_settings(load_recipe("r1_zero"), [], {"NPUS_PER_NODE": "1", "OUTPUT_DIR": str(tmp_path)})
    assert validate_config(resolve_config(settings)) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["actor_rollout_ref.rollout.nn=4"], "nearest known key is actor_rollout_ref.rollout.n"),
        (["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2", "trainer.n_gpus_per_node=3"], "multiple"),
        (["actor_rollout_ref.actor.megatron.num_layer_list=[2,2]"], "num_layer_list"),
        (["trainer.device=cuda", "trainer.n_gpus_per_node=64"], "n_gpus_per_node is 64, and torch sees"),
    ],
)
def test_bad_configs_are_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    status = launch_with(monkeypatch, {"OUTPUT_DIR": str(tmp_path / "out")}, *arguments)
    message = capsys.readouterr().out
    assert status == launch.BAD_INPUT
    assert expected in message
    assert "Nothing was started" in message
    assert not (tmp_path / "out").exists()


def test_bad_inputs_are_all_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = {
            "OUTPUT_DIR": str(blocker / "out"),
            "RAY_PORT": str(taken.getsockname()[1]),
            "JSON_PATH": str(tmp_path / "missing.json"),
            "MODEL_PATH": str(tmp_path),
        }
        status = launch_with(monkeypatch, environment)
    message = capsys.readouterr().out
    assert status == launch.BAD_INPUT
    for expected in ("OUTPUT_DIR", "is not a directory", "RAY_PORT", "missing.json: no such file", "no config.json"):
        assert expected in message


def test_a_users_own_files_are_checked_with_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reward function, checkpoint and model in one message, before a process starts; nothing follows from the model."""
    (tmp_path / "model").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 32}))
    (tmp_path / "reward.py").write_text("def score(data_source, solution_str): return 1.0")
    environment = {"MODEL_PATH": tmp_path / "model", "JSON_PATH": tmp_path / "no.json", "OUTPUT_DIR": tmp_path / "out"}
    reward = override("custom_reward_function.path", tmp_path / "reward.py")
    resume = ("trainer.resume_mode=resume_path", override("trainer.resume_from_path", tmp_path / "run/global_step_7"))
    given = {name: str(path) for name, path in environment.items()} | {"RAY_PORT": str(free_ports(1)[0])}
    monkeypatch.setitem(TRACKERS, "clearml", replace(TRACKERS["clearml"], package="no_such_package"))
    assert launch_with(monkeypatch, given, reward, *resume, "trainer.logger=[console,clearml]") == launch.BAD_INPUT
    message = capsys.readouterr().out
    problems = [line for line in message.splitlines() if "- " in line]
    assert len(problems) == 5, message
    for expected in (
        "trainer.logger names clearml, but its package is not installed",
        "no.json: no such file",
        "model_type 'mamba' is not supported; supported: deepseek_v3",
        "reward.py defines no 'compute_score'; it defines score",
        f"global_step_7 does not exist; there is no complete checkpoint in {tmp_path / 'run'}",
    ):
        assert expected in message
    assert not (tmp_path / "out").exists()


def test_a_port_taken_while_weights_were_prepared_is_named(tmp_path: Path) -> None:
    """Ray is not started on it: it would end a moment later, and who listens there would be taken for it."""
    port = free_ports(1)[0]
    job = job_of(tmp_path, {"RAY_PORT": str(port)})
    log_dir = tmp_path / "out" / "logs" / "attempt_1"
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(RuntimeError, match=f"RAY_PORT {port}.*pid {os.getpid()}"),
    ):
        ray_node.RayNode(job, find_role(job.settings, 1), OwnProcesses(), dict(os.environ), log_dir, {})
    assert not log_dir.exists()


@pytest.mark.slow  # Ray gives up after half a minute and more
def test_a_ray_whose_agents_are_late_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a machine that is busy or reads a cold disk; a driver waits until it is up."""
    late = """import os, time
if "/agent" in open("/proc/self/cmdline").read() and not os.path.exists(os.environ["LATE"]):
    time.sleep(25)
    open(os.environ["LATE"], "w").close()
"""
    (tmp_path / "sitecustomize.py").write_text(late, "utf-8")
    job = job_of(tmp_path, {"RAY_PORT": str(free_ports(1)[0])})
    role, processes = find_role(job.settings, 1), OwnProcesses()
    environment = ray_node.ray_environment(job, role) | {"LATE": str(tmp_path / "late")}
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    log_dir = tmp_path / "out" / "logs" / "attempt_1"
    try:
        ray = ray_node.RayNode(job, role, processes, environment, log_dir, {})
        ray.wait_until_up()
        assert ray.problem() is None
        text = ray.log_path.read_text("utf-8")
        assert text.index("timed out during startup") < text.index("Ray runtime started")
        assert "it is started again" in caplog.text
    finally:
        assert processes.end_all() == []
    assert ray.keep_logs() is None


def test_read_only_disk_is_refused() -> None:
    found = checks.writable_problems("OUTPUT_DIR", Path("/proc/outputs"))
    assert len(found) == 1
    assert "cannot write" in found[0]


def test_plan_of_sixteen_nodes_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {
        "CONFIG_NAME": "cann_true_weight_671b_256die",
        "MASTER_ADDR": "192.0.2.77",
        "OUTPUT_DIR": str(tmp_path / "out"),
        "RAY_AUTH_TOKEN": "very-secret",
    }
    assert launch_with(monkeypatch, environment, "--print-plan", "actor_rollout_ref.rollout.n=8") == 0
    plan = capsys.readouterr().out
    assert "16 x 16 npu devices" in plan
    assert "training: TP4 PP8 DP8 EP32, layers per stage 7,7,8,8,8,8,8,7" in plan
    assert "rollout:  2 engines of TP2 DP64 EP128" in plan
    assert "--target-expert-parallel-size 8 --moe-tp-extend-ep" in plan
    assert plan.count("-m ray.scripts.scripts start --block") == 16
    assert plan.count("--head") == 1
    assert plan.count("HCCL_BUFFSIZE=300") == 16
    assert "tensor_model_parallel_size: 4" in plan
    assert "very-secret" not in plan
    assert not (tmp_path / "out").exists()


BESIDE = ("trainer.schedule=one_step_off", "actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=1")


def test_nodes_that_only_generate_are_started_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"MASTER_ADDR": "192.0.2.77", "OUTPUT_DIR": str(tmp_path / "out")}
    arguments = ("trainer.nnodes=2", "rollout.nnodes=1", "rollout.n_gpus_per_node=2", *BESIDE)
    assert launch_with(monkeypatch, environment, "--print-plan", *arguments) == 0
    plan = capsys.readouterr().out
    assert "3 x 2 cpu devices" in plan and "one_step_off on 2 ranks of its own" in plan
    assert plan.count("-m ray.scripts.scripts start --block") == plan.count("NNODES=3 ") == 3
    assert plan.count("launch.nodes join --num-nodes 3") == plan.count("launch.nodes watch --num-nodes 3") == 1
    assert "refuse" not in plan


@pytest.mark.parametrize(
    ("nnodes", "overrides", "trains", "devices"),
    [
        ("3", ("rollout.nnodes=1", "rollout.n_gpus_per_node=4"), 2, 4),
        ("1", ("rollout.nnodes=1", "rollout.n_gpus_per_node=2"), 1, 3),  # one node does both
        ("2", ("rollout.nnodes=2", "rollout.n_gpus_per_node=2", "trainer.nnodes=2"), 2, 3),
    ],
)
def test_nnodes_counts_nodes_of_both_kinds(
    tmp_path: Path, nnodes: str, overrides: tuple[str, ...], trains: int, devices: int
) -> None:
    job = job_of(tmp_path, {"NNODES": nnodes}, *BESIDE, *overrides)
    assert (job.nnodes, job.config.trainer.nnodes, job.npus_per_node) == (int(nnodes), trains, devices)
    assert checks.host_problems(job) == []
    given = [text for text in driver_stage(job).command if text.startswith("trainer.nnodes=")]
    assert {f"trainer.nnodes={trains}", *given} == {f"trainer.nnodes={trains}"}
    alone = job_of(tmp_path, {"NNODES": nnodes})
    assert (alone.nnodes, alone.config.trainer.nnodes) == (int(nnodes), int(nnodes))


@pytest.mark.parametrize("nnodes", ["1", "5"])
def test_nnodes_that_do_not_hold_all_ranks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nnodes: str
) -> None:
    own = network.address_towards(None, None)
    environment = {"NNODES": nnodes, "MASTER_ADDR": own, "OUTPUT_DIR": str(tmp_path / "out")}
    arguments = ("trainer.nnodes=2", "rollout.nnodes=2", "rollout.n_gpus_per_node=1", *BESIDE)
    assert launch_with(monkeypatch, environment, *arguments) == launch.BAD_INPUT
    message = " ".join(capsys.readouterr().out.split())
    assert (
        f"NNODES is {nnodes}; trainer.nnodes 2 and rollout.nnodes 2 take 4 nodes, or as few as 2 that do both"
        in message
    )


@pytest.mark.parametrize(
    ("name", "stage_layers"),
    [
        ("r1_ascend_671b_256die", (6, 8, 8, 8, 8, 8, 8, 7)),
        ("cann_true_weight_671b_256die", (7, 7, 8, 8, 8, 8, 8, 7)),
        ("cann_random_init_671b_256die", (7, 7, 8, 8, 8, 8, 8, 7)),
    ],
)
def test_named_layouts_fit_deepseek_v3(tmp_path: Path, name: str, stage_layers: tuple[int, ...]) -> None:
    from verl.trainer.config import validate_config

    job = job_of(tmp_path, {"CONFIG_NAME": name})
    assert validate_config(job.config) == []
    engine = job.config.actor_rollout_ref.actor.megatron
    layout = engine.layout(256)
    assert layout.num_layer_list == stage_layers
    assert layout.problems(num_layers=61, num_experts=256, num_attention_heads=128, vocab_size=129280) == []
    assert layout.expert_model_parallel_size == 32


def test_stages_say_why_they_are_left_out(tmp_path: Path) -> None:
    names = [stage.name for stage in stages(job_of(tmp_path)) if stage.skip_reason is None]
    assert names == ["problems", "data", "base_model", "fp8_to_bf16", "sharding"]
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    shards = tmp_path / "shards" / "iter_0000001" / "mp_rank_00"
    shards.mkdir(parents=True)
    environment = {"MODEL_PATH": str(model), "JSON_PATH": str(tmp_path / "x.json")}
    environment["DIST_CKPT_PATH"] = str(tmp_path / "shards")
    left_out = {stage.name: stage.skip_reason for stage in stages(job_of(tmp_path, environment)) if stage.skip_reason}
    assert set(left_out) == {"base_model", "fp8_to_bf16", "sharding"}


def test_the_shards_are_cut_as_the_engine_reads_them(tmp_path: Path) -> None:
    """No-op slots, a shorter end stage and virtual stages reach the converter; the tiny model has three layers."""

    def flags(*overrides: str) -> str:
        keys = [f"+actor_rollout_ref.actor.megatron.{text}" for text in overrides]
        keys += ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"]
        command = next(stage for stage in stages(job_of(tmp_path, {}, *keys)) if stage.name == "sharding").command
        return " ".join(command)

    transformer = "override_transformer_config"
    with_noop = flags(f"{transformer}.noop_layers=[3]", "virtual_pipeline_model_parallel_size=2")
    assert "--noop-layers 3" in with_noop
    assert "--num-layers-per-virtual-pipeline-stage 1" in with_noop and "--num-layer-list" not in with_noop
    uneven = flags(f"{transformer}.num_layers_in_first_pipeline_stage=1", "num_layer_list=null")
    assert "--num-layer-list 1,2" in uneven


def test_ray_is_ours_alone(tmp_path: Path) -> None:
    job = job_of(tmp_path, {"RAY_PORT": "6766"})
    head = ray_node.ray_command(job, NodeRole(True, "10.0.0.1", "10.0.0.1", "eth0"), "/tmp/x", {})
    worker = ray_node.ray_command(job, NodeRole(False, "10.0.0.2", "10.0.0.1", "eth0"), "/tmp/x", {"node_rank": "1"})
    assert "--block" in head and "--labels" not in head
    assert head[head.index("--include-dashboard") + 1] == "false"
    assert worker[worker.index("--address") + 1] == "10.0.0.1:6766"
    assert worker[worker.index("--labels") + 1] == "node_rank=1"
    assert "--head" not in worker


def test_a_lost_node_is_noticed_within_the_deadline(tmp_path: Path) -> None:
    """Two checks without an answer, and the pauses between them, fit into LOST_TIMEOUT_S."""
    variables_s = ray_node.loss_variables(20.0)
    checks_s = (int(variables_s[f"RAY_health_check_{name}_ms"]) / 1000 for name in ("timeout", "period"))
    assert sum(checks_s) * int(variables_s["RAY_health_check_failure_threshold"]) < 20.0
    assert variables_s["RAY_gcs_rpc_server_reconnect_timeout_s"] == "20"


def test_nodes_are_compared_by_their_labels() -> None:
    own = nodes.node_labels("config", ROOT, 1)
    assert all(len(value) <= 63 for value in own.values()), "Ray refuses longer ones"
    assert {"configuration", "code", "python", "torch", "node_rank"} <= own.keys()
    assert nodes.node_labels("config", ROOT, 2) == {**own, "node_rank": "2"}
    assert nodes.different_labels(own, {**own, "node_rank": "2", "ray.io/node-id": "x"}) == ""
    other = nodes.node_labels("another config", ROOT, 2)
    assert "its configuration is not the head's: start the same script" in nodes.different_labels(own, other)
    old = {**own, "torch": "2.4.0"}
    assert nodes.different_labels(own, old) == f"torch is 2.4.0, the head has {own['torch']}"
    assert "numpy is missing" in nodes.different_labels(own, {k: v for k, v in own.items() if k != "numpy"})


def test_token_is_made_once_and_private(tmp_path: Path) -> None:
    tokens = [shared_token(tmp_path, None) for _ in range(2)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 64
    assert (tmp_path / ".ray_auth_token").stat().st_mode & 0o077 == 0
    assert shared_token(tmp_path, "given") == "given"


def test_output_dir_belongs_to_one_run(tmp_path: Path) -> None:
    with only_run(tmp_path / "out"), pytest.raises(ValueError, match=f"pid {os.getpid()}"), only_run(tmp_path / "out"):
        raise AssertionError("two runs hold the lock")


def test_another_training_is_archived_and_the_same_one_is_not(tmp_path: Path) -> None:
    model, out, rows = tmp_path / "model", tmp_path / "out", tmp_path / "train.parquet"
    (out / "checkpoints" / "global_step_3").mkdir(parents=True)
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = model / "model.safetensors"
    weights.write_bytes(bytes(100_000))
    rows.write_text("rows")
    first = training_identity(1, [rows], model)
    assert archive_other_training(out, first) is None
    assert archive_other_training(out, training_identity(1, [rows], model)) is None
    assert (out / "checkpoints").is_dir()
    rows.write_text("other rows")
    moved_to = archive_other_training(out, training_identity(1, [rows], model))
    assert moved_to == out / "earlier_runs" / "1"
    assert (moved_to / "checkpoints" / "global_step_3").is_dir()
    assert not (out / "checkpoints").exists()
    assert training_identity(2, [rows], model) != training_identity(1, [rows], model)
    (out / "checkpoints").mkdir()
    weights.write_bytes(b"1" * 100_000)  # another model of the same shape
    assert archive_other_training(out, training_identity(1, [rows], model)) == out / "earlier_runs" / "2"
    (out / "checkpoints").mkdir()
    run_file = out / "run.json"
    run_file.write_text(json.dumps({"identity": json.loads(run_file.read_text())["identity"]}))  # of an older version
    assert archive_other_training(out, training_identity(1, [rows], model)) is None


def test_all_own_processes_end_and_no_other(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    script = (
        "import subprocess, sys, time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True);"
        "print('up', flush=True); time.sleep(60)"
    )
    processes = OwnProcesses()
    try:
        child = processes.start([sys.executable, "-c", script], dict(os.environ), subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        ours = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        assert len(ours) == 2
        assert processes.end_all(grace_s=0.5) == []
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ours)
        assert stranger.poll() is None
        child.stdout.close()
    finally:
        processes.end_all(grace_s=0.1)
        stranger.kill()
        stranger.wait()


def test_children_end_with_a_killed_launcher(tmp_path: Path) -> None:
    """As when the launcher is killed with SIGKILL: its child gets SIGTERM from the kernel."""
    script = (
        "import os, sys, time, subprocess;"
        "from tools.launch.processes import OwnProcesses;"
        "child = OwnProcesses().start([sys.executable, '-c', 'import time; time.sleep(60)'], dict(os.environ), "
        "subprocess.DEVNULL);"
        "time.sleep(0.5); print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([child], timeout=5)
    assert not alive


def test_scripts_parse_and_help_needs_nothing() -> None:
    for script in (ROOT / "recipes").rglob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)
    assert launch.main(["--help"]) == 0
    assert launch.main([]) == launch.BAD_INPUT
    assert launch.main(["r1_one"]) == launch.BAD_INPUT


@pytest.mark.parametrize("name", recipe_names())
def test_help_comes_before_set_up_and_needs_no_package(tmp_path: Path, name: str) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    recipe = load_recipe(name)
    done = subprocess.run(
        [*recipe.start_command.split(), "key=value", "--help"],
        env={"PATH": os.environ["PATH"], "PYTHON": str(python), "VENV_DIR": str(tmp_path / "venv"), "COLUMNS": "400"},
        capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {recipe.start_command} [--help]")
    assert all(f"\n{variable} " in done.stdout for variable in variables(recipe))
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_its_parts_and_says_all_variables(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    folder = ROOT / "recipes" / name
    for path in (recipe.reward_path, folder / recipe.script, recipe.config_dir / f"{recipe.tiny_config}.yaml"):
        assert path.is_file(), path
    assert (recipe.config_dir / f"{recipe.full_config}.yaml").is_file()
    assert launch.main([name, "--help"]) == 0
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert recipe.start_command in readme
    pages = readme + (ROOT / "docs" / "launcher.md").read_text(encoding="utf-8")
    for variable, (default, meaning) in variables(recipe).items():
        default = default.replace(f"outputs/{name}", "outputs/RECIPE") if variable != "CONFIG_NAME" else default
        assert f"| `{variable}` | {default} | {meaning} |" in pages
