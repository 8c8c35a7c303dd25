"""Bar 7: bad input, through the user's command: one screen that names it, exit status 2, nothing started or written."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.common.recipe import ROOT
from tests.system.command import Command, clean_environment
from tests.system.jobs import SMALL, Prepared
from tools.launch import __main__ as launch
from tools.launch import network
from verl.trainer.config.override_text import override

SCREEN_LINES = 25
BAD_INPUT = 2


def refused(environment: Mapping[str, object], arguments: Sequence[str] = SMALL) -> str:
    """Call the entry point behind the user's command in this process; it must refuse. Returns its message."""
    user = clean_environment() | {name: str(value) for name, value in environment.items()}
    children = set(psutil.Process().children(recursive=True))
    output = io.StringIO()
    with mock.patch.dict(os.environ, user, clear=True), redirect_stdout(output):
        assert launch.main(["r1_zero", *arguments]) == BAD_INPUT, output.getvalue()
    assert not set(psutil.Process().children(recursive=True)) - children
    return checked(output.getvalue(), environment)


def checked(message: str, environment: Mapping[str, object]) -> str:
    """Return the message of a run that was refused; it fits a screen, and nothing was started or written."""
    assert len(message.splitlines()) < SCREEN_LINES, message
    assert "error: " in message
    assert "Nothing was started." in message
    assert "Traceback" not in message
    assert not Path(str(environment["OUTPUT_DIR"])).exists()
    return message


def model_copy(prepared: Prepared, folder: Path) -> tuple[Path, list[Path]]:
    """A copy of the base model to spoil, and its shards."""
    shutil.copytree(prepared.model_path, folder / "model")
    return folder / "model", sorted((folder / "model").glob("*.safetensors"))


def test_unknown_key(prepared: Prepared, tmp_path: Path) -> None:
    """The command itself offers the nearest known name; several at once are all named."""
    arguments = ["actor_rollout_ref.rollout.temprature=0.5", "trainer.save_frequ=3"]
    environment = prepared.environment(tmp_path / "run")
    with Command(tmp_path / "output.log", environment, arguments) as command:
        assert command.wait() == BAD_INPUT, command.tail()
        assert command.left_behind() == []
        message = checked(command.text(), environment)
    for expected in ("rollout.temprature", "actor_rollout_ref.rollout.temperature", "trainer.save_freq"):
        assert expected in message


def test_layout_that_does_not_divide(prepared: Prepared, tmp_path: Path) -> None:
    """Every fault of the layout is in the one message."""
    arguments = [
        "trainer.n_gpus_per_node=3",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ]
    message = refused(prepared.environment(tmp_path / "run"), arguments)
    assert "world size 3 is not a multiple of TP 1 x PP 2 x CP 1 = 2" in message
    assert "world size 3 is not a multiple of expert TP 1 x EP 3 x PP 2 = 6" in message
    assert "rollout.tensor_model_parallel_size is 2; it must divide the 3 devices" in message


def test_layout_that_does_not_fit_the_model(prepared: Prepared, tmp_path: Path) -> None:
    """The model is still in its FP8 form, so its layers and experts are read from there."""
    arguments = [
        "trainer.n_gpus_per_node=6",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.num_layer_list=[2,2]",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=3",
    ]
    message = refused(prepared.environment(tmp_path / "run"), arguments)
    assert message.count(f"MODEL_PATH {prepared.model_path} (3 layers, 8 experts): ") >= 3
    assert "8 experts do not divide over the 6 rollout ranks" in message


def test_missing_shard(prepared: Prepared, tmp_path: Path) -> None:
    """The file is named."""
    model, shards = model_copy(prepared, tmp_path)
    shards[1].unlink()
    message = refused(prepared.environment(tmp_path / "run", MODEL_PATH=model))
    assert shards[1].name in message
    assert str(model) in message


