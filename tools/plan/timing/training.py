"""Seconds of the training engine's passes: log-probs (forward) and the update (forward, backward, optimizer).

A stage's time for one micro-batch is the sum over its layers of

    max( arithmetic, weights read ) + tensor-parallel collectives + what the experts' exchange is not hidden by

and at least the time that launching the kernels takes. Ranks whose experts serve one another wait for the longest
micro-batch among them in everything but the experts themselves, which see the mean times the imbalance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout
from tools.plan.devices import DeviceProfile
from tools.plan.timing.constants import Rates
from tools.plan.timing.links import Links, layout_group
from tools.plan.timing.run_shape import MicroBatches, RunShape
from tools.plan.timing.work import busiest_rank, model_work

WEIGHT_BYTES = 2  # bf16
STATE_BYTES = 12  # fp32 master weight and two moments
CPU_ADAM_BYTES = 28  # host memory that one parameter's update reads and writes: gradient, state, and the new weight


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a data-parallel rank, in expected tokens.

    count: of a mini-batch · tokens: of the mean one · waited: of the longest among ranks that wait for one another ·
    length: of a sequence in it.
    """

    count: float
    tokens: float
    waited: float
    length: float


@dataclass(frozen=True)
class PassSeconds:
    """One layer, one micro-batch, forward. launch: the least that it takes, whatever the others are."""

    compute: float
    collectives: float
    exchange: float
    launch: float


def log_prob_seconds(shape: RunShape, device: DeviceProfile, rates: Rates) -> dict[str, float]:
    """Terms of one forward pass over the batch."""
    batch = micro_batch(shape, shape.train.log_prob, 1)
    stages = _stages(shape, device, rates, batch, is_update=False)
    return _pipelined(shape, stages, batch, 1)


def update_seconds(shape: RunShape, device: DeviceProfile, rates: Rates) -> dict[str, float]:
    """Terms of an update: its passes, the gradients' reduction and the optimizer."""
    train = shape.train
    batch = micro_batch(shape, train.update, train.mini_batches)
    stages = _stages(shape, device, rates, batch, is_update=True)
    terms = _pipelined(shape, stages, batch, train.mini_batches)
    terms["optimizer"] = train.mini_batches * _optimizer_seconds(shape, device, rates)
    terms["gradients"] = train.mini_batches * _gradient_seconds(shape, device, rates)
    return terms


def weights_per_rank(shape: RunShape) -> tuple[float, float]:
    """Parameters of the fullest stage on one rank: (not experts, experts)."""
    work, layout = model_work(shape.model), shape.train.layout
    most = max(map(len, _stage_kinds(layout, shape.model)))
    dense = (work.layer.attention + work.layer.shared + work.layer.router) * most
    expert = min(most, work.num_moe) * work.num_experts * work.layer.expert
    return (
        dense / layout.tensor_model_parallel_size,
        expert / (layout.expert_model_parallel_size * layout.expert_tensor_parallel_size),
    )


def micro_batch(shape: RunShape, cut: MicroBatches, mini_batches: int) -> MicroBatch:
    """How ``cut`` divides a mini-batch of a data-parallel rank."""
    layout, lengths = shape.train.layout, shape.lengths
    responses = lengths.responses
    rows = shape.num_sequences / layout.data_parallel_size / mini_batches
    coupled = _coupled_ranks(shape)
    if cut.token_budget:
        # Whole sequences fill a micro-batch until the next one no longer fits, which leaves half of one on average.
        room = cut.token_budget * layout.context_parallel_size
        filled = max(room - lengths.mean / 2, min(room, lengths.mean))
        count = max(1.0, ceil(rows * lengths.mean / filled))
        tokens = rows * lengths.mean / count
        return MicroBatch(count, tokens, tokens, lengths.paid)
    size = min(cut.samples, rows)
    count = ceil(rows / size)
    if cut.is_padded:
        longest = size * (lengths.prompt_mean + responses.max_of(size))
        waited = size * (lengths.prompt_mean + responses.max_of(size * coupled))
        return MicroBatch(count, longest, waited, waited / size)
    tokens = size * lengths.mean
    if coupled > 1:
        waited = size * lengths.prompt_mean + responses.max_of_sums(coupled, size)
    elif shape.train.is_balanced:
        waited = tokens
    else:
        all_rows = responses.max_of_sums(layout.data_parallel_size, rows)
        waited = size * lengths.prompt_mean + all_rows / count
    return MicroBatch(count, tokens, waited, lengths.paid * waited / tokens)


