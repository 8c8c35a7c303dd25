"""Seconds between the big phases: weights to the rollout, memory out and in, rows to the ranks, rewards."""

from __future__ import annotations

from tools.plan.devices import DeviceProfile
from tools.plan.model_work import model_work
from tools.plan.timing.constants import Rates
from tools.plan.timing.rollout import rollout_weights
from tools.plan.timing.run_shape import RunShape
from tools.plan.timing.training import STATE_BYTES, WEIGHT_BYTES, owned_parameters, weights_per_rank

ID_BYTES = 8  # token ids, masks and positions travel as int64
FLOAT_BYTES = 4


def weight_sync_seconds(shape: RunShape, rates: Rates) -> dict[str, float]:
    """Seconds of moving weights from the training ranks to the rollout ranks."""
    work = model_work(shape.model)
    whole = work.parameters * WEIGHT_BYTES
    if shape.sync == "per_tensor":
        return {
            "tensors": _gathered_tensors(shape) * rates.tensor_sync_s,
            "bytes": whole / (rates.gather_sync_gbs * 1e9),
        }
    if shape.sync == "packed":
        return {"bytes": whole / (rates.packed_sync_gbs * 1e9)}
    return {"bytes": rollout_weights(shape) / (rates.direct_sync_gbs * 1e9)}


def offload_seconds(shape: RunShape, device: DeviceProfile, rates: Rates) -> dict[str, float]:
    """Seconds of moving training weights, and an ``offloaded`` optimizer's state, to host memory and back."""
    per_s = device.host_link_bytes_per_s * rates.host_link_efficiency
    terms = {"memory": rates.switch_fixed_s} if shape.schedule == "sync" else {}
    if shape.train.offloads:
        terms["weights"] = 2 * sum(weights_per_rank(shape)) * WEIGHT_BYTES / per_s
    if shape.train.optimizer == "offloaded":
        terms["optimizer"] = 2 * owned_parameters(shape) * STATE_BYTES / per_s
    return terms


def dispatch_seconds(shape: RunShape, rates: Rates, is_update: bool) -> dict[str, float]:
    """Seconds until the last rank has its rows: a controller writes each rank's part anew, one rank after another.

    Rows are padded to the limits: ids, mask and positions of prompt and response, the response's ids again; an update
    brings three float32 more for each response token.
    """
    if shape.dispatch == "direct":
        return {}
    lengths, layout = shape.lengths, shape.train.layout
    row = ID_BYTES * (3 * (lengths.prompt_limit + lengths.response_limit) + lengths.response_limit)
    if is_update:
        row += 3 * FLOAT_BYTES * lengths.response_limit
    written = row * shape.num_sequences / layout.data_parallel_size * layout.world_size
    return {"dispatch": written / (rates.dispatch_gbs * 1e9)}


def reward_seconds(shape: RunShape, rates: Rates) -> dict[str, float]:
    """Seconds of grading every response."""
    return {"grading": shape.generated_sequences * rates.reward_s / max(1, shape.reward_workers)}


def _gathered_tensors(shape: RunShape) -> float:
    """Tensors that a ``per_tensor`` sync gathers: two of each local expert and about ten others of each layer."""
    work, layout = model_work(shape.model), shape.train.layout
    local = work.num_experts / layout.expert_model_parallel_size if work.num_experts else 0.0
    return work.num_moe * local * 2 + work.num_layers * 10
