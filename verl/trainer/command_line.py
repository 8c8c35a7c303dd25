"""The command line of the driver: Hydra's options with Hydra's meaning, and a ``--check`` that starts nothing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from verl.trainer.config import ConfigError, WithoutEffect
from verl.trainer.config.load import CONFIG_DIR
from verl.trainer.config.override_text import in_quotes

# Upstream's default of the program: a script without --config-name means it.
PROGRAM_CONFIG_NAME = "ppo_trainer"
_NOW = re.compile(r"\$\{now:([^}]*)\}")
# Keys of Hydra's own section -> (accepted values, what happens instead).
_HYDRA_KEYS: dict[str, tuple[tuple[str, ...], str]] = {
    "hydra.job.chdir": (("False", "false", "null"), "a run stays in the folder where it was started"),
    "hydra.output_subdir": (("null", ".hydra", ""), "the resolved config is kept in trainer.report_dir"),
    "hydra.job.name": ((), "trainer.experiment_name names a run"),
    "hydra.verbose": (("False", "false"), "every process logs at one level"),
    "hydra/job_logging": (("none", "disabled", "stdout", "default"), "the driver logs to the console"),
    "hydra/hydra_logging": (("none", "disabled", "default"), "Hydra logs nothing here"),
}
# Options that show or re-run what Hydra's own application has -> what there is instead.
_NOT_THERE = {
    "--info": "which shows how Hydra composed: --cfg job shows the result",
    "--hydra-help": "which is about Hydra's own options: --help shows those that are here",
    "--shell-completion": "which installs completion for Hydra: there is none",
    "--experimental-rerun": "which runs a job of Hydra again: the same command continues a run",
}
_SHORT = {"--info": ("-i",), "--shell-completion": ("-sc",)}


@dataclass(frozen=True)
class CommandLine:
    """What was asked for.

    Attributes:
        overrides: ``key=value`` in Hydra's grammar, for the composition.
        config_name: YAML file without its ending.
        config_dir: folder of that file; None means verl/trainer/config.
        shows_config: print the resolved config and end (``--cfg``).
        check: "config" or "all" to end after these checks; None to train.
        unused: Hydra's own keys that have no effect here.
    """

    overrides: tuple[str, ...]
    config_name: str
    config_dir: Path | None
    shows_config: bool
    check: str | None
    unused: tuple[WithoutEffect, ...]


def read_command_line(argv: Sequence[str] | None, config_name: str = PROGRAM_CONFIG_NAME) -> CommandLine:
    """Parse ``argv``; ConfigError names every option of Hydra that asks for what there is not.

    config_name: the program's own, which counts without ``--config-name``.
    """
    args = _parser(config_name).parse_intermixed_args(argv)
    problems = []
    if args.multirun:
        problems.append("--multirun starts several runs from one command, which is not there; start one run at a time")
    problems += [
        f"{option}, {_NOT_THERE[option]}" for option in _NOT_THERE if getattr(args, _field(option)) is not None
    ]
    if args.cfg not in (None, "job"):
        problems.append(f"--cfg {args.cfg} shows Hydra's own config, which no run uses; --cfg job shows the run's")
    if args.package:
        problems.append(f"--package {args.package}: --cfg job shows the whole config")
    name = args.config_name.removesuffix(".yaml")
    overrides, unused, found = _without_hydra(args.overrides)
    if problems := problems + found:
        raise ConfigError(problems)
    directory = _config_dir(args.config_path, name) or (Path(args.config_dir) if args.config_dir else None)
    return CommandLine(tuple(overrides), name, directory, args.cfg == "job", args.check, tuple(unused))


def _config_dir(config_path: str | None, name: str) -> Path | None:
    """Hydra's ``--config-path``: absolute, or relative to the program's folder; then to the current folder."""
    if config_path is None:
        return None
    path = Path(config_path).expanduser()
    folders = [CONFIG_DIR.parent / path, Path.cwd() / path]  # an absolute path replaces both
    with_file = [folder for folder in folders if (folder / f"{name}.yaml").is_file()]
    there = with_file or [folder for folder in folders if folder.is_dir()]
    if not there:
        raise ConfigError(
            [f"--config-path {config_path} is no folder; leave it out for the configs of verl/trainer/config"]
        )
    return there[0]


def _without_hydra(overrides: Sequence[str]) -> tuple[list[str], list[WithoutEffect], list[str]]:
    """The overrides of the run's own keys, Hydra's without effect, and a sentence for each that is not possible."""
    own, unused, problems = [], list[WithoutEffect](), []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        value = value.strip("'\"")
        if key in ("hydra.run.dir", "hydra.sweep.dir") and value:
            if key == "hydra.sweep.dir":
                unused.append(WithoutEffect(key, value, "one command is one run"))
            else:  # Hydra keeps a run's records there
                text = _NOW.sub(lambda found: datetime.now().strftime(found[1]), value)
                own.append(f"trainer.report_dir={in_quotes(text)}")
        elif key == "hydra.searchpath" or not key.startswith(("hydra.", "hydra/")):
            own.append(override)
        elif key in _HYDRA_KEYS and (value in _HYDRA_KEYS[key][0] or not _HYDRA_KEYS[key][0]):
            unused.append(WithoutEffect(key, value, _HYDRA_KEYS[key][1]))
        else:
            reason = _HYDRA_KEYS[key][1] if key in _HYDRA_KEYS else "only Hydra's composition is used, not its launcher"
            problems.append(f"{key} is {value!r}, which is not there: {reason}; leave it out")
    return own, unused, problems


def _field(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _parser(config_name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verl.trainer.main_ppo",
        description="Train: key=value with verl's key names and Hydra's grammar (+key, ++key, ~key), and its options.",
    )
    parser.add_argument("--config-name", "-cn", default=config_name, help="YAML file, its ending may be there")
    parser.add_argument(
        "--config-path",
        "-cp",
        default=None,
        help="folder of the YAML file, relative to verl/trainer or the current one",
    )
    parser.add_argument("--config-dir", "-cd", default=None, help="the same, relative to the current folder")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"), help="job: print the resolved config and end")
    parser.add_argument("--resolve", action="store_true", help="with --cfg; the config is always resolved")
    parser.add_argument("--package", "-p", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--run", "-r", action="store_true", help="run once, which is always so")
    parser.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    for option in _NOT_THERE:
        parser.add_argument(option, *_SHORT.get(option, ()), nargs="?", const="", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"hydra {version('hydra-core')}", help="of Hydra")
    parser.add_argument(
        "--check",
        choices=("config", "all"),
        default=None,
        help="only check the config, or config and files; start nothing",
    )
    parser.add_argument("overrides", nargs="*", help="key=value, with verl's key names")
    return parser