def test_truncated_shard(prepared: Prepared, tmp_path: Path) -> None:
    """As a download that broke off leaves it: the file is named."""
    model, shards = model_copy(prepared, tmp_path)
    with shards[0].open("r+b") as file:
        file.truncate(shards[0].stat().st_size - 100)
    message = refused(prepared.environment(tmp_path / "run", MODEL_PATH=model))
    assert shards[0].name in message


def test_wrong_parquet_schema(prepared: Prepared, tmp_path: Path) -> None:
    """Both files are looked at, and every missing column is named."""
    wrong = tmp_path / "wrong.parquet"
    pq.write_table(pa.table({"prompt": ["a text, not a chat"], "data_source": ["x"]}), wrong)
    arguments = [*SMALL, override("data.train_files", wrong), override("data.val_files", tmp_path / "absent.parquet")]
    message = refused(prepared.environment(tmp_path / "run"), arguments)
    for expected in (
        "data.train_files",
        "column 'prompt' is string",
        "no column 'reward_model'",
        "absent.parquet does",
    ):
        assert expected in message


def test_json_that_is_no_list_of_problems(prepared: Prepared, tmp_path: Path) -> None:
    """The file and the form it should have are named."""
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"problem": "1 + 1", "answer": "2"}))
    message = refused(prepared.environment(tmp_path / "run", JSON_PATH=wrong))
    assert f"JSON_PATH {wrong}: holds a dict; expected a JSON list" in message


def test_port_in_use(prepared: Prepared, tmp_path: Path) -> None:
    """The port and, where it can be seen, the process that holds it are named."""
    with socket.create_server((network.address_towards(None, None), 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(prepared.environment(tmp_path / "run", RAY_PORT=port))
    assert f"RAY_PORT {port} cannot be used" in message
    assert "set RAY_PORT to a free port" in message


def test_output_below_a_file(prepared: Prepared, tmp_path: Path) -> None:
    """Somewhere that no folder can be made."""
    (tmp_path / "file").write_text("not a folder")
    message = refused(prepared.environment(tmp_path / "file" / "run"))
    assert f"OUTPUT_DIR {tmp_path / 'file' / 'run'}: {tmp_path / 'file'} is not a directory" in message


@pytest.mark.parametrize("variables", [{"NNODES": "two", "RAY_PORT": "80"}])
def test_bad_variables(prepared: Prepared, tmp_path: Path, variables: Mapping[str, str]) -> None:
    """Every one is named."""
    message = refused(prepared.environment(tmp_path / "run", **variables))
    for name in variables:
        assert f"{name}=" in message


def test_everything_wrong_is_in_one_message(prepared: Prepared, tmp_path: Path) -> None:
    """Through the command: variables, options, keys, values, input, model, plug-ins and the checkpoint to resume."""
    (tmp_path / "model").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    (tmp_path / "reward.py").write_text("def compute_score(a, b:\n    return 1\n")
    (tmp_path / "checkpoints").mkdir()
    wrong = {"JSON_PATH": tmp_path / "absent.json", "MODEL_PATH": tmp_path / "model", "NNODES": "two"}
    arguments = [
        "--bad",
        "foo=1",
        "trainer.save_freq=abc",
        "trainer.n_gpus_per_node=3",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
        "trainer.logger=absent",
        override("custom_reward_function.path", tmp_path / "reward.py"),
        f"data.custom_cls={{path:{tmp_path / 'absent.py'},name:Mine}}",
        "trainer.resume_mode=resume_path",
        override("trainer.resume_from_path", tmp_path / "checkpoints" / "global_step_7"),
    ]
    environment = prepared.environment(tmp_path / "run") | wrong
    with Command(tmp_path / "output.log", environment, arguments) as command:
        assert command.wait() == BAD_INPUT, command.tail()
        message = checked(command.text(), environment)
    for expected in (
        "NNODES='two': expected a whole number",
        "'--bad' is neither an option nor an override",
        "unknown key foo, and none is like it",
        "trainer.save_freq is 'abc'",
        "world size 3 is not a multiple of",
        "trainer.logger is ['absent']; expected names out of",
        f"JSON_PATH {tmp_path / 'absent.json'}: no such file",
        "model_type 'mamba' is not supported; supported: deepseek_v3",
        "reward.py is not Python in line 1: '(' was never closed",
        f"data.custom_cls: {tmp_path / 'absent.py'} does not exist",
        f"global_step_7 does not exist; there is no complete checkpoint in {tmp_path / 'checkpoints'}",
    ):
        assert message.count(expected) == 1, expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["foo=["], "'foo=[' is not an override: no viable alternative"),
        (["algorithm.filter_groups={enable:True,filter_path:absent.py:keeps}"], "filter_groups.filter_path"),
        (["data.sampler={class_path:absent.py,class_name:Mine}"], "data.sampler: absent.py does not exist"),
        (["trainer.train_only=absent"], "trainer.train_only: absent has no records"),
    ],
)
def test_other_arguments(prepared: Prepared, tmp_path: Path, arguments: Sequence[str], expected: str) -> None:
    """With a wrong JSON_PATH beside them; what a plug-in's file lacks is known before anything starts."""
    wrong = tmp_path / "absent.json"
    message = refused(prepared.environment(tmp_path / "run", JSON_PATH=wrong), arguments)
    assert expected in message and f"JSON_PATH {wrong}: no such file" in message


