"""Every command in README and docs can be run, and ``HELD`` says of every command of every page which tests run it.

A recipe's command resolves to a valid config, a module exists and knows the options, named files exist.
``tests/system/test_page_runs.py`` runs commands as they are printed and reads what they leave.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from recipes.common.recipe import load_recipe
from tests.pages import ROOT, users_environment
from tests.system import test_page_runs as page_runs
from tests.test_pages import PAGES as EVERY_PAGE
from tools.launch.job import resolve_config
from tools.launch.settings import read_settings, variables
from verl.trainer.config import load_config, validate_config

PAGES = sorted([ROOT / "README.md", ROOT / "README.zh.md", *(ROOT / "docs").glob("*.md")])
PROGRAMS = ("bash", "python", "source", "curl", "grep", "vllm")
_MODULES = {"vllm": "vllm.entrypoints.cli.main"}  # what the environment's commands run
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
_MADE_BY_A_COMMAND = (".venv/bin/activate",)  # tools/setup_env.sh
_RUN_ELSEWHERE = {"-c": "docs/rewards.md"}  # by tests/verl/test_rewards_page.py

NOT_RUN = "not run: "
BIG = f"{NOT_RUN}it needs 16 nodes and published weights; "
NETWORK = f"{NOT_RUN}it needs the network; "
SCRIPT = re.escape(page_runs.SCRIPT)
# A command's form -> the file of the tests that run it, or ``NOT_RUN``, why, and what is tested in its place. The first
# form that fits counts, after the commands of ``tests/system/test_page_runs.py``.
HELD = {
    SCRIPT: "tests/system/test_six_commands.py",
    f"STEPS=60 {SCRIPT} .*": "tests/system/test_six_commands.py",
    rf"OUTPUT_DIR=outputs/again {SCRIPT} trainer\.train_only=.*": "tests/system/test_page_runs.py",
    f"{SCRIPT} trainer.resume_mode=resume_path .*": "tests/system/test_page_runs.py",
    rf"{SCRIPT} trainer\.live_report=8080": "tests/recipes/test_node_run.py",
    rf"{SCRIPT} 'trainer\.logger=\[console,wandb\]'": f"{NOT_RUN}no wandb here; tests/verl/test_trackers.py",
    f"NNODES=16 .*{SCRIPT}": f"{BIG}two hosts: tests/system/test_two_hosts.py",
    "MODEL_PATH=(Qwen/|smollm2-135m ).*": f"{NETWORK}on a hub of its own: tests/recipes/test_hub_model.py",
    "(NNODES=16|HOSTFILE=|MODEL_PATH=).*": f"{BIG}node by node, host file, Slurm: tests/recipes/test_many_nodes.py",
    r"bash recipes/r1_zero/train_deepseekv3_256die_random_init\.sh": "tests/system/test_throughput_benchmark.py",
    r"bash recipes/r1_zero/train_deepseekv3_256die_true_weight\.sh": f"{BIG}tests/recipes/test_cann_scripts.py",
    r"bash recipes/math_lighteval/run_mcore_deepseek_verl\.sh": "tests/system/test_killed_whole.py",
    r"bash recipes/r1_dynamic_sampling/run_deepseek_r1\.sh": "tests/system/test_killed_whole.py",
    r"bash recipes/dapo_qwen3_moe/run_dapo_qwen3_moe_30b_megatron_npu\.sh": "tests/system/test_dapo_qwen3_moe.py",
    r"bash recipes/gsm8k/run\.sh": "tests/system/test_gsm8k.py",
    r"python recipes/gsm8k/gsm8k\.py .*": "tests/recipes/test_gsm8k.py",
    r"bash recipes/r1_tools/run\.sh": "tests/system/test_turns_in_jobs.py",
    r"python recipes/r1_zero/json_to_parquet\.py .*": "tests/recipes/test_data.py",
    r"python recipes/math_lighteval/math_lighteval\.py .*": "tests/recipes/test_math_lighteval.py",
    r"python recipes/dapo_qwen3_moe/dapo_math\.py .*": "tests/recipes/test_dapo_qwen3_moe.py",
    r"python recipes/r1_dynamic_sampling/prompt_data\.py .*": "tests/recipes/test_r1_dynamic_sampling.py",
    r"python -m recipes\.common\.base_model.*": "tests/recipes/test_base_model.py",
    r"python -m tools\.launch .*": "tests/system/test_six_commands.py",
    r"python -m verl\.trainer\.main_ppo.*": "tests/system/test_bad_input.py",
    r"bash tests/.*": f"{NOT_RUN}it runs these tests",
    r"python -m pytest .*": f"{NOT_RUN}these are tests themselves",
    r"python -m tools\.workshop\.gpu_day .*": "tests/tools/test_gpu_day.py",
    r"python -m tests\.parallel\.layout_table": "tests/parallel/test_layout_table.py",
    r"(STACK=cann82 )?bash tools/setup_env\.sh.*": "tests/tools/test_setup_env.py",
    r"source .*": f"{NOT_RUN}it changes the shell that calls it; tests/tools/test_setup_env.py makes what it reads",
    r"docker .*|\s*\$\(printf.*": f"{NOT_RUN}there is no container engine here; tests/tools/test_dockerfile.py",
    r"python3\.11 -m venv \.venv|\.venv/bin/.*": f"{NETWORK}the same pins: tests/tools/test_requirements.py",
    r"python3\.11 -m venv ENVS.*|ENVS/.*": f"{NETWORK}these are other engines' packages",
    r"python -m tools\.doctor --die": "tests/tools/test_doctor_die.py",
    r"python -m tools\.doctor --model-path DIR": "tests/hf_formats/test_tokenizer.py",
    r"python -m tools\.doctor --config deepseek_.*": "tests/tools/test_doctor_nvidia.py",
    r"python -m tools\.download .*": f"{NETWORK}on a hub of its own: tests/tools/test_download.py",
    r"python -m tools\.import_verl_script .*": "tests/tools/test_import_verl_script.py",
    r"python -m tools\.regrade LEDGER .*": "tests/system/test_page_runs.py",
    r"python -m tools\.report .*--serve 8080": "tests/tools/test_live_report.py",
    r"python -m tools\.(report|viewer RUN_DIR)": "tests/system/test_page_runs.py",
    r"python -m tools\.workshop\.reference --write.*": "tests/tools/test_reference.py",
    r"python -m tools\.workshop\.adaptations.*": "tests/tools/test_adaptations.py",
    r"python -m tools\.subtree .*": "tests/tools/test_subtree.py",
    r"python -m tools\.plan\.timing\.calibrate.*": "tests/tools/plan/test_timing_predictions.py",
    r"python -m tools\.plan\.op_costs.*": "tests/tools/plan/test_op_costs.py",
    r"python -m tools\.plan.*": "tests/tools/plan/test_explain.py",
    r"python -m tools\.workshop\.bench\.(algorithms|schedules).*": "tests/tools/test_bench_algorithms.py",
    r"python -m tools\.workshop\.bench\.rollout.*": "tests/tools/test_bench_rollout.py",
    r"python -m tools\.workshop\.bench\..*": "tests/tools/test_bench.py",
    r"python -m verl\.model_merger merge.*": "tests/mindspeed_llm/test_dcp_checkpoint.py",
    r"python -m mindspeed\.profiler DIR": "tests/npu/test_r1_zero.py",
    r"python -m mindspeed_llm\.(fp8_cast_bf16|fp8_quantize|plain_config|convert_ckpt_torch_dist).*": (
        "tests/system/test_page_runs.py"
    ),
    r"python -m mindspeed_llm\.convert_gguf .*": "tests/mindspeed_llm/test_convert_gguf.py",
    r"python -m mindspeed_llm\.convert_ckpt.*": "tests/mindspeed_llm/test_conversion.py",
    r"vllm serve outputs/r1_zero/export_hf .*": "tests/system/test_six_commands.py",
    r"vllm serve.*": "tests/vllm/test_serve_command.py",
    r"python -m vllm\.entrypoints\.openai\.api_server.*": "tests/vllm/test_serve_command.py",
    r"lm_eval .*": "tests/vllm/test_lm_eval.py",
    "curl .*": "tests/system/test_six_commands.py",
    r"python -c .*": "tests/verl/test_rewards_page.py",
}  # fmt: skip
# docs/upstream has upstream's commands beside ours: tests/recipes/test_seed_commands.py and tests/verl.
LISTED = [page for page in EVERY_PAGE if page.parent.name != "upstream" and page.name != "ADAPTATIONS.md"]


def commands_of(page: Path, is_command: Callable[[str], bool] | None = None) -> list[str]:
    """Return the commands in code blocks (fenced shell blocks, indented blocks) and in code spans."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, flags=re.DOTALL)
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for block in fenced for line in _joined(block).splitlines()]
    lines += [line.strip() for line in _joined(plain).splitlines() if line.startswith("    ")]
    lines += [" ".join(span.split()) for span in re.findall(r"`((?:python -m|bash|source|vllm) [^`]+)`", plain)]
    found = [re.sub(r"\s+# .*", "", line) for line in lines]
    return [line for line in dict.fromkeys(found) if (is_command or _is_checked)(line)]


