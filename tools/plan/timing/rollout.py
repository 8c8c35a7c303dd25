"""Seconds of a generation: prefill, then decode steps while fewer and fewer sequences run, until the longest one ends.

A decode step of b sequences at context c takes

    layers x latency + weights read or multiplied + cache read or multiplied + collectives' bytes + the host's part

Replicas that share experts step together, so all of them step while one has a sequence left.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.plan.devices import DeviceProfile
from tools.plan.timing.constants import Rates
from tools.plan.timing.links import Links, consecutive_group
from tools.plan.timing.run_shape import DECODE_FEATURES, RunShape
from tools.plan.timing.work import ModelWork, busiest_rank, model_work

CACHE_BYTES = 2  # bf16
ACTIVATION_BYTES = 4 << 30  # what a step needs beside weights and cache


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of one decode step, by what they go to."""

    latency: float
    weights: float
    cache: float
    collectives: float
    host: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.latency + self.weights + self.cache + self.collectives + self.host

    @property
    def model(self) -> float:
        """Without the host's part: what is published as the time per output token of the model."""
        return self.total - self.host


def rollout_seconds(shape: RunShape, device: DeviceProfile, rates: Rates) -> dict[str, float]:
    """Terms of the generation of one step's responses."""
    rollout, lengths = shape.rollout, shape.lengths
    responses = lengths.responses
    rows = shape.generated_sequences / rollout.replicas
    slots = min(rows, running_sequences(shape, device))
    terms = dict.fromkeys(("latency", "weights", "cache", "collectives", "host"), 0.0)
    terms["prefill"] = _prefill_seconds(shape, device, rates, rows)
    # While rows wait, every slot is taken: (rows - slots) rows pass before the last one starts. A generation that never
    # stops for a step always has waiting rows.
    never_ends = shape.schedule == "fully_async"
    queued_steps = (rows if never_ends else rows - slots) * responses.mean / slots
    context = lengths.prompt_mean + responses.mean_square / responses.mean / 2
    _spend(terms, decode_step(shape, device, rates, slots, context), queued_steps)
    if never_ends:
        return terms
    terms["memory"] = rates.generation_fixed_s
    longest = responses.max_of(slots * rollout.dp)
    before = 0.0
    for point, ended in zip(responses.points, (0.0, *responses.below), strict=False):
        if (end := min(point, longest)) > before:
            middle = lengths.prompt_mean + (before + end) / 2
            _spend(terms, decode_step(shape, device, rates, max(1.0, slots * (1 - ended)), middle), end - before)
            before = end
    return terms


def running_sequences(shape: RunShape, device: DeviceProfile) -> float:
    """Sequences that a replica runs at a time: as many as allowed and as its cache has room for.

    At least one even without room for it: the memory plan refuses that.
    """
    rollout, work, lengths = shape.rollout, model_work(shape.model), shape.lengths
    free = device.memory_bytes * rollout.memory_share - rollout_weights(shape) - ACTIVATION_BYTES
    per_token = work.num_layers * _cache_per_token(work, rollout.tp)
    tokens = max(free, 0.0) / per_token
    mean_context = lengths.prompt_mean + lengths.responses.mean_square / lengths.responses.mean / 2
    return max(1.0, min(rollout.max_num_seqs, tokens / mean_context))


def rollout_weights(shape: RunShape) -> float:
    """Bytes of weights on one rollout rank."""
    work, rollout = model_work(shape.model), shape.rollout
    return (work.dense_parameters / rollout.tp + work.expert_parameters / rollout.expert_ranks) * rollout.weight_bytes


def decode_step(shape: RunShape, device: DeviceProfile, rates: Rates, sequences: float, context: float) -> DecodeStep:
    """One step of ``sequences`` running sequences on each replica, each with ``context`` tokens in the cache."""
    work, rollout = model_work(shape.model), shape.rollout
    computed = _graph_size(shape, sequences)
    bytes_per_s = device.hbm_bytes_per_s * rates.memory_efficiency
    flops_per_s = device.peak_flops * rates.decode_efficiency
    is_fp8 = rollout.weight_bytes < 2 and device.peak_fp8_tflops > 0
    peak = device.peak_fp8_tflops * 1e12 * rates.decode_efficiency if is_fp8 else flops_per_s
    dense = max(
        2.0 * work.dense_parameters / rollout.tp * computed / peak,
        work.dense_parameters / rollout.tp * rollout.weight_bytes / bytes_per_s,
    )
    experts = _expert_seconds(shape, rates, peak, bytes_per_s, computed)
    read = sequences * context * work.num_layers
    cache = max(
        read * _cache_per_token(work, rollout.tp) / bytes_per_s,
        read * work.layer.absorbed_score / rollout.tp / flops_per_s,
    )
    return DecodeStep(
        latency=_latency(shape, rates),
        weights=dense + experts,
        cache=cache,
        collectives=_collective_seconds(shape, device, rates, computed),
        host=_host_seconds(shape, rates, sequences),
    )


