"""The command lines of the seeds and of verl's 20 Megatron launch scripts, as data, resolve to their values here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.mindspeed_llm.test_weight_plan import DEEPSEEK_V3
from verl.trainer.command_line import CommandLine, read_command_line
from verl.trainer.config import (
    ConfigError,
    PPOTrainerConfig,
    WithoutEffect,
    compose_config,
    load_config,
    resolve_config,
    validate_config,
)
from verl.trainer.config.declared import other_names
from verl.trainer.config.override_text import override
from verl.trainer.config.upstream_keys import ASYNC_KEYS, list_of_names

FOLDER = Path(__file__).parent / "upstream_scripts"
# The module of a script -> the one that runs it here.
MODULES = {
    "verl.trainer.main_ppo",
    "recipe.dapo.main_dapo",
    "recipe.one_step_off_policy.main_ppo",
    "recipe.fully_async_policy.fully_async_main",
    "recipe.r1_ascend.main_ppo",
    "verl_patches.trainer.main_ppo_npu",
}
# Scripts that are refused -> the missing feature, as the message names it.
REFUSED = {"dapo_qwen3_30b_fp16": "no float16 training", "ppo_qwen2_5_05b_e2e": "there is no reward network"}
ACCEPTED = sorted({path.stem for path in FOLDER.glob("*.args")} - REFUSED.keys())
# Values of the 20 scripts that are refused, of all their values.
REFUSED_VALUES = {
    ("actor_rollout_ref.actor.megatron.dtype", "float16"),
    ("actor_rollout_ref.rollout.dtype", "float16"),
    ("algorithm.adv_estimator", "gae"),
    ("reward_model.enable", "True"),
}


def script_arguments(name: str) -> list[str]:
    """The arguments of a script; its module is one that runs here under another name."""
    module, *arguments = (line for line in (FOLDER / f"{name}.args").read_text().splitlines() if line[0] != "#")
    assert module in MODULES
    return arguments


@cache
def _resolve(name: str, *more: str) -> tuple[CommandLine, PPOTrainerConfig, list[WithoutEffect]]:
    args = read_command_line([*script_arguments(name), *more])
    composed = compose_config(args.overrides, config_name=args.config_name, config_dir=args.config_dir)
    return args, *resolve_config(composed)


def _problems(name: str) -> list[str]:
    try:
        return validate_config(_resolve(name)[1])
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_value_of_a_script_arrives_or_is_reported(name: str) -> None:
    args, config, taken = _resolve(name)
    assert _problems(name) == []
    resolved, reported = asdict(config), {item.key for item in taken}
    given = {}
    for text in args.overrides:
        parsed = OverridesParser.create().parse_override(text)
        given[parsed.get_key_element().lstrip("+")] = parsed.value()
    assert len(given) > 35
    for key, value in given.items():
        key = other_names().get(key, key)
        if key in reported or key in ASYNC_KEYS or (key, value) == ("data.train_batch_size", 0):
            continue  # these: test_accepted_keys.py
        found: Any = resolved
        for part in key.split("."):
            found = found[part]
        value = list_of_names(value) if isinstance(found, list) and isinstance(value, str) else value
        if isinstance(found, str) and isinstance(value, str | float):  # a threshold may be a number or text
            assert found.endswith(str(value).removeprefix("~")), key
        else:
            assert found == value or (value == "" and found is None), key


@pytest.mark.parametrize(("name", "feature"), REFUSED.items())
def test_a_script_that_cannot_run_names_one_missing_feature(name: str, feature: str) -> None:
    problems = _problems(name)
    assert problems and all(feature in problem for problem in problems), problems


def _union() -> Iterator[tuple[str, list[str]]]:
    for line in (FOLDER / "union.tsv").read_text().splitlines():
        if not line.startswith("#"):
            _, key, values = line.split("\t")
            yield key.lstrip("+"), [value.strip() for value in values.split("|")]


def test_every_value_of_the_20_scripts_is_accepted_but_those_of_three_features() -> None:
    """All first values together, then all second ones, and so on: each alone would say the same, slower."""
    union = dict(_union())
    assert len(union) >= 215
    refused = set()
    for index in range(max(map(len, union.values()))):
        chosen = {key: values[min(index, len(values) - 1)] for key, values in union.items()}
        chosen["trainer.schedule"] = "fully_async"  # all keys of rollout and async_training belong to it
        chosen |= {"actor_rollout_ref.actor.ppo_mini_batch_size": "128", "async_training.require_batches": "1"}
        refused |= _refused_of(chosen)
    assert refused == REFUSED_VALUES


def _refused_of(chosen: dict[str, str]) -> set[tuple[str, str]]:
    """Keys with values that the typed config or the values of a section refuse; layouts and sums are not looked at."""
    refused: set[tuple[str, str]] = set()
    while True:
        try:
            config = load_config([f"{key}={value}" for key, value in chosen.items()])
        except ConfigError as error:
            named = {key for key in chosen if any(f"{key} is " in problem for problem in error.problems)}
            assert len(named) == len(error.problems), error
            refused |= {(key, chosen.pop(key)) for key in named}
            continue
        values = ("expected one of", "which needs the values of a critic")
        told = [problem for problem in validate_config(config) if any(text in problem for text in values)]
        named = {key for key in chosen for problem in told if f"{key} is " in problem}
        return refused | {(key, chosen[key]) for key in named}


@pytest.mark.parametrize("name", ["dapo_deepseek_671b_12_nodes", "grpo_deepseek_671b_32_nodes", "seed_r1_ascend"])
def test_layouts_of_671b_fit_the_model(tmp_path: Path, name: str) -> None:
    scaling = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    more = {"max_position_embeddings": 163840, "vocab_size": 129280, "num_attention_heads": 128}
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK_V3, **more, "rope_scaling": scaling}))
    _, config, taken = _resolve(name, override("actor_rollout_ref.model.path", tmp_path))
    assert validate_config(config) == []
    counts = config.actor_rollout_ref.actor.megatron.layer_counts(61)
    assert counts is not None and sum(counts) == 61
    assert name != "seed_r1_ascend" or counts == (6, 8, 8, 8, 8, 8, 8, 7)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.enable_expert_parallel == (256 % config.rollout_world_size == 0)
    reasons = {item.key.rpartition(".")[2]: item.reason for item in taken}
    assert name != "seed_r1_ascend" or reasons["yarn_scaling_factor"].endswith("and says the same")


def test_hydras_options_and_keys() -> None:
    given = ["-cp", "config", "-cn", "dapo_megatron_trainer.yaml", "+a.b=1", "++c=2", "~data.seed", "--check", "config"]
    args = read_command_line([*given, "hydra.run.dir=/runs/${now:%Y}/x", "hydra.output_subdir=null"])
    assert args.config_name == "dapo_megatron_trainer" and args.check == "config"
    assert args.overrides[:3] == ("+a.b=1", "++c=2", "~data.seed")
    assert args.overrides[3].startswith("trainer.report_dir='/runs/20") and args.overrides[3].endswith("/x'")
    assert [item.key for item in args.unused] == ["hydra.output_subdir"]
    assert read_command_line(["data.seed=1", "--config-name", "x", "data.shuffle=True"]).overrides == (
        "data.seed=1",
        "data.shuffle=True",
    )
    with pytest.raises(ConfigError) as caught:
        read_command_line(["-m", "--cfg", "hydra", "hydra/launcher=joblib", "hydra.job.chdir=True"])
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    assert "--multirun starts several runs" in text and "--cfg hydra shows Hydra's own config" in text
    assert "hydra/launcher is 'joblib', which is not there: only Hydra's composition is used" in text
    assert "hydra.job.chdir is 'True', which is not there: a run stays in the folder" in text


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (["--info", "all"], "--info, which shows how Hydra composed: --cfg job shows the result"),
        (["--hydra-help"], "--hydra-help, which is about Hydra's own options: --help"),
        (["-sc", "install=bash"], "--shell-completion, which installs completion"),
        (["--experimental-rerun", "x.pickle"], "--experimental-rerun, which runs a job of Hydra again"),
    ],
)
def test_hydras_other_options_are_refused_with_what_there_is_instead(given: list[str], instead: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(instead)):
        read_command_line([*given, "data.seed=1"])


def test_config_path_is_relative_to_the_program_then_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.yaml").write_text("defaults: [ppo_megatron_trainer, _self_]\ndata: {seed: 7}\n")
    assert read_command_line(["--config-path=config"]).config_dir == Path(load_config.__code__.co_filename).parent
    for folder in ("mine", str(tmp_path / "mine")):
        args = read_command_line([f"--config-path={folder}", "--config-name=run.yaml"])
        assert args.config_dir == tmp_path / "mine"
        assert load_config(args.overrides, config_name=args.config_name, config_dir=args.config_dir).data.seed == 7
    assert load_config([f"hydra.searchpath=[file://{tmp_path}/mine]", "data.seed=3"]).data.seed == 3
    with pytest.raises(ConfigError, match="--config-path absent is no folder"):
        read_command_line(["--config-path=absent"])


def _command(name: str, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script's own command, from its Python on, with further arguments and variables."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *script_arguments(name), *more]
    environment = os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_cfg_job_prints_the_resolved_config() -> None:
    shown = _command("grpo_qwen2_7b", "--cfg", "job")
    assert "experiment_name: qwen2_7b_megatron" in shown.stdout and shown.stdout.startswith("data:")


SEEDS = [name for name in ACCEPTED if name.startswith("seed_")]


# The others resolve above, without a process of their own.
@pytest.mark.parametrize("name", [SEEDS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SEEDS[1:])])
def test_a_seeds_command_is_accepted_by_the_program(tmp_path: Path, name: str) -> None:
    """With a folder for Hydra's records, and a variable that the seed's text asks for."""
    done = _command(name, override("hydra.run.dir", tmp_path), "--check", "config", VLLM_DP_SIZE="128")
    assert done.returncode == 0, done.stderr
    assert "VLLM_DP_SIZE=128: actor_rollout_ref.rollout.data_parallel_size decides" in done.stderr
    refused = _command(name, "-m")
    assert refused.returncode == 2 and "--multirun starts several runs from one command" in refused.stderr