@pytest.mark.parametrize("given", ["wandb", "[console,wandb]", '["console","wandb"]'])
def test_a_tracker_that_is_not_installed(prepared: Prepared, tmp_path: Path, given: str) -> None:
    with mock.patch.dict(sys.modules, {"wandb": None}):  # as find_spec sees a package that is not there
        message = refused(prepared.environment(tmp_path / "run"), [*SMALL, f"trainer.logger={given}"])
    assert "trainer.logger names wandb, but its package is not installed here: pip install wandb" in message


@pytest.mark.parametrize("content", [b"[]", b"{", bytes(range(128, 256)), b'{"model_type": "deepseek_v3"}'])
def test_config_json_that_is_none(prepared: Prepared, tmp_path: Path, content: bytes) -> None:
    model, _ = model_copy(prepared, tmp_path)
    (model / "config.json").write_bytes(content)
    message = refused(prepared.environment(tmp_path / "run", MODEL_PATH=model))
    assert f"MODEL_PATH: {model / 'config.json'}" in message


@pytest.mark.parametrize("name", ["HOSTFILE", "PLAN_DEVICE", "CONFIG_NAME"])
def test_files_that_are_no_text(prepared: Prepared, tmp_path: Path, name: str) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_bytes(bytes(range(128, 256)))
    message = refused(prepared.environment(tmp_path / "run", **{name: wrong}))
    assert f"{wrong} is not" in message


def test_the_driver_alone_refuses_as_well(prepared: Prepared, tmp_path: Path) -> None:
    """``python -m verl.trainer.main_ppo`` is a command of its own; it checks before it starts Ray."""
    overrides = {
        "actor_rollout_ref.model.path": prepared.model_path,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.temprature": 0.5,
        "actor_rollout_ref.rollout.n": 0,
        "data.train_files": tmp_path / "absent.parquet",
        "trainer.default_local_dir": tmp_path / "run" / "checkpoints",
        "trainer.report_dir": tmp_path / "run",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in overrides.items())]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == BAD_INPUT, ended.stderr[-3000:]
    for expected in (
        f"data.train_files: {tmp_path / 'absent.parquet'} does not exist",
        "unknown key actor_rollout_ref.rollout.temprature; the nearest known key is",
        "actor_rollout_ref.rollout.n",
    ):
        assert expected in ended.stderr
    assert len(ended.stderr.splitlines()) < SCREEN_LINES
    assert not (tmp_path / "run").exists()
