"""Answers that the package math-verify compares as mathematics (upstream: ``verl.utils.reward_score.math_verify``)."""

from __future__ import annotations


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0) -> float:
    r"""1.0 when an answer in ``model_output``, boxed or an expression, equals ``ground_truth``, else 0.0.

    ``timeout_score`` is the score when a comparison takes longer than the package's limit, which is an alarm of the
    main thread. A run grades in processes that can be killed besides.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig  # takes a second
    from math_verify.errors import TimeoutException
    from math_verify.metric import math_metric

    compare = math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )
    try:
        score, _ = compare([f"\\boxed{{{ground_truth}}}"], [model_output])
    except TimeoutException:
        return timeout_score
    return float(score)
