"""The trainer's command among the commands of a script, and what its module is here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.import_verl_script.script import Command
from tools.import_verl_script.words import Text
from verl.trainer.command_line import PROGRAM_CONFIG_NAME

MAIN = "verl.trainer.main_ppo"
_ROOT = Path(__file__).resolve().parents[2]
_MODULE = re.compile(r"(?:\w+\.)+\w*(?:main|trainer)\w*")
_FILE = re.compile(r"(?:.*/)?((?:verl|recipe)/[\w/]*(?:main|trainer)\w*)\.py")
# The last two names of upstream's other trainers -> the config that one starts with where the script names none.
_CONFIGS = {
    "dapo.main_dapo": "dapo_megatron_trainer",
    "one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
    "r1_ascend.main_ppo": PROGRAM_CONFIG_NAME,
}


@dataclass(frozen=True)
class Trainer:
    """The command that trains.

    module: upstream's · module_here: the one that takes its command line here · arguments: its command line for here ·
    starter: what stands before it, as ``ray job submit`` · is_known: whether command lines of ``module`` run here.
    """

    command: Command
    module: str
    module_here: str
    arguments: tuple[Text, ...]
    starter: tuple[Text, ...]
    is_known: bool


def trainers(commands: Sequence[Command]) -> list[Trainer]:
    """Every command that starts a trainer of verl, in the script's order."""
    return [found for command in commands if (found := _trainer(command)) is not None]


def _trainer(command: Command) -> Trainer | None:
    texts = [word.text for word in command.words]
    for index, text in enumerate(texts[1:], 1):
        file = _FILE.fullmatch(text)
        if not file and not (texts[index - 1] == "-m" and _MODULE.fullmatch(text)):
            continue
        module = file[1].replace("/", ".") if file else text
        is_here = module.startswith("verl.") and (_ROOT / f"{module.replace('.', '/')}.py").is_file()
        arguments = command.words[index + 1 :]
        config = _CONFIGS.get(".".join(module.split(".")[-2:]))
        if config and not any(word.text.startswith(("--config-name", "-cn")) for word in arguments):
            arguments = (Text(f"--config-name={config}"), *arguments)
        programs = [number for number in range(index) if re.fullmatch(r"(.*/)?python[\d.]*", texts[number])]
        starter = command.words[: programs[-1] if programs else index]
        return Trainer(command, module, module if is_here else MAIN, arguments, starter, is_here or config is not None)
    return None
