"""``python -m tools.plan CONFIG [key=value ...]``: does this run fit, do its ranks fit together, how long is a step?"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tools.plan.console import print_plan, print_variations
from tools.plan.devices import known_devices, load_device
from tools.plan.rank_plan import StepSize
from tools.plan.report import write_json
from tools.plan.setup import config_problems, known_configs, known_models, planned_run
from tools.plan.timing import Lengths, RunShape, load_constants, predict, sensitivity
from tools.plan.whole import WholePlan, plan_run

FITS, DOES_NOT_FIT, BAD_INPUT = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 the run fits, 1 it does not, 2 there is nothing to plan."""
    options = _parser().parse_intermixed_args(argv)
    console = Console(width=max(Console().width, 150))
    try:
        with tempfile.TemporaryDirectory(prefix="plan-") as scratch:
            device = load_device(options.device)
            run = planned_run(
                options.config,
                options.overrides,
                device,
                nodes=options.nodes,
                model=options.model,
                scratch=Path(scratch),
            )
            data = run.config.data
            size = StepSize(
                options.prompt_length or data.max_prompt_length,
                options.response_length or data.max_response_length,
                options.load,
            )
            found = config_problems(run)
            plan = WholePlan(run, size, (), 0, tuple(found)) if found else plan_run(run, size)
            shape = RunShape.of(run.config, run.hf, _lengths(options, run.config), run.name)
            constants = load_constants()
            step = predict(shape, device, constants)
    except ValueError as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return BAD_INPUT
    print_plan(plan, step, console)
    if options.sensitivity:
        print_variations(sensitivity(shape, device, constants), console)
    if options.output is not None:
        write_json(plan, step, options.output)
        console.print(f"written: {options.output}")
    return DOES_NOT_FIT if plan.problems else FITS


def _lengths(options: argparse.Namespace, config: object) -> Lengths | None:
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.plan", description=__doc__)
    parser.add_argument("config", help=f"a recipe's config: {', '.join(known_configs())}; or a YAML file's path")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the config, with verl's names")
    parser.add_argument(
        "--device", default="a3", help=f"{', '.join(known_devices())}, or a profile's path (default a3)"
    )
    parser.add_argument(
        "--nodes", type=int, help="instead of the config's trainer.nnodes; with the device's own node size"
    )
    parser.add_argument("--model", help=f"{', '.join(known_models())}, or a folder with a config.json")
    parser.add_argument("--prompt-length", type=int, help="tokens of every prompt (default: the longest allowed)")
    parser.add_argument("--response-length", type=int, help="tokens of every response (default: the longest allowed)")
    parser.add_argument(
        "--load",
        type=float,
        default=1.0,
        help="rows of a rank's experts over the mean of the ranks (default 1: balanced)",
    )
    parser.add_argument("--sensitivity", action="store_true", help="what other nodes, lengths and loads would do")
    parser.add_argument("--output", type=Path, metavar="plan.json", help="writes the plan there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
