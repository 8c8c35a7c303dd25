"""MODEL_PATH as a hub's name, fetched from a hub on this machine with its data, or a GGUF file; what it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hf_formats.stamps import write_stamp
from recipes.common.recipe import ROOT, load_recipe
from recipes.common.tiny_models import QWEN3
from tests.tools.test_download import hub
from tools.download import PACKAGES
from tools.download_sources import SOURCES
from tools.launch import __main__ as launch
from tools.launch.checks import hub_problems, model_problems
from tools.launch.hub import fetch_model, model_directory
from tools.launch.job import Job, resolve_config
from tools.launch.settings import Settings, read_settings
from tools.launch.stages import stages

NAME = "Qwen/Qwen3-0.6B"
FILES = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}", "model.safetensors": b"weights"}


def run_on(endpoint: str, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"MODEL_PATH": NAME, "OUTPUT_DIR": str(tmp_path / "out")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_plan_needs_the_description_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"config.json": json.dumps(QWEN3.config).encode(), **FILES}
    with hub({f"models/{NAME}": content, NAME: content}) as endpoint:
        monkeypatch.setenv("DEGREES", "4")  # GSM8K itself, which a small model does not start with
        done = run_on(endpoint, tmp_path, "-m", "tools.launch", "gsm8k", "--print-plan")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Plan: gsm8k_cpu on 1 x 1 cpu devices" in done.stdout
    fetched = tmp_path / "out" / "hub" / "Qwen--Qwen3-0.6B"
    assert {path.name for path in fetched.iterdir() if path.is_file()} == {*content} - {"model.safetensors"}
    assert f"tools.download gsm8k --to {tmp_path}/out/hub/gsm8k --source huggingface" in done.stdout


def test_without_a_hub_nothing_starts(tmp_path: Path) -> None:
    """The launcher lists this ValueError, as every other."""
    call = f"fetch_model({NAME!r}, 'huggingface', Path({str(tmp_path)!r}), True)"
    with hub({}) as endpoint:
        done = run_on(endpoint, tmp_path, "-c", f"from tools.launch.hub import *; {call}")
    expected = (
        f"ValueError: MODEL_PATH {NAME}: no such directory here, and huggingface does not give a model of that name ("
    )
    assert expected in done.stderr


@pytest.mark.parametrize("model", ["", str(QWEN3.directory), NAME])
def test_a_hub_that_nobody_knows_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    """Also beside a model that is here: its data set would be fetched."""
    for name, value in {"MODEL_SOURCE": "elsewhere", "MODEL_PATH": model, "OUTPUT_DIR": str(tmp_path / "out")}.items():
        monkeypatch.setenv(name, value)
    assert launch.main(["gsm8k"]) == launch.BAD_INPUT
    message = capsys.readouterr().out
    assert "- MODEL_SOURCE is 'elsewhere'; expected huggingface or modelscope" in message
    assert "Nothing was started" in message and not (tmp_path / "out").exists()


def test_a_hub_without_its_package_is_refused_before_the_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "modelscope", "no_such_package")
    given = {"OUTPUT_DIR": str(tmp_path), "MODEL_PATH": str(QWEN3.directory), "MODEL_SOURCE": "modelscope"}
    settings = read_settings(load_recipe("gsm8k"), [], given)
    found = hub_problems(Job(settings, resolve_config(settings)))
    assert found == ["MODEL_SOURCE=modelscope needs its package: pip install no_such_package; or set INPUT_DIR"]
    settings = replace(settings, input_path=tmp_path)
    assert hub_problems(Job(settings, resolve_config(settings))) == []


def test_what_is_complete_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "hub" / "Qwen--Qwen3-0.6B"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"weights")
    write_stamp(directory, {"model": NAME})
    assert fetch_model(NAME, "huggingface", tmp_path, with_weights=True) == directory
    here = tmp_path / NAME
    assert model_directory(NAME, here, "huggingface", tmp_path, with_weights=True) == directory
    here.mkdir(parents=True)
    assert model_directory(NAME, here, "huggingface", tmp_path, with_weights=True) == here


def test_a_gguf_file_becomes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("mindspeed_llm.convert_gguf.convert_gguf", lambda *paths: asked.append(paths))
    gguf = tmp_path / "tiny.Q8_0.gguf"
    gguf.touch()
    directory = tmp_path / "out" / "gguf" / "tiny.Q8_0"
    assert model_directory("tiny.Q8_0.gguf", gguf, "huggingface", tmp_path / "out", with_weights=True) == directory
    assert asked == [(gguf, directory)]


def test_a_gguf_file_that_changed_is_converted_again(tmp_path: Path) -> None:
    from tests.mindspeed_llm.gguf_side import write_gguf  # it skips where gguf is not installed

    gguf = tmp_path / "tiny.gguf"

    def converted(kind: str) -> dict[str, int]:
        """Each file of the folder with the time of its making."""
        write_gguf(gguf, QWEN3.config | {"torch_dtype": "float32"}, kind)
        directory = model_directory("tiny.gguf", gguf, "huggingface", tmp_path, with_weights=True)
        assert model_problems(directory) == []
        return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}

    first = converted("F32")
    assert converted("F32") == first  # written again, with the same content
    assert converted("F16")["config.json"] > first["config.json"]


def test_a_gguf_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    gguf = tmp_path / "notes.gguf"
    gguf.write_text("no model")
    with pytest.raises(ValueError, match=f"MODEL_PATH {gguf}: "):
        model_directory(str(gguf), gguf, "huggingface", tmp_path / "out", with_weights=True)


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ("smollm2-135", "; did you mean smollm2-135m?"),
        ("SmolLM2_135M", "; did you mean smollm2-135m?"),
        ("/models/absent", ""),
        ("gsm8k", ""),  # a data set
        ("model.safetensors", ""),
    ],
)
def test_what_is_no_model_is_one_error_with_all_that_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, end: str
) -> None:
    (tmp_path / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    for name, value in {"MODEL_PATH": given, "OUTPUT_DIR": str(tmp_path / "out")}.items():
        monkeypatch.setenv(name, value)
    assert launch.main(["gsm8k"]) == launch.BAD_INPUT
    forms = "neither a Hugging Face directory, nor a GGUF file (.gguf), nor a hub's name such as Qwen/Qwen3-0.6B"
    names = ", ".join(name for name, source in SOURCES.items() if not source.is_dataset)
    expected = f"error: MODEL_PATH {given} is {forms}, nor one of {names}{end}\nNothing was"
    assert expected in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_the_data_set_is_fetched_once_and_only_for_a_model(tmp_path: Path) -> None:
    settings = read_settings(load_recipe("gsm8k"), [], {"OUTPUT_DIR": str(tmp_path)})
    assert (settings.config_name, first_stage(settings)) == ("gsm8k_tiny", "problems")
    given = {"OUTPUT_DIR": str(tmp_path), "MODEL_PATH": str(QWEN3.directory)}
    settings = read_settings(load_recipe("gsm8k"), [], given)
    assert (settings.config_name, first_stage(settings)) == ("gsm8k_cpu", "fetch")
    assert read_settings(load_recipe("gsm8k"), [], given, "cuda").config_name == "gsm8k"
    assert first_stage(replace(settings, input_path=tmp_path)) == "data"
    main = tmp_path / "hub" / "gsm8k" / "main"
    main.mkdir(parents=True)
    for side in ("train", "test"):
        (main / f"{side}-00000-of-00001.parquet").touch()
    assert stages(Job(settings, resolve_config(settings)))[0].skip_reason == f"it is in {main.parent}"


def first_stage(settings: Settings) -> str:
    return stages(Job(settings, resolve_config(settings)))[0].name