def _is_checked(line: str) -> bool:
    return _program(line) in PROGRAMS


def _is_any_command(line: str) -> bool:
    """Also of programs that are not here, and of other environments."""
    program = _program(line)
    return (
        program in (*PROGRAMS, "docker", "pip", "sbatch", "srun", "git", "ray", "lm_eval", "python3.11")
        or "bin/" in program
    )


def _joined(text: str) -> str:
    return re.sub(r"\\\n\s*", "", text)


def _program(line: str) -> str:
    words = re.sub(r"<[^>]+>", "<>", line).split()
    return next((word for word in words if not _ASSIGNMENT.match(word)), "")


CASES = [pytest.param(page, line, id=f"{page.name}: {line[:70]}") for page in PAGES for line in commands_of(page)]


def test_commands_are_found() -> None:
    assert {page.name for page in PAGES if commands_of(page)} >= {"README.md", "README.zh.md"}


def _how_held(line: str) -> str | None:
    """Which tests run a command, or why none does; None where nobody has said so."""
    run = re.fullmatch(rf"(?:(?:STEPS|NNODES|OUTPUT_DIR)=\S+ )*{SCRIPT} (.*)", line)
    if line in page_runs.LOOKS or (run and run[1] in page_runs.RUNS):
        return "tests/system/test_page_runs.py"
    return next((held for form, held in HELD.items() if re.fullmatch(form, line)), None)


