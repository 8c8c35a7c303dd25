"""Samples of a step whose logits are NaN or infinite: whose fault it is, and the message that names it."""

from __future__ import annotations

from hf_formats.finite import require_finite
from vllm.ops.contract import NOT_FINITE
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.sample.sampler import SamplerOutput
from vllm.v1.worker.worker import Worker


class NonFiniteLogitsError(RuntimeError):
    """The model computes NaN or infinity, so that no token can be drawn."""


def failed_requests(step: SchedulerOutput, output: SamplerOutput) -> tuple[list[Request], list[Request]]:
    """Return the step's requests for which the model computed logits that are not finite, and those whose own settings
    made finite ones so.
    """
    by_model, by_settings = list(output.unscored), []
    for request, token, is_finite in zip(
        step.request_of_sample, output.token_ids.tolist(), output.are_finite(), strict=True
    ):
        if token == NOT_FINITE and request not in by_model:
            by_model.append(request)
        elif not is_finite and token != NOT_FINITE:
            by_settings.append(request)
    return by_model, by_settings


def model_problem(requests: list[Request], worker: Worker) -> str:
    """Say that the model's logits are not finite, where, and which weight of this rank explains it."""
    first, rank = requests[0], worker.config.parallel.rank
    more = f" and {len(requests) - 1} more" if len(requests) > 1 else ""
    return (
        f"the logits of request {first.request_id}{more} at token {len(first.token_ids)} are NaN or infinite on rank "
        f"{rank}: {_weight_problem(worker)}"
    )


def settings_problem(request: Request) -> str:
    """Say that a request's own settings leave nothing to draw from."""
    return (
        f"request {request.request_id}: its settings (temperature={request.temperature}, logit_bias, penalties, "
        "allowed tokens) make the logits infinite or leave no token to draw; use milder ones"
    )


def _weight_problem(worker: Worker) -> str:
    for view_name, view in worker.model.weight_views.items():
        for name, shard in view.shards(view_name):
            try:
                require_finite(name, shard.read(), "the engine")
            except ValueError as error:
                return str(error)
    return (
        f"all of its weights are finite, so values grow beyond {worker.config.model.dtype} inside of the model; try "
        "dtype=float32, or look for a layer with very large weights"
    )
