"""``python -m tools.import_verl_script FILE.sh``: what a launch script of verl means here; nothing of it is run."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from tools.import_verl_script.page import hidden, page
from tools.import_verl_script.script import read_script
from tools.import_verl_script.statements import BashError, script_text
from tools.import_verl_script.trainer import Trainer, trainers
from tools.import_verl_script.verdicts import Judgement, judge
from tools.import_verl_script.words import joined
from tools.plan.__main__ import main as plan_main
from tools.plan.exit_status import DOES_NOT_FIT
from verl.trainer.config.load import CONFIG_DIR

CAN_RUN, NOT_YET, BAD_INPUT = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 the command can run, 1 something is refused or open, 2 there is nothing to read."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:split])
    try:
        return _explain(options, given[split + 1 :])
    except (BashError, OSError) as error:
        print(f"error: {options.file}: {error}", file=sys.stderr)
        return BAD_INPUT


def _explain(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    answers = dict(options.set)
    fixed = {name: value for name, value in answers.items() if name.isidentifier()}
    text = script_text(Path(options.file).read_bytes())
    script = read_script(text, fixed, arguments, str(Path.home()))
    found = _chosen(trainers(script.commands), options.line, text)
    judgement = judge(found[0], {key: value for key, value in answers.items() if key not in fixed})
    plan, fits = list[str](), True
    if judgement.is_settled and not options.no_plan:
        plan, fits = _plan(judgement, options)
    status = CAN_RUN if judgement.is_settled and fits and len(found) == 1 else NOT_YET
    values = {name: joined(value).text for name, value in script.variables.values.items()}
    secrets = values | found[0].command.environment | answers
    print(hidden(page(Path(options.file).name, script, found, judgement, plan, status), secrets))
    return status


def _plan(judgement: Judgement, options: argparse.Namespace) -> tuple[list[str], bool]:
    """What ``python -m tools.plan --brief`` prints, and whether the run may fit: True where there is no plan."""
    config, line = judgement.config, judgement.line
    assert config is not None and line is not None
    kind = ("a2" if config.trainer.n_gpus_per_node <= 8 else "a3") if config.trainer.device == "npu" else "h100"
    file = (line.config_dir or CONFIG_DIR) / f"{line.config_name}.yaml"
    model = ["--model", options.model] if options.model else []
    with redirect_stdout(io.StringIO()) as printed:
        status = plan_main([str(file), *line.overrides, "--brief", "--device", options.device or kind, *model])
    return ["\nPlan", *printed.getvalue().splitlines()], status != DOES_NOT_FIT


def _chosen(found: Sequence[Trainer], line: int | None, text: str) -> list[Trainer]:
    """The trainers of a script, or the one on the line that was asked for; BashError where there is none."""
    chosen = [trainer for trainer in found if line in (None, trainer.command.line)]
    if chosen:
        return chosen
    if found:
        lines = ", ".join(str(trainer.command.line) for trainer in found)
        raise BashError(f"no trainer is started on line {line}; there is one on {lines}")
    named = [number for number, source in enumerate(text.split("\n"), 1) if "main_ppo" in source or "dapo" in source]
    where = f"; line {named[0]} names one, in a text, a function or a place that is not read" if named else ""
    raise BashError(f"it starts no trainer of verl (python3 -m verl.trainer.main_ppo and the like){where}")


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
        "--set", type=_answer, action="append", default=[], metavar="NAME=VALUE", help="a variable or key of the script"
    )
    add("--line", type=int, metavar="N", help="the trainer that starts on this line, where there are several")
    add("--device", help="for the plan, as python -m tools.plan has it; default by trainer.device: a2 or a3, or h100")
    add("--model", help="for the plan: a folder with the model's config.json, or a model of python -m tools.plan")
    add("--no-plan", action="store_true", help="leave the plan out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
