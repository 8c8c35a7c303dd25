"""``python -m tools.plan CONFIG [key=value ...]``: whether a run fits and its ranks' calls match, and its step time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tools.plan.console import print_brief, print_plan, print_variations
from tools.plan.devices import known_devices, load_device
from tools.plan.load import BALANCED, expert_load
from tools.plan.page import write_page
from tools.plan.rank_plan import StepSize
from tools.plan.report import write_json
from tools.plan.search.command import Request, explain, search
from tools.plan.setup import known_configs, known_models, planned_run
from tools.plan.timing import Lengths, RunShape, load_constants, predict, sensitivity
from tools.plan.timing.run_shape import default_lengths
from tools.plan.whole import WholePlan, plan_run
from verl.trainer.config import PPOTrainerConfig, validate_config

FITS, DOES_NOT_FIT, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 the run fits, 1 it does not, 2 there is nothing to plan, 130 interrupted."""
    options = _parser().parse_intermixed_args(argv)
    console = Console(width=max(Console().width, 150))
    try:
        device = load_device(options.device)
        run = planned_run(options.config, options.overrides, device, nodes=options.nodes, model=options.model)
        data = run.config.data
        size = StepSize(
            options.prompt_length or data.max_prompt_length,
            options.response_length or data.max_response_length,
            expert_load(options.load, run.config.actor_rollout_ref.actor.megatron.expert_model_parallel_size),
        )
        constants = load_constants()
        request = Request(options.config, tuple(options.overrides), options.nodes, options.model)
        shape = RunShape.of(run.config, run.hf, _lengths(options, run.config), run.name)
        if changes := options.changes:
            return FITS if explain(request, run, shape, size, constants, changes, console) else DOES_NOT_FIT
        problems = validate_config(run.config)
        plan = WholePlan(run, size, (), 0, tuple(problems)) if problems else plan_run(run, size)
        step = predict(shape, device, constants)
        if options.search:
            return FITS if search(request, run, plan, shape, constants, options.search, console) else DOES_NOT_FIT
    except ValueError as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    if options.brief:
        print_brief(plan, step, console)
    else:
        print_plan(plan, step, console)
    if options.sensitivity:
        print_variations(sensitivity(shape, device, constants), console)
    if options.output is not None:
        write_json(plan, step, options.output)
        console.print(f"written: {options.output}")
    if options.page is not None:
        write_page(plan, step, options.page)
        console.print(f"written: {options.page}")
    return DOES_NOT_FIT if plan.problems else FITS


def _lengths(options: argparse.Namespace, config: PPOTrainerConfig) -> Lengths:
    """The lengths that are timed: means, while memory is planned for the longest rows."""
    lengths = default_lengths(config)
    given = {"prompt_mean": options.mean_prompt_length, "response_mean": options.mean_response_length}
    return replace(lengths, **{name: value for name, value in given.items() if value is not None})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.plan", description=__doc__)
    parser.add_argument("config", help=f"a recipe's config: {', '.join(known_configs())}; or a YAML file's path")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the config, with verl's names")
    parser.add_argument("--device", default="a3", help=f"{', '.join(known_devices())}, or a profile's path; default a3")
    parser.add_argument("--nodes", type=int, help="nodes instead of the config's; with the device's own node size")
    parser.add_argument("--model", help=f"{', '.join(known_models())}, or a folder with a config.json")
    parser.add_argument("--prompt-length", type=int, help="tokens of every prompt (default: the longest allowed)")
    parser.add_argument("--response-length", type=int, help="tokens of every response (default: the longest allowed)")
    parser.add_argument("--mean-prompt-length", type=float, help="for the time (default: a quarter of the limit)")
    parser.add_argument("--mean-response-length", type=float, help="for the time (default: half of the limit)")
    parser.add_argument(
        "--load",
        default=BALANCED,
        metavar="balanced|worst|NUMBER|FILE",
        help="rows of a rank's experts over the mean of the ranks that share them: a number (1 is balanced, as many as "
        "there are ranks the worst), or a run's metrics.jsonl, whose largest actor/expert_load_max it then is",
    )
    parser.add_argument("--sensitivity", action="store_true", help="what other nodes, lengths and loads would do")
    parser.add_argument(
        "--search",
        type=int,
        nargs="?",
        const=3,
        metavar="N",
        help="the N fastest layouts of these devices that fit (3)",
    )
    parser.add_argument(
        "--why-not",
        dest="changes",
        nargs="+",
        metavar="key=value",
        help="what stops the run with these changes",
    )
    parser.add_argument("--brief", action="store_true", help="one line instead of the tables")
    parser.add_argument("--page", type=Path, metavar="plan.html", help="write the plan there as a page with figures")
    parser.add_argument("--output", type=Path, metavar="plan.json", help="write the plan to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
