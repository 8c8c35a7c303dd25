"""A search's result as a table, and why its best differs from the config's own layout."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tools.plan.devices import GIB
from tools.plan.search.rank import Candidate, Ranking
from tools.plan.search.verify import Verified
from tools.plan.timing import MicroBatches, StepTime
from tools.plan.whole import WholePlan

LEAST_CHANGE = 0.005  # share of a step from which a phase's change is shown


def print_search(
    own: Candidate, own_plan: WholePlan, ranking: Ranking, tried: Sequence[Verified], console: Console
) -> None:
    """The config's own layout first, then what was verified, fastest first; then the reasons and the overrides."""
    good = [found for found in tried if not found.problems]
    console.print(
        f"Search: {ranking.num_training:,} training layouts divide, {ranking.num_fitting:,} of them fit by the bound; "
        f"{ranking.num_rollout} rollout layouts; {len(tried)} of the fastest planned rank by rank, {len(good)} fit."
    )
    table = Table(
        "", "training", "micro-batch", "again", "rollout", "seconds", "tokens/s/device", "free GiB", "fits",
        box=None, pad_edge=False, title="Layouts, fastest first; seconds are modelled, memory is planned",
    )  # fmt: skip
    table.add_row("config", *_cells(own, own_plan), "no" if own_plan.problems else "yes")
    for place, found in enumerate(sorted(tried, key=lambda item: item.candidate.step.total_s), start=1):
        table.add_row(str(place), *_cells(found.candidate, found.plan), "no" if found.problems else "yes")
    console.print(table)
    for found in tried:
        if found.problems:
            console.print(f"{describe(found.candidate)}: {found.problems[0]}", highlight=False, markup=False)
    if not good:
        console.print("[red]no layout was found that fits[/red]: more nodes, or shorter rows")
        return
    best = min(good, key=lambda item: item.candidate.step.total_s)
    _print_reasons(own, own_plan, best, console)


def describe(candidate: Candidate) -> str:
    """One line."""
    return f"{training_text(candidate)}, rollout {rollout_text(candidate)}"


def training_text(candidate: Candidate) -> str:
    """Sizes of the axes that are more than 1, and the layers of uneven stages."""
    layout = candidate.train.layout
    sizes = {
        "TP": layout.tensor_model_parallel_size,
        "PP": layout.pipeline_model_parallel_size,
        "CP": layout.context_parallel_size,
        "DP": layout.data_parallel_size,
        "EP": layout.expert_model_parallel_size,
        "ETP": layout.expert_tensor_parallel_size,
    }
    text = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1 or axis == "TP")
    counts = layout.num_layer_list
    return f"{text} ({_runs(counts)})" if counts and len(set(counts)) > 1 else text


def rollout_text(candidate: Candidate) -> str:
    """Tensor parallelism, replicas that share experts, and settings that are not the config's."""
    rollout, knobs = candidate.rollout, candidate.knobs
    experts = f"EP{rollout.expert_ranks} {knobs.expert_exchange}" if rollout.has_expert_parallel else "experts cut"
    eager = ", eager" if knobs.enforce_eager else ""
    return f"TP{rollout.tp} DP{rollout.dp} {experts}, {knobs.max_num_batched_tokens} tokens{eager}"


def _cells(candidate: Candidate, plan: WholePlan | None) -> list[str]:
    train, step = candidate.train, candidate.step
    again = {0: "none", -1: "all"}.get(train.recomputed_layers, str(train.recomputed_layers))
    batches = f"{_batch(train.update)}, log-probs {_batch(train.log_prob)}"
    free = f"{plan.headroom_bytes / GIB:.1f}" if plan is not None and plan.stages else "?"
    rate = f"{step.tokens_per_s_device:,.1f}"
    return [training_text(candidate), batches, again, rollout_text(candidate), f"{step.total_s:,.1f}", rate, free]


def _batch(cut: MicroBatches) -> str:
    return f"{cut.token_budget:,} tokens" if cut.token_budget else str(cut.samples)


def _runs(counts: Sequence[int]) -> str:
    """6, 8 x 6, 7 for 6, 8, 8, 8, 8, 8, 8, 7."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return ", ".join(f"{count} x {times}" if times > 1 else str(count) for count, times in runs)


def _print_reasons(own: Candidate, own_plan: WholePlan, best: Verified, console: Console) -> None:
    ours, theirs = best.candidate.step, own.step
    change = ours.total_s / theirs.total_s - 1
    console.print(
        f"The best is predicted {abs(change):.0%} {'faster' if change < 0 else 'slower'} than the config's own layout "
        f"({ours.total_s:,.1f} s for {theirs.total_s:,.1f} s):"
    )
    for reason in differences(theirs, ours, "the config"):
        console.print(f"  {reason}", highlight=False, markup=False)
    for problem in own_plan.problems[:1]:
        console.print(f"  the config's own does not work: {problem}", highlight=False, markup=False)
    if best.plan is not None:
        worst = best.plan.worst
        console.print(f"  fullest in {worst.peak.name} on stage {worst.coords.pp}", highlight=False)
    console.print("As overrides:")
    console.print("  " + " ".join(best.overrides), highlight=False, markup=False, soft_wrap=True)


def differences(other: StepTime, step: StepTime, other_name: str) -> list[str]:
    """A sentence for each phase of ``step`` that takes longer or shorter than ``other``'s, largest first."""
    found = []
    for phase, seconds in step.seconds.items():
        change = seconds - other.seconds.get(phase, 0.0)
        if abs(change) >= LEAST_CHANGE * other.total_s:
            found.append((abs(change), _sentence(phase, other, step, other_name)))
    return [text for _, text in sorted(found, key=lambda pair: -pair[0])]


def _sentence(phase: str, other: StepTime, step: StepTime, other_name: str) -> str:
    before, after = other.terms.get(phase, {}), step.terms[phase]
    total = sum(after.values()) - sum(before.values())
    changes = sorted(
        ((after.get(name, 0.0) - before.get(name, 0.0), name) for name in dict.fromkeys([*before, *after])),
        key=lambda pair: -abs(pair[0]),
    )
    terms = [
        f"{name} {before.get(name, 0.0):,.1f} to {after.get(name, 0.0):,.1f}"
        for change, name in changes[:3]
        if abs(change) >= 0.1 * abs(total)
    ]
    word = "shorter" if total < 0 else "longer"
    return f"{phase} is {abs(total):,.1f} s {word} than {other_name}'s ({'; '.join(terms)})"
