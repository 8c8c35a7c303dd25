"""``--search`` and ``--why-not`` of ``python -m tools.plan``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from tools.plan.rank_plan import StepSize
from tools.plan.search.explain import explained, print_answer
from tools.plan.search.rank import own_candidate, ranking
from tools.plan.search.show import describe, print_search
from tools.plan.search.verify import Request, Verified, verified
from tools.plan.setup import PlannedRun
from tools.plan.timing import Constants, RunShape
from tools.plan.whole import WholePlan


def search(
    request: Request,
    run: PlannedRun,
    plan: WholePlan,
    shape: RunShape,
    constants: Constants,
    count: int,
    console: Console,
) -> bool:
    """Prints the ``count`` fastest layouts whose plans fit; whether there is one."""
    found = ranking(run, shape, plan.size, constants)
    console.print(
        f"{found.num_training:,} training layouts divide, {found.num_fitting:,} fit by the bound; planning the fastest"
    )

    def report(tried: Verified) -> None:
        verdict = f"does not work: {tried.problems[0]}" if tried.problems else "fits"
        console.print(f"  {describe(tried.candidate)}: {verdict}", highlight=False, markup=False)

    tried = verified(request, run, found.best, plan.size, count, report)
    print_search(own_candidate(run, shape, plan.size, constants), plan, found, tried, console)
    return any(not item.problems for item in tried)


def explain(
    request: Request,
    run: PlannedRun,
    shape: RunShape,
    size: StepSize,
    constants: Constants,
    overrides: Sequence[str],
    console: Console,
) -> bool:
    """Prints what stops the layout of ``overrides``, or how much slower than the best it is; whether it fits."""
    try:
        other = request.run(run, overrides)
    except ValueError as error:
        console.print("It is not a config that can run:", style="red")
        console.print(str(error), highlight=False, markup=False)
        return False
    answer = explained(other, shape, size, constants)
    print_answer(answer, console)
    return answer.fits
