"""Drafts that a decode step verifies: the tokens that a sequence gets in a step.

a_j is the share of right drafts at position j where those before them are right. With k drafts a step accepts at least
j of them with probability a_1 ... a_j and brings 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens on average.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_formats.config import HFModelConfig

MTP = "mtp"
# The first is the low end of what DeepSeek-V3's report has for its second token (arXiv 2412.19437, 5.4.3: 85 to 90%).
# The others are an assumption: a layer that was trained for one token predicts from its own output.
MTP_ACCEPTANCE = (0.85, 0.7, 0.55)


def default_acceptance(method: str) -> tuple[float, ...]:
    """a_1, a_2, ... of a method; without a general figure none are right, so that none pay. Empty for no method."""
    if not method:
        return ()
    return MTP_ACCEPTANCE if method == MTP else (0.0,)


def acceptance_note(method: str, given: Sequence[float]) -> str:
    """What a plan says of drafts of whose acceptance nothing is ``given``, nor known in general; empty for others."""
    if not method or method == MTP or given:
        return ""
    return (
        f"how many drafts of {method} are right depends on the texts, so times are those without any; --acceptance "
        "gives the shares of right ones by position, as 0.5,0.4 (a run reports perf/acceptance_rate)"
    )


def parse_acceptance(text: str) -> tuple[float, ...]:
    """``0.8,0.6``; ValueError for what is no list of shares."""
    rates = tuple(map(float, text.split(",")))
    if not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"{text}: a share of right drafts is between 0 and 1")
    return rates


def draft_problems(hf: HFModelConfig, method: str) -> list[str]:
    """Why drafts of ``method`` cannot be priced."""
    if method == MTP and not hf.num_nextn_predict_layers:
        return ["rollout.speculative_config.method=mtp: the model has no prediction layer (num_nextn_predict_layers)"]
    return []


def accepted_shares(acceptance: Sequence[float], num_drafts: int) -> list[float]:
    """P(accepted >= j) for j = 1 .. ``num_drafts``; the last of ``acceptance`` holds for further positions."""
    shares, share = [], 1.0
    for position in range(num_drafts):
        share *= acceptance[min(position, len(acceptance) - 1)]
        shares.append(share)
    return shares


def tokens_per_step(acceptance: Sequence[float], num_drafts: int) -> float:
    """The expected tokens of a sequence in a step that verifies so many drafts of it."""
    return 1.0 + sum(accepted_shares(acceptance, num_drafts))


def progress_variance(acceptance: Sequence[float], num_drafts: int) -> float:
    """By which a response that takes s steps varies, for each of its tokens, in tokens: Var[s E[x]] / n.

    x are a step's tokens. By renewal theory n tokens take n / E[x] steps with variance n Var[x] / E[x]^3.
    """
    shares = accepted_shares(acceptance, num_drafts)
    mean = sum(shares)
    square = sum((2 * position + 1) * share for position, share in enumerate(shares))
    return (square - mean**2) / (1.0 + mean)