def test_of_every_command_is_said_what_runs_it() -> None:
    lines = {page.relative_to(ROOT).as_posix(): commands_of(page, _is_any_command) for page in LISTED}
    unlisted = [f"{page}: {line}" for page, found in lines.items() for line in found if _how_held(line) is None]
    assert unlisted == [], (
        "add each to tests/system/test_page_runs.py, or to HELD with what runs it, or why nothing does"
    )
    every = {line for found in lines.values() for line in found}
    assert {*page_runs.LOOKS} <= every, "a page prints each of them"
    assert {form for form in HELD if not any(re.fullmatch(form, line) for line in every)} == set()
    files = {file for held in HELD.values() for file in re.findall(r"tests/\S+\.py", held)}
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []
    assert all(held.startswith((NOT_RUN, "tests/")) for held in HELD.values())


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # what this process has imported
@pytest.mark.parametrize(("page", "line"), CASES)
def test_a_command_can_be_run(page: Path, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _check(page, line, tmp_path, _help)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), [case for case in CASES if "python -m" in str(case.values[1])])
def test_a_command_can_be_run_in_a_users_shell(
    page: Path, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program prints its help in a process of its own, without what this one has imported and set."""
    monkeypatch.chdir(ROOT)
    _check(page, line, tmp_path, _help_in_a_users_shell)


def _check(page: Path, line: str, tmp_path: Path, help_of: Callable[..., str]) -> None:
    for part in line.split(" && "):
        words = shlex.split(re.sub(r"<[^>]+>", "127.0.0.1", part))
        settings = {}
        while _ASSIGNMENT.match(words[0]):
            name, _, settings[name] = words.pop(0).partition("=")
        program, arguments = words[0], words[1:]
        if program == "bash":
            _check_script(arguments[0], arguments[1:], settings, tmp_path)
        elif program in ("python", *_MODULES):
            _check_python(page, arguments if program == "python" else ["-m", _MODULES[program], *arguments], help_of)
        elif program == "source":
            assert arguments[0] in _MADE_BY_A_COMMAND or Path(arguments[0]).is_file()
        else:
            assert shutil.which(program)


def _check_script(script: str, arguments: list[str], settings: dict[str, str], tmp_path: Path) -> None:
    assert Path(script).is_file(), script
    if script.startswith("tests/"):
        paths = [word for word in arguments if "/" in word]
        assert all(Path(path).exists() for path in paths)
    elif script.startswith("recipes/"):
        recipe = load_recipe(Path(script).parts[1])
        overrides = [word for word in arguments if word not in ("...", "--print-plan", "--help")]
        assert all("=" in word for word in overrides)
        assert settings.keys() <= {*variables(recipe), "NPU_VENV_DIR"}
        settings = {name: value for name, value in settings.items() if name != "NNODES" and "$" not in value}
        config = resolve_config(read_settings(recipe, overrides, {"OUTPUT_DIR": str(tmp_path)} | settings))
        assert validate_config(config) == []
        function = config.custom_reward_function.path
        assert function is None or Path(function).is_file() or "my_reward" in function


def _check_python(page: Path, arguments: list[str], help_of: Callable[..., str]) -> None:
    if arguments[0] in _RUN_ELSEWHERE:
        assert page == ROOT / _RUN_ELSEWHERE[arguments[0]]
        return
    assert arguments[0] == "-m", arguments
    module, given = arguments[1], arguments[2:]
    assert importlib.util.find_spec(module) is not None, module
    options = [word.partition("=")[0] for word in given if word.startswith("--")]
    if module == "pytest":
        assert all(Path(path).exists() for path in given if "/" in path)
    elif module == "verl.trainer.main_ppo":
        load_config([word for word in given if "=" in word])
    elif options:
        known = help_of(module, *(given[:1] if module in ("tools.subtree", *_MODULES.values()) else ()))
        assert all(re.search(rf"(?<![\w-]){option}(?![\w-])", known) for option in options), f"{module} {options}"


@cache
def _help(*command: str) -> str:
    printed = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", [*command, "--help"])
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    assert not ended.value.code
    return printed.getvalue()


@cache
def _help_in_a_users_shell(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command, "--help"],
        cwd=ROOT,
        env=users_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_both_languages_say_the_same_things() -> None:
    """Both READMEs have the same commands, headings, tables, code and figures, and link to each other."""
    english, chinese = (ROOT / name for name in ("README.md", "README.zh.md"))
    assert [_without_words(line) for line in commands_of(english)] == [
        _without_words(line) for line in commands_of(chinese)
    ]
    texts = [page.read_text(encoding="utf-8") for page in (english, chinese)]
    for form in (r"^#+ ", r"^\|", r"^- ", r"^    ", r"^\d\. "):
        counts = [len(re.findall(form, text, flags=re.MULTILINE)) for text in texts]
        assert counts[0] == counts[1], form
    spans = [sorted(set(re.findall(r"`([^`\n]+)`", text))) for text in texts]
    assert spans[0] == spans[1]
    figures = [sorted(set(re.findall(r"\d+\.\d+|\d{2,}", text))) for text in texts]
    assert figures[0] == figures[1]
    assert "(README.zh.md)" in texts[0] and "(README.md)" in texts[1]


def _without_words(line: str) -> str:
    return re.sub(r"<[^>]+>", "<>", line)
