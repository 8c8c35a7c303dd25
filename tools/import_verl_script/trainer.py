"""The trainer's command among the commands of a script, and what its module is here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tools.import_verl_script.script import Command
from tools.import_verl_script.words import Text
from verl.trainer.command_line import PROGRAM_CONFIG_NAME

MAIN = "verl.trainer.main_ppo"
_ROOT = Path(__file__).resolve().parents[2]
_MODULE = re.compile(r"(?:\w+\.)+\w*(?:main|trainer)\w*")
_FILE = re.compile(r"(?:.*/)?((?:verl|recipe)/[\w/]*(?:main|trainer)\w*)\.py")
_CONFIG_NAME = re.compile(r"(?:--config-name|-cn)(?:=.*)?")
# A module's name -> the config that it starts with where the script names none.
_CONFIGS = {
    "*dapo.main_dapo": "dapo_megatron_trainer",
    "*one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "*fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}


@dataclass(frozen=True)
class Trainer:
    """The command that trains.

    module: upstream's · given: what follows it · starter: what stands before it, as ``ray job submit``.
    """

    command: Command
    module: str
    given: tuple[Text, ...]
    starter: tuple[Text, ...]

    @property
    def module_here(self) -> str:
        """The module that takes its command line here."""
        is_here = self.module.startswith("verl.") and (_ROOT / f"{self.module.replace('.', '/')}.py").is_file()
        return self.module if is_here else MAIN

    @property
    def default_config(self) -> str:
        """The config that counts where the script names none."""
        return next((name for form, name in _CONFIGS.items() if fnmatchcase(self.module, form)), PROGRAM_CONFIG_NAME)

    @property
    def is_known(self) -> bool:
        """Whether the module is one of upstream's trainers whose command lines run here."""
        return self.module == self.module_here or any(
            fnmatchcase(self.module, form) for form in (*_CONFIGS, "recipe.r1_ascend.main_ppo")
        )

    @property
    def arguments(self) -> list[Text]:
        """Its command line for here: another module's config is named."""
        needs_name = self.module != self.module_here and self.default_config != PROGRAM_CONFIG_NAME
        names = [Text(f"--config-name={self.default_config}")] if needs_name else []
        return [*(names if not any(_CONFIG_NAME.fullmatch(text.text) for text in self.given) else []), *self.given]


def trainers(commands: Sequence[Command]) -> list[Trainer]:
    """Every command that starts a trainer of verl, in the script's order."""
    return [found for command in commands if (found := _trainer(command)) is not None]


def _trainer(command: Command) -> Trainer | None:
    texts = [word.text for word in command.words]
    for index, text in enumerate(texts[1:], 1):
        file = _FILE.fullmatch(text)
        if file or (texts[index - 1] == "-m" and _MODULE.fullmatch(text)):
            module = file[1].replace("/", ".") if file else text
            programs = [number for number in range(index) if re.fullmatch(r"(.*/)?python[\d.]*", texts[number])]
            start = programs[-1] if programs else index
            return Trainer(command, module, command.words[index + 1 :], command.words[:start])
    return None
