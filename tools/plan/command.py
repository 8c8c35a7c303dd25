"""The planner's command line: reads what to plan, plans it, prints and writes the plan."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.status import Status

from tools.plan.devices import DeviceProfile, known_devices, load_device
from tools.plan.exit_status import BAD_INPUT, DOES_NOT_FIT, FITS
from tools.plan.setup import (
    BALANCED,
    TINY,
    TINY_DEVICE,
    PlannedRun,
    expert_load,
    known_configs,
    known_models,
    planned_run,
)
from tools.plan.timing.constants import load_constants
from tools.plan.timing.cost import predict, sensitivity
from tools.plan.timing.drafts import MTP, default_acceptance, parse_acceptance
from tools.plan.timing.rollout import speculation_text
from tools.plan.timing.run_shape import Lengths, RunShape, default_lengths
from verl.trainer.config import ConfigError, validate_config

DESCRIPTION = "Plan a run: whether it fits, whether its ranks' calls match, and how long a step takes."


def run(arguments: Sequence[str], progress: Status) -> int:
    """Plan what ``arguments`` ask for; returns the exit status. ``progress`` is stopped before anything is printed."""
    console = Console(width=max(Console().width, 150))
    try:
        progress.stop()  # for argparse, which prints
        options = _parser().parse_intermixed_args(arguments)
        progress.start()
        progress.update(f"planning {options.config}")
        device = load_device(options.device or (TINY_DEVICE if options.config.endswith(TINY) else "a3"))
        planned = planned_run(options.config, options.overrides, device, nodes=options.nodes, model=options.model)
        # What has been read can be planned: now comes what imports torch and the workers.
        return _planned(options, planned, device, console, progress)
    except (ValueError, OSError) as error:
        progress.stop()
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return BAD_INPUT


def _planned(
    options: argparse.Namespace, run: PlannedRun, device: DeviceProfile, console: Console, progress: Status
) -> int:
    from tools.plan.console import print_brief, print_plain, print_plan, print_table, write_plan
    from tools.plan.page import write_page
    from tools.plan.search.choose import choose
    from tools.plan.search.explain import explain
    from tools.plan.search.show import search
    from tools.plan.tables import variation_table
    from tools.plan.training import StepSize
    from tools.plan.whole import WholePlan, plan_run
    from verl.trainer.device_room import fit_to_devices

    signal.signal(signal.SIGINT, signal.default_int_handler)  # everything is loaded
    try:
        config, line = fit_to_devices(run.config, device.memory_bytes)
    except ConfigError as error:
        progress.stop()
        print_plain(console, "\n".join(f"does not work: {problem}" for problem in error.problems))
        return DOES_NOT_FIT
    if line:
        print_plain(console, line)
        run = replace(run, config=config)
    data = run.config.data
    if run.config.has_rollout_ranks and (options.choose or options.changes or options.search):
        schedule = run.config.trainer.schedule
        raise ValueError(f"trainer.schedule={schedule}: --search, --choose and --why-not are for schedule=sync alone")
    # Means are timed, while memory is planned for the longest rows.
    lengths = _lengths(options, default_lengths(run.config))
    method = run.config.actor_rollout_ref.rollout.draft_method
    if options.acceptance and not (method or options.search or options.changes):
        raise ValueError("--acceptance: there are no drafts; give actor_rollout_ref.rollout.speculative_config")
    size = StepSize(
        options.prompt_length or data.max_prompt_length,
        options.response_length or data.max_response_length,
        expert_load(options.load, run.config.actor_rollout_ref.actor.megatron.expert_model_parallel_size),
        lengths.acceptance or default_acceptance(method or MTP * bool(options.search)),
    )
    constants = load_constants()
    if options.choose is not None:
        choice = choose(run, lengths, size, constants)
        progress.stop()
        choice.write(options.choose)
        print_plain(console, "\n".join(choice.reasons))
        return FITS if choice.overrides else DOES_NOT_FIT
    shape = RunShape.of(run.config, run.hf, lengths, run.name)
    if options.changes:
        progress.stop()
        return FITS if explain(run, options.changes, shape, size, constants, console) else DOES_NOT_FIT
    problems = validate_config(run.config)
    plan = WholePlan(run, size, (), 0, tuple(problems)) if problems else plan_run(run, size)
    step = predict(shape, device, constants)
    step = replace(step, speculation=speculation_text(shape, device, constants.rates(device.family)))
    progress.stop()
    if options.search:
        return FITS if search(plan, shape, constants, options.search, console) else DOES_NOT_FIT
    (print_brief if options.brief else print_plan)(plan, step, console)
    if options.sensitivity:
        print_table(variation_table(sensitivity(shape, device, constants)), console)
    for write, path in ((write_plan, options.output), (write_page, options.page)):
        if path is not None:
            write(plan, step, path)
            print_plain(console, f"written: {path}")
    return DOES_NOT_FIT if plan.problems else FITS


def _lengths(options: argparse.Namespace, usual: Lengths) -> Lengths:
    """``usual`` with what is given; ValueError for means of turns where a sample is one."""
    usual = replace(usual, acceptance=options.acceptance)
    means = {"prompt_mean": options.mean_prompt_length, "response_mean": options.mean_response_length}
    lengths = replace(usual, **{name: mean for name, mean in means.items() if mean is not None})
    turns = {"mean": options.mean_turns, "tool_s": options.mean_tool_seconds, "given": options.mean_given_tokens}
    if not (turns := {name: mean for name, mean in turns.items() if mean is not None}):
        return lengths
    if usual.turns is None:
        raise ValueError("--mean-turns, --mean-tool-seconds, --mean-given-tokens: rollout.multi_turn.enable is False")
    found = replace(usual.turns, **turns)
    if found.mean < 1 or min(found.tool_s, found.given) < 0 or found.given_tokens() >= lengths.response_mean:
        raise ValueError(
            f"{found.mean:g} turns with {found.given:g} given tokens and {found.tool_s:g} s after each: no sample of "
            f"{lengths.response_mean:g} tokens has them; turns are 1 or more, and the model writes some tokens"
        )
    return replace(lengths, turns=found)


def _count(text: str) -> int:
    """A whole number from 1 on; ValueError, which argparse words, for any other text."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def _acceptance(text: str) -> tuple[float, ...]:
    try:
        return parse_acceptance(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.plan", description=DESCRIPTION)
    add = parser.add_argument
    add("config", help=f"a recipe's config: {', '.join(known_configs())}; or a YAML file's path")
    add("overrides", nargs="*", metavar="key=value", help="changes of the config, with verl's names")
    add("--device", help=f"{', '.join(known_devices())}, or a profile's path; default a3, for a tiny config cpu")
    add("--nodes", type=_count, help="nodes instead of the config's; with the device's own node size")
    add("--model", help=f"{', '.join(known_models())}, or a folder with a config.json")
    add("--prompt-length", type=_count, help="tokens of every prompt (default: the longest allowed)")
    add("--response-length", type=_count, help="tokens of every response (default: the longest allowed)")
    add("--mean-prompt-length", type=float, help="for the time (default: a quarter of the limit)")
    add("--mean-response-length", type=float, help="for the time (default: half of the limit)")
    add("--mean-turns", type=float, help="of the model in a sample (default: half of multi_turn.max_assistant_turns)")
    add("--mean-tool-seconds", type=float, help="of an environment's call (default: 1)")
    add("--mean-given-tokens", type=float, help="after it (default: a fourth of max_tool_response_length)")
    rates = (
        "shares of right drafts by position, each where those before it are right; the last holds for further ones "
        "(default for mtp: 0.85,0.7,0.55)"
    )
    add("--acceptance", type=_acceptance, default=(), metavar="0.8,0.6", help=rates)
    load = (
        "rows of a rank's experts over the mean of the ranks that share them: a number (1 is balanced, as many as "
        "there are ranks the worst), or a run's metrics.jsonl, whose largest actor/expert_load_max it then is"
    )
    add("--load", default=BALANCED, metavar="balanced|worst|NUMBER|FILE", help=load)
    add("--sensitivity", action="store_true", help="what other nodes, lengths and loads would do")
    fastest = "the N fastest layouts of these devices that fit (3), with drafts where they pay"
    add("--search", type=_count, nargs="?", const=3, metavar="N", help=fastest)
    chosen = "choose a layout, what moves to host memory and the rollout's share; write overrides and reasons there"
    add("--choose", type=Path, metavar="choice.json", help=chosen)
    add("--why-not", dest="changes", nargs="+", metavar="key=value", help="what stops the run with these changes")
    add("--brief", action="store_true", help="one line instead of the tables")
    add("--page", type=Path, metavar="plan.html", help="write the plan there as a page with figures")
    add("--output", type=Path, metavar="plan.json", help="write the plan to this file")
    return parser