def _coupled_ranks(shape: RunShape) -> int:
    """Data-parallel ranks whose experts serve one another: they run each layer of a micro-batch together."""
    if not shape.model.n_routed_experts:
        return 1
    layout = shape.train.layout
    ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
    return max(1, ranks // (layout.tensor_model_parallel_size * layout.context_parallel_size))


def _stages(
    shape: RunShape, device: DeviceProfile, rates: Rates, batch: MicroBatch, is_update: bool
) -> list[dict[str, float]]:
    """Seconds of one micro-batch on each stage, by term."""
    work, layout, train = model_work(shape.model), shape.train.layout, shape.train
    shards = layout.tensor_model_parallel_size * layout.context_parallel_size
    links = Links.of(device, rates.link_efficiency)
    stage_kinds = _stage_kinds(layout, shape.model)
    passes = {
        is_moe: _layer_forward(shape, device, rates, batch, is_moe)
        for is_moe in sorted({is_moe for kinds in stage_kinds for is_moe in kinds})
    }
    stages = []
    for stage, kinds in enumerate(stage_kinds):
        again = len(kinds) if train.recomputed_layers < 0 else train.recomputed_layers
        terms = {"compute": 0.0, "collectives": 0.0, "exchange": 0.0, "launch": 0.0, "sends": 0.0}
        for is_moe, forward in passes.items():
            count = kinds.count(is_moe)
            _add(terms, forward, count + is_update * kinds[:again].count(is_moe), 1.0, 1.0)
            _add(terms, forward, is_update * count, 2.0, 1.5)
        if stage == layout.pipeline_model_parallel_size - 1:
            head = 2.0 * work.embedding * batch.waited / shards / (device.peak_flops * rates.train_efficiency)
            terms["compute"] += head * (3 if is_update else 1)
        if layout.pipeline_model_parallel_size > 1:
            group = layout_group(layout, ("pp",), False, device.domain_devices)
            sent = batch.waited * work.hidden * WEIGHT_BYTES / shards
            terms["sends"] = links.send(sent, group.is_in_domain) * (2 if is_update else 1)
        stages.append(terms)
    return stages


@lru_cache(maxsize=1024)
def _stage_kinds(layout: ParallelLayout, model: HFModelConfig) -> tuple[tuple[bool, ...], ...]:
    """Whether each layer of each stage has experts."""
    stages = range(layout.pipeline_model_parallel_size)
    return tuple(
        tuple(model.is_moe_layer(layer) for layer in layout.stage_layers(stage, model.num_hidden_layers))
        for stage in stages
    )


def _add(terms: dict[str, float], forward: PassSeconds, layers: int, compute: float, collectives: float) -> None:
    """A pass of ``layers`` that computes ``compute`` times a forward pass and communicates ``collectives`` times it."""
    spent = compute * forward.compute + collectives * (forward.collectives + forward.exchange)
    terms["compute"] += layers * compute * forward.compute
    terms["collectives"] += layers * collectives * forward.collectives
    terms["exchange"] += layers * collectives * forward.exchange
    terms["launch"] += layers * max(0.0, compute * forward.launch - spent)


def _layer_forward(
    shape: RunShape, device: DeviceProfile, rates: Rates, batch: MicroBatch, is_moe: bool
) -> PassSeconds:
    work, train, layout = model_work(shape.model), shape.train, shape.train.layout
    layer = work.layer
    shards = layout.tensor_model_parallel_size * layout.context_parallel_size
    flops_per_s = device.peak_flops * rates.train_efficiency
    links = Links.of(device, rates.link_efficiency)
    weights = layer.attention + (layer.shared + layer.router if is_moe else layer.dense_mlp)
    dense = (2.0 * weights + layer.score * batch.length / 2) * batch.waited / shards / flops_per_s
    experts = exchange = 0.0
    if is_moe:
        spread = rates.expert_load_spread if shape.expert_load_spread is None else shape.expert_load_spread
        busiest = batch.tokens / shards * busiest_rank(work.num_experts, layout.expert_model_parallel_size, spread)
        experts = _expert_seconds(shape, device, rates, busiest)
        sent = busiest * work.topk * work.hidden * WEIGHT_BYTES
        exchange = 2 * links.all_to_all(sent, layout_group(layout, ("ep",), True, device.domain_devices))
        # Every expert-tensor-parallel rank gets the rows of all of them, and gives back terms of a sum.
        etp = layout_group(layout, ("tp",), True, device.domain_devices)
        exchange += 2 * links.gather(sent * etp.size, etp)
        shared = 2.0 * layer.shared * batch.waited / shards / flops_per_s
        hidden = {"nothing": 0.0, "shared": shared, "experts": experts}[train.exchange_beside]
        exchange = max(0.0, exchange - hidden)
    collectives = _tensor_parallel_seconds(shape, device, links, batch)
    return PassSeconds(dense + experts, collectives, exchange, rates.layer_pass_s)


def _expert_seconds(shape: RunShape, device: DeviceProfile, rates: Rates, tokens: float) -> float:
    """The routed experts of one rank for ``tokens`` tokens of its own: arithmetic, or reading their weights."""
    work, layout = model_work(shape.model), shape.train.layout
    arithmetic = 2.0 * work.topk * work.layer.expert * tokens / (device.peak_flops * rates.train_efficiency)
    ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
    weights = work.num_experts * work.layer.expert * WEIGHT_BYTES / ranks
    return max(arithmetic, weights / (device.hbm_bytes_per_s * rates.memory_efficiency))


def _tensor_parallel_seconds(shape: RunShape, device: DeviceProfile, links: Links, batch: MicroBatch) -> float:
    """Gathers and reduce-scatters around attention and MLP, and the keys and values of context parallelism."""
    work, layout = model_work(shape.model), shape.train.layout
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size
    spent = 0.0
    if tp > 1:
        group = layout_group(layout, ("tp",), False, device.domain_devices)
        spent += 4 * links.gather(batch.waited / cp * work.hidden * WEIGHT_BYTES, group)
    if cp > 1:
        group = layout_group(layout, ("cp",), False, device.domain_devices)
        width = 2.0 * shape.model.num_attention_heads * (shape.model.v_head_dim or shape.model.head_dim)
        spent += links.gather(batch.waited * width * WEIGHT_BYTES / tp, group)
    return spent


def _pipelined(
    shape: RunShape, stages: list[dict[str, float]], batch: MicroBatch, mini_batches: int
) -> dict[str, float]:
    """The terms of the slowest stage over all micro-batches, and the time that it waits for the others."""
    totals = [sum(stage.values()) for stage in stages]
    slowest = totals.index(max(totals))
    chunks = shape.train.layout.virtual_pipeline_model_parallel_size
    terms = {name: mini_batches * batch.count * spent for name, spent in stages[slowest].items()}
    whole = pipeline_seconds(totals, batch.count, chunks)
    terms["bubble"] = mini_batches * (whole - batch.count * totals[slowest])
    return terms


def pipeline_seconds(stages: Sequence[float], num_microbatches: float, num_chunks: int = 1) -> float:
    """From the first forward to the last backward of ``num_microbatches``, each taking ``stages[s]`` on stage s.

    The slowest stage never waits between its start and its end: M max(t). The others' time passes before and
    after: sum(t) - max(t), and a chunk's share of it when the stages' layers are cut into ``num_chunks`` (interleaved).
    Exact for 1F1B and for forward-only passes when the stages are equal; a lower bound otherwise.
    """
    slowest = max(stages)
    return num_microbatches * slowest + (sum(stages) - slowest) / num_chunks


def owned_parameters(shape: RunShape) -> float:
    """Parameters whose optimizer state one rank keeps: the distributed optimizer's share."""
    layout = shape.train.layout
    dense, experts = weights_per_rank(shape)
    replicas = layout.data_parallel_size * layout.context_parallel_size
    return dense / replicas + experts / layout.expert_data_parallel_size


def _optimizer_seconds(shape: RunShape, device: DeviceProfile, rates: Rates) -> float:
    owned = owned_parameters(shape)
    host_link = device.host_link_bytes_per_s * rates.host_link_efficiency
    if shape.train.optimizer == "swapped":
        return 2 * STATE_BYTES * owned / host_link
    if shape.train.optimizer == "cpu":
        arithmetic = owned * device.devices_per_node * CPU_ADAM_BYTES / (device.host_memory_gbs * 1e9)
        return (4 + WEIGHT_BYTES) * owned / host_link + arithmetic
    return (2 * STATE_BYTES + 6) * owned / (device.hbm_bytes_per_s * rates.memory_efficiency)


def _gradient_seconds(shape: RunShape, device: DeviceProfile, rates: Rates) -> float:
    """Reduce-scatter of fp32 gradients and all-gather of bf16 weights over the replicas of each."""
    layout, links = shape.train.layout, Links.of(device, rates.link_efficiency)
    spent = 0.0
    dense, experts = weights_per_rank(shape)
    for parameters, axes, is_expert in ((dense, ("dp", "cp"), False), (experts, ("dp",), True)):
        group = layout_group(layout, axes, is_expert, device.domain_devices)
        spent += links.gather((4 + WEIGHT_BYTES) * parameters, group)
    return spent
