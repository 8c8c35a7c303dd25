"""`vllm serve`: the command from any directory, each of vLLM's options, and mistakes that are one message."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.pages import ROOT
from tests.vllm.serving import server_process, write_served_checkpoint
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.client_args import CLIENT_ARGS
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.openai.api_server import bind, serve_in_background
from vllm.entrypoints.openai.cli_args import SERVER_ONLY, ServerArgs, parse_args


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_served_checkpoint(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command as tools/setup_env.sh makes it, in an environment whose path has a space."""
    environment = tmp_path_factory.mktemp("an environment")
    (environment / "bin").mkdir()
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    script = ["bash", "tools/setup_env.sh", "command"]
    subprocess.run(script, cwd=ROOT, env={**os.environ, "VENV_DIR": str(environment)}, check=True, timeout=30)
    return str(environment / "bin" / "vllm")


def test_the_command_serves_from_any_directory(
    command: str, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()  # another vllm beside it is not taken
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    options = ["--served-model-name", "r1", "tiny", "--swap-space", "4", "--max-num-seqs", "4", "--trust_remote_code"]
    lines: list[str] = []
    with server_process(checkpoint, 0, *options, command=[command, "serve"], lines=lines) as (process, port):
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["r1", "tiny"]
            assert client.completions.create(model="tiny", prompt="a", max_tokens=2).model == "r1"
        process.terminate()
        assert process.wait(20) == 0
    log = "".join(lines)
    assert "trust_remote_code=True: code of model directories is never executed" in log
    assert "swap_space=4.0: a preempted sequence is computed again and never swapped" in log


def test_what_stops_the_start_is_one_message(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mamba = Path(shutil.copytree(checkpoint, tmp_path / "mamba"))
    config = json.loads((mamba / "config.json").read_text())
    (mamba / "config.json").write_text(json.dumps(config | {"model_type": "mamba", "architectures": ["MambaFor"]}))
    cut = Path(shutil.copytree(checkpoint, tmp_path / "cut"))
    for file in cut.glob("*.safetensors"):
        os.truncate(file, 100)
    odd = Path(shutil.copytree(checkpoint, tmp_path / "odd"))
    (odd / "generation_config.json").write_text('{"temperature": -1}')
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        wrong: dict[str, list[str]] = {
            "MODEL=deepseek-ai/DeepSeek-R1 is not a directory": ["deepseek-ai/DeepSeek-R1"],
            "model_type 'mamba' is not supported; supported: deepseek_v3": [str(mamba)],
            "is truncated or not safetensors": [str(cut)],
            "temperature=-1 must be 0": [str(odd)],
            f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port": [
                checkpoint,
                "--port",
                port,
            ],
            "--host nowhere.invalid is not an address": [checkpoint, "--host", "nowhere.invalid"],
            "max_model_len=9999 exceeds": [checkpoint, "--max-model-len", "9999"],
        }
        for message, options in wrong.items():
            given = options if "--port" in options else [*options, "--port", "0"]
            assert main(["serve", *given]) == 2
            printed = capsys.readouterr().err
            assert f"vllm serve: error: {message}" in printed or message in printed.partition("error: ")[2], printed
            assert "Traceback" not in printed and "usage:" not in printed


REFUSED = {
    "there is no MODEL": [],
    "there is more than one MODEL: a, b": ["a", "b"],
    "--max-model-length is not an option, did you mean --max-model-len?": ["a", "--max-model-length", "5"],
    "reasoning_parser='glm' is unknown, expected one of: deepseek_r1, qwen3": ["a", "--reasoning-parser", "glm"],
    "tensor_parallel_size=2: the server runs a model in one process": ["a", "-tp", "2"],
    "enable_auto_tool_choice needs tool_call_parser, one of hermes": ["a", "--enable-auto-tool-choice"],
    "tool_call_parser='x' is unknown, expected one of: hermes": ["a", "--tool-call-parser", "x"],
    "argument --port: 'x' is no whole number": ["a", "--port", "x"],
    "argument --max-model-len: '1.2345k' is no whole number": ["a", "--max-model-len", "1.2345k"],
    "--config /not/there cannot be read": ["a", "--config", "/not/there"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_wrong_option_is_refused_by_name(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *REFUSED[message]])
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in printed and len(printed.splitlines()) == 2


def test_all_problems_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(
            ["a", "--port", "-3", "--lora-modules", "x=y", "--kv-cache-dtype", "fp8", "--uvicorn-log-level", "no"]
        )
    printed = capsys.readouterr().err
    for name in ("port=-3", "lora_modules=", "kv_cache_dtype=", "uvicorn_log_level="):
        assert f"  - {name}" in printed


# What vLLM's users commonly give, with a value that is not the default here.
COMMON: dict[str, Any] = {
    "host": "0.0.0.0", "port": 8001, "api_key": "k", "served_model_name": ["r1"], "dtype": "bfloat16",
    "max_model_len": 100, "gpu_memory_utilization": 0.5, "max_num_seqs": 8, "enable_prefix_caching": False,
    "enable_chunked_prefill": False, "enforce_eager": False, "seed": 3, "disable_log_requests": True,
    "uvicorn_log_level": "warning", "chat_template": "{{ messages }}", "reasoning_parser": "deepseek_r1",
    "load_format": "dummy", "quantization": "dequantize",
}  # fmt: skip
NO_EFFECT = {"trust_remote_code", "swap_space", "disable_log_stats"}


def test_common_options_are_acted_on(checkpoint: str) -> None:
    words = ["DIR"]
    for name, value in COMMON.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{option}")
        else:
            words += [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
    server, engine, notes = parse_args(words)
    assert notes == []
    for name, value in COMMON.items():
        assert getattr(server if hasattr(server, name) else engine, name) == value
    assert EngineArgs(checkpoint, dtype="half").create_engine_config(0, 1).model.dtype == "float16"
    assert engine.model == "DIR" == parse_args(["--model", "DIR"])[1].model


def test_options_come_from_a_file_and_numbers_have_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: DIR\nport: 9000\nserved-model-name: [r1, r2]\nmax_model_len: 4k\nenforce-eager: true\n"
        "enable-prefix-caching: false\nswap-space: 8\nspeculative-config: {method: ngram}\ndtype:\n"
    )
    server, engine, notes = parse_args(["--config", str(file), "--port", "8k", "--max-num-seqs=1K"])
    assert (server.port, server.served_model_name, engine.model) == (8000, ["r1", "r2"], "DIR")
    assert (engine.max_model_len, engine.max_num_seqs, engine.enforce_eager) == (4000, 1024, True)
    assert engine.enable_prefix_caching is False and engine.speculative_config == {"method": "ngram"}
    assert [note.partition("=")[0] for note in notes] == ["swap_space"]
    file.write_text("prot: 9000\n")
    with pytest.raises(SystemExit):
        parse_args(["DIR", "--config", str(file)])
    assert "--prot is not an option, did you mean --port?" in capsys.readouterr().err


def test_every_other_option_is_noted_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    others = {**CLIENT_ARGS, **SERVER_ONLY}
    assert not others.keys() & EngineArgs.__dataclass_fields__.keys()
    assert {name for name, known in others.items() if known.accepted is None} >= NO_EFFECT
    for name, known in others.items():
        if name in ServerArgs.__dataclass_fields__:
            continue
        option, value = "--" + name.replace("_", "-"), [] if known.kind is bool else ["7"]
        if known.accepted is None:
            [note] = parse_args(["DIR", option, *value])[2]
            assert note.startswith(f"{name}=") and note.endswith(known.reason)
            continue
        with pytest.raises(SystemExit):
            parse_args(["DIR", option, *value])
        assert f"{name}=" in capsys.readouterr().err


def test_sampling_that_a_request_leaves_out_is_the_models(checkpoint: str, tmp_path: Path) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 5, "eos_token_id": 1}')
    llm = LLM(str(model), num_gpu_blocks_override=200)
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.max_tokens) == (0.0, 5)
    [left_out], [given] = llm.generate("abc"), llm.generate("abc", default)
    assert left_out.outputs[0].token_ids == given.outputs[0].token_ids

    def texts(requests: list[dict[str, Any]], **args: Any) -> list[str]:
        with (
            serve_in_background(llm, ServerArgs(port=0, served_model_name=["r1"], **args)) as server,
            openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client,
        ):
            body: dict[str, Any] = {"model": "r1", "prompt": "abc", "extra_body": {"ignore_eos": True}}
            return [client.completions.create(**body, **one).choices[0].text for one in requests]

    sampled = {"temperature": 1.0, "seed": 1, "max_tokens": 5}
    ours, plain, asked = texts([{}, {"temperature": 0, "max_tokens": 40}, sampled])
    assert ours == plain and len(ours) <= 5, "the model's temperature, and its limit for every request"
    [greedy, free] = texts(
        [{"temperature": 0, "max_tokens": 5}, {"seed": 1, "max_tokens": 5}], generation_config="vllm"
    )
    assert greedy == ours and free == asked != ours
    override = '{"temperature": 1.0, "max_new_tokens": 2}'
    [two] = texts([{"seed": 1}], override_generation_config=override)
    assert asked.startswith(two) and len(two) <= 2
    llm.shutdown()