def _expert_seconds(shape: RunShape, rates: Rates, flops_per_s: float, bytes_per_s: float, sequences: float) -> float:
    """The routed experts of one rank: all that some token chose are read, and each token's are multiplied."""
    work, rollout = model_work(shape.model), shape.rollout
    if not work.num_moe:
        return 0.0
    tokens = sequences * (rollout.dp if rollout.has_expert_parallel else 1)
    ranks = rollout.expert_ranks
    chosen = 1.0 - (1.0 - work.topk / work.num_experts) ** tokens
    spread = rates.expert_load_spread if shape.expert_load_spread is None else shape.expert_load_spread
    busiest = busiest_rank(work.num_experts, ranks, spread) if rollout.has_expert_parallel else 1.0
    read = work.expert_parameters * chosen / ranks * rollout.weight_bytes / bytes_per_s
    multiplied = 2.0 * work.num_moe * work.topk * work.layer.expert * tokens / ranks * busiest / flops_per_s
    return max(read, multiplied)


def _collective_seconds(shape: RunShape, device: DeviceProfile, rates: Rates, sequences: float) -> float:
    """All-reduces of tensor parallelism, and the experts' exchange; kernels' own latency is in ``latency``."""
    work, rollout = model_work(shape.model), shape.rollout
    links = Links.of(device, rates.link_efficiency)
    spent = 0.0
    if rollout.tp > 1:
        group = consecutive_group(rollout.tp, device.domain_devices)
        spent += 2 * work.num_layers * links.all_reduce(sequences * work.hidden * CACHE_BYTES, group)
    if rollout.has_expert_parallel and work.num_moe:
        group = consecutive_group(rollout.expert_ranks, device.domain_devices)
        sent = sequences / rollout.tp * work.topk * work.hidden * CACHE_BYTES
        spent += 2 * work.num_moe * links.all_to_all(sent, group)
    return spent


def _latency(shape: RunShape, rates: Rates) -> float:
    work, rollout = model_work(shape.model), shape.rollout
    layer = rates.decode_layer_s if rollout.has_graphs else max(rates.decode_layer_s, rates.eager_layer_s)
    return work.num_layers * (layer + sum(_lacking_us(shape, rates, name) for name in rollout.lacks) * 1e-6)


def _lacking_us(shape: RunShape, rates: Rates, feature: str) -> float:
    assert feature in DECODE_FEATURES
    if feature == "no_transpose":  # only a rank with a single expert transposed its weights
        experts = model_work(shape.model).num_experts / shape.rollout.expert_ranks
        return rates.no_transpose_us if experts <= 1 else 0.0
    return {
        "multistream": rates.multistream_us,
        "reduce_scatter": rates.reduce_scatter_us,
        "kv_nz": rates.kv_nz_us,
    }[feature]


def _host_seconds(shape: RunShape, rates: Rates, sequences: float) -> float:
    rollout = shape.rollout
    agreement = (rates.host_sync_s if rollout.host_sync else rates.device_sync_s) if rollout.dp > 1 else 0.0
    return rates.decode_host_s + rates.decode_host_s_per_sequence * sequences + 2 * agreement


def _prefill_seconds(shape: RunShape, device: DeviceProfile, rates: Rates, rows: float) -> float:
    work, rollout, lengths = model_work(shape.model), shape.rollout, shape.lengths
    per_token = 2.0 * (
        work.num_layers * work.layer.attention
        + work.num_dense * work.layer.dense_mlp
        + work.num_moe * (work.topk * work.layer.expert + work.layer.shared)
    )
    flops = rows * lengths.prompt_mean * (per_token + work.num_layers * work.layer.score * lengths.prompt_mean / 2)
    return flops / rollout.tp / (device.peak_flops * rates.train_efficiency)


def _graph_size(shape: RunShape, sequences: float) -> float:
    """Sequences that a step computes: the smallest recorded graph that holds them, as many as there are without."""
    if not shape.rollout.has_graphs:
        return sequences
    sizes = shape.rollout.graph_sizes
    if sizes:
        return next((float(size) for size in sizes if size >= sequences), sequences)
    size = 1.0
    while size < sequences:
        size *= 2
    return size


def _cache_per_token(work: ModelWork, tp: int) -> float:
    """Bytes of the cache of one token and layer on one rank."""
    return work.layer.cache * CACHE_BYTES / min(tp, work.layer.cache_shards)


def _spend(terms: dict[str, float], step: DecodeStep, count: float) -> None:
    for name in ("latency", "weights", "cache", "collectives", "host"):
        terms[name] += getattr(step, name) * count
