"""Every command in README and docs can be run.

A recipe's command resolves to a valid config, a module exists and knows the options, named files exist. The tests of
the code itself cover what a command does.
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

from recipes.common.launcher.job import resolve_config
from recipes.common.launcher.settings import read_settings, variables
from recipes.common.recipe import load_recipe
from tests.pages import ROOT, users_environment
from verl.trainer.config import load_config, validate_config

PAGES = sorted([ROOT / "README.md", ROOT / "README.zh.md", *(ROOT / "docs").glob("*.md")])
PROGRAMS = ("bash", "python", "source", "curl", "grep", "vllm")
_MODULES = {"vllm": "vllm.entrypoints.cli.main"}  # what the environment's commands run
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
_MADE_BY_A_COMMAND = (".venv/bin/activate",)  # tools/setup_env.sh
_RUN_ELSEWHERE = {"-c": "docs/rewards.md"}  # by tests/verl/test_rewards_page.py


def commands_of(page: Path) -> list[str]:
    """Return the commands in code blocks (fenced shell blocks, indented blocks) and in code spans."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, flags=re.DOTALL)
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for block in fenced for line in _joined(block).splitlines()]
    lines += [line.strip() for line in _joined(plain).splitlines() if line.startswith("    ")]
    lines += re.findall(r"`((?:python -m|bash|source|vllm) [^`]+)`", plain)
    found = [re.sub(r"\s+# .*", "", line) for line in lines]
    return [line for line in dict.fromkeys(found) if _program(line) in PROGRAMS]


def _joined(text: str) -> str:
    return re.sub(r"\\\n\s*", "", text)


def _program(line: str) -> str:
    words = re.sub(r"<[^>]+>", "<>", line).split()
    return next((word for word in words if not _ASSIGNMENT.match(word)), "")


CASES = [pytest.param(page, line, id=f"{page.name}: {line[:70]}") for page in PAGES for line in commands_of(page)]


def test_commands_are_found() -> None:
    assert {page.name for page in PAGES if commands_of(page)} >= {"README.md", "README.zh.md"}


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