@pytest.fixture
def served(checkpoint: str) -> Iterator[LLM]:
    llm = LLM(checkpoint, num_gpu_blocks_override=200)
    yield llm
    llm.shutdown()


@pytest.mark.parametrize("is_off", [False, True])
def test_the_log_has_a_line_for_each_request(served: LLM, is_off: bool, caplog: pytest.LogCaptureFixture) -> None:
    args = ServerArgs(port=0, served_model_name=["r1"], disable_log_requests=is_off)
    with (
        caplog.at_level(logging.INFO),
        serve_in_background(served, args) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        client.completions.create(model="r1", prompt=["ab", "c"], max_tokens=3, n=2, extra_body={"ignore_eos": True})
        list(client.completions.create(model="r1", prompt="abc", max_tokens=3, stream=True))
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other\n\x1b[31m", prompt="abc")
        client.get(f"{server.url}/health", cast_to=object)
        with pytest.raises(openai.NotFoundError):
            client.get(f"{server.url}/no%0Awhere", cast_to=object)
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("request_log")]
    if is_off:
        assert lines == []
        return
    first, second, wrong, nowhere = lines
    assert first.startswith("127.0.0.1:") and " POST /v1/completions 200 in 0." in first
    assert ": cmpl-" in first and first.endswith("3 prompt tokens, 12 generated (4 length)")
    assert "3 prompt tokens" in second
    assert " POST /v1/completions 404 in " in wrong and "is not served here" in wrong
    assert " GET /no%0Awhere 404 in " in nowhere
    assert all(line.isprintable() for line in lines)
