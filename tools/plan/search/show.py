"""``--search``: the fastest layouts of the same devices that fit, with the reasons and the overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from tools.plan.console import print_plain, print_table
from tools.plan.devices import GIB
from tools.plan.search.layouts import drafting_rollouts
from tools.plan.search.rank import Candidate, own_candidate, ranking
from tools.plan.search.verify import Verified, verified
from tools.plan.tables import TextTable, layout_text
from tools.plan.timing.constants import Constants
from tools.plan.timing.cost import StepTime, predict
from tools.plan.timing.rollout import speculation_text
from tools.plan.timing.run_shape import MicroBatches, RunShape, TrainShape
from tools.plan.whole import WholePlan

LEAST_CHANGE = 0.005  # share of a step from which a phase's change is shown
COLUMNS = ("", "training", "micro-batch", "again", "rollout", "seconds", "tokens/s/device", "free GiB", "fits")


def search(plan: WholePlan, shape: RunShape, constants: Constants, count: int, console: Console) -> bool:
    """Prints the ``count`` fastest layouts whose plans fit, the config's own first; whether there is one."""
    found = ranking(plan.run, shape, plan.size, constants, tries_drafts=True)
    divide = f"{found.num_training:,} training layout(s) divide, {found.num_fitting:,}"
    console.print(f"{divide} fit by the bound; planning the fastest")

    def report(item: Verified) -> None:
        verdict = f"does not work: {item.problems[0]}" if item.problems else "fits"
        console.print(f"  {describe(item.candidate)}: {verdict}", highlight=False, markup=False)

    tried = verified(plan.run, found.best, plan.size, count, report)
    tried.sort(key=lambda item: item.candidate.step.total_s)
    good = [item for item in tried if not item.problems]
    console.print(
        f"Search: {divide} of them fit by the bound; {found.num_rollout} rollout layouts; {len(tried)} of the fastest "
        f"planned rank by rank, {len(good)} fit."
    )
    own = own_candidate(plan.run, shape, constants)
    rows = [("config", *_cells(own, plan, plan.problems))]
    rows += [(str(number), *_cells(item.candidate, item.plan, item.problems)) for number, item in enumerate(tried, 1)]
    title = "Layouts, fastest first; seconds are modelled, memory is planned"
    print_table(TextTable(title, COLUMNS, rows), console)
    if not good:
        console.print("[red]no layout was found that fits[/red]: more nodes, or shorter rows")
        return False
    _print_reasons(own.step, plan, good[0], constants, console)
    return True


def describe(candidate: Candidate) -> str:
    return f"{layout_text(candidate.shape.train.layout)}, rollout {_rollout_text(candidate)}"


def differences(other: StepTime, step: StepTime, other_name: str) -> list[str]:
    """A sentence for each phase of ``step`` that takes longer or shorter than ``other``'s, largest first."""
    changes = {phase: seconds - other.seconds.get(phase, 0.0) for phase, seconds in step.seconds.items()}
    return [
        _sentence(phase, other, step, other_name)
        for phase, change in sorted(changes.items(), key=lambda item: -abs(item[1]))
        if abs(change) >= LEAST_CHANGE * other.total_s
    ]


def _rollout_text(candidate: Candidate) -> str:
    """Tensor parallelism, replicas that share experts, and settings that are not the config's."""
    rollout = candidate.shape.rollout
    experts = f" EP{rollout.expert_ranks} {rollout.expert_exchange}" if rollout.has_expert_parallel else ""
    if candidate.shape.model.n_routed_experts and not rollout.has_expert_parallel:
        experts = " experts cut"
    eager = "" if rollout.has_graphs else ", eager"
    drafts = f", {rollout.draft_method} {rollout.num_drafts}" if rollout.num_drafts else ""
    return f"TP{rollout.tp} DP{rollout.dp}{experts}, {rollout.max_num_batched_tokens} tokens{eager}{drafts}"


def _cells(candidate: Candidate, plan: WholePlan | None, problems: Sequence[str]) -> tuple[str, ...]:
    train, step = candidate.shape.train, candidate.step
    return (
        layout_text(train.layout),
        f"{batch(train.update)}, log-probs {batch(train.log_prob)}",
        recomputed(train),
        _rollout_text(candidate),
        f"{step.total_s:,.1f}",
        f"{step.tokens_per_s_device:,.1f}",
        f"{plan.headroom_bytes / GIB:.1f}" if plan is not None and plan.stages else "?",
        "no" if problems else "yes",
    )


def recomputed(train: TrainShape) -> str:
    """The number of a stage's layers that are computed again in the backward."""
    return {0: "none", -1: "all"}.get(train.recomputed_layers, str(train.recomputed_layers))


def batch(cut: MicroBatches) -> str:
    """The size of a micro-batch."""
    return f"{cut.token_budget:,} tokens" if cut.token_budget else str(cut.samples)


def _print_reasons(own: StepTime, plan: WholePlan, best: Verified, constants: Constants, console: Console) -> None:
    ours = best.candidate.step
    change = ours.total_s / own.total_s - 1
    console.print(
        f"The best is predicted {abs(change):.0%} {'faster' if change < 0 else 'slower'} than the config's own layout "
        f"({ours.total_s:,.1f} s for {own.total_s:,.1f} s):"
    )
    reasons = differences(own, ours, "the config")
    reasons += [f"the config's own does not work: {problem}" for problem in plan.problems[:1]]
    reasons += _draft_reasons(plan, best.candidate.shape, constants)
    if best.plan is not None:
        reasons.append(f"fullest in {best.plan.worst.peak.name} on {best.plan.worst.name}")
    for reason in reasons:
        console.print(f"  {reason}", highlight=False, markup=False)
    console.print("As overrides:")
    print_plain(console, "  " + " ".join(best.overrides))


def _draft_reasons(plan: WholePlan, shape: RunShape, constants: Constants) -> list[str]:
    """The step with each number of drafts, and what is expected of those that ``shape`` has."""
    device, tried = plan.run.device, []
    for rollout in drafting_rollouts(plan.run, shape.rollout):
        total_s = predict(replace(shape, rollout=rollout), device, constants).total_s
        tried.append(f"{rollout.draft_method} {rollout.num_drafts}: {total_s:,.1f} s".replace(" 0:", "none:"))
    text = speculation_text(shape, device, constants.rates(device.family))
    return [f"drafts: {', '.join(tried)}"] * (len(tried) > 1) + [text] * bool(text)


def _sentence(phase: str, other: StepTime, step: StepTime, other_name: str) -> str:
    before, after = other.terms.get(phase, {}), step.terms[phase]
    total = sum(after.values()) - sum(before.values())
    changes = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in (*before, *after)}
    terms = [
        f"{name} {before.get(name, 0.0):,.1f} to {after.get(name, 0.0):,.1f}"
        for name, change in sorted(changes.items(), key=lambda item: -abs(item[1]))[:3]
        if abs(change) >= 0.1 * abs(total)
    ]
    word = "shorter" if total < 0 else "longer"
    return f"{phase} is {abs(total):,.1f} s {word} than {other_name}'s ({'; '.join(terms)})"
