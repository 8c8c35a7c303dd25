"""``python -m tools.import_verl_script FILE.sh``: what a launch script of verl means here; nothing of it is run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tools.import_verl_script.devices_plan import plan_lines
from tools.import_verl_script.page import Page, secrets_of
from tools.import_verl_script.script import read_script
from tools.import_verl_script.statements import BashError, script_text
from tools.import_verl_script.trainer import trainers
from tools.import_verl_script.verdicts import REFUSED, judge
from tools.import_verl_script.words import Text

CAN_RUN, NOT_YET, BAD_INPUT = 0, 1, 2
PLAIN_WIDTH = 120  # where the output is no terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 the command can run, 1 something is refused or open, 2 there is nothing to read."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    options, arguments = _parser().parse_args(given[:split]), given[split + 1 :]
    try:
        return _explain(options, arguments)
    except (BashError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f"error: {options.file}: {reason}", file=sys.stderr)
        return BAD_INPUT


def _explain(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    answers = dict(options.set)
    fixed = {name: value for name, value in answers.items() if name.isidentifier()}
    text = script_text(Path(options.file).read_bytes())
    script = read_script(text, fixed, arguments, str(Path.home()))
    found = trainers(script.commands)
    chosen = [trainer for trainer in found if options.line in (None, trainer.command.line)]
    if not chosen:
        raise BashError(_no_trainer(text, [trainer.command.line for trainer in found], options.line))
    trainer = chosen[0]
    judgement = judge(trainer, {key: value for key, value in answers.items() if key not in fixed})
    is_refused = bool(judgement.problems) or any(verdict.kind == REFUSED for verdict in judgement.verdicts)
    is_open = any(text.open for text in judgement.arguments) or len(chosen) > 1
    plan, fits = ["no plan before the above is settled"], True
    if options.no_plan:
        plan = []
    elif judgement.config is not None and not is_refused and not any(text.open for text in judgement.arguments):
        plan, fits = plan_lines(judgement, options.device, options.model)
    is_open = is_open or is_refused or not fits
    others = [other.command.line for other in chosen[1:]]
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    secrets = secrets_of(
        script.variables.values | trainer.command.environment | {k: Text(v) for k, v in answers.items()}
    )
    Page(Path(options.file).name, script, trainer, judgement, plan, others, is_open).show(console, secrets, options.all)
    return NOT_YET if is_open else CAN_RUN


def _no_trainer(text: str, lines: Sequence[int], line: int | None) -> str:
    if line is not None and lines:
        return f"no trainer is started on line {line}; there is one on {', '.join(map(str, lines))}"
    named = next(
        (number for number, found in enumerate(text.split("\n"), 1) if "main_ppo" in found or "main_dapo" in found),
        None,
    )
    where = f"; line {named} names one, but in a text or a place that is not read" if named else ""
    return f"it starts no trainer of verl (python3 -m verl.trainer.main_ppo and the like){where}"


def _answer(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.import_verl_script",
        description="Say what a launch script of verl means here. The script is only read; of the environment, HOME.",
        epilog="Arguments after -- are the script's own: $1, $2, $@.",
    )
    add = parser.add_argument
    add("file", metavar="FILE.sh", help="the launch script")
    add(
        "--set",
        type=_answer,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable, or a key, of the script",
    )
    add("--line", type=int, metavar="N", help="the trainer that starts on this line, where there are several")
    add("--device", help="for the plan, as python -m tools.plan has it; default by trainer.device: a2 or a3, or h100")
    add("--model", help="for the plan: a folder with the model's config.json, or a model of python -m tools.plan")
    add("--no-plan", action="store_true", help="leave the plan out")
    add("--all", action="store_true", help="a line for every key")
    return parser


if __name__ == "__main__":
    sys.exit(main())
