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
from tools.plan.model_work import busiest_rank, model_work
from tools.plan.timing.constants import Rates
from tools.plan.timing.links import Group, Links, layout_group
from tools.plan.timing.run_shape import MicroBatches, RunShape

WEIGHT_BYTES = 2  # bf16
STATE_BYTES = 12  # fp32 master weight and two moments
CPU_ADAM_BYTES = 28  # host memory that one parameter's update reads and writes: gradient, state, and the new weight


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a data-parallel rank, in expected tokens."""

    count: float  # micro-batches of a mini-batch
    tokens: float  # of the mean one
    waited: float  # of the longest among ranks that wait for one another
    length: float  # of a sequence in it


@dataclass(frozen=True)
class PassSeconds:
    """One layer, one micro-batch, forward. launch: the least that it takes, whatever the others are."""

    compute: float
    collectives: float
    exchange: float
    launch: float


def log_prob_seconds(shape: RunShape, device: DeviceProfile, rates: Rates) -> dict[str, float]:
    """Terms of one forward pass over the batch."""
    return _Training(shape, device, rates).passes(shape.train.log_prob, 1, is_update=False)


def update_seconds(shape: RunShape, device: DeviceProfile, rates: Rates) -> dict[str, float]:
    """Terms of an update: its passes, the gradients' reduction and the optimizer."""
    training, count = _Training(shape, device, rates), shape.train.mini_batches
    terms = training.passes(shape.train.update, count, is_update=True)
    return terms | {"optimizer": count * training.optimizer(), "gradients": count * training.gradients()}


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


def owned_parameters(shape: RunShape) -> float:
    """Parameters whose optimizer state one rank keeps: the distributed optimizer's share."""
    layout = shape.train.layout
    dense, experts = weights_per_rank(shape)
    replicas = layout.data_parallel_size * layout.context_parallel_size
    return dense / replicas + experts / layout.expert_data_parallel_size


def micro_batch(shape: RunShape, cut: MicroBatches, mini_batches: int) -> MicroBatch:
    """How ``cut`` divides a mini-batch of a data-parallel rank."""
    layout, lengths = shape.train.layout, shape.computed_lengths(cut)
    responses, prompt = lengths.responses, lengths.prompt_mean / lengths.together
    rows = shape.num_sequences / layout.data_parallel_size / mini_batches
    coupled = 1  # data-parallel ranks whose experts serve one another: they run each layer of a micro-batch together
    if shape.model.n_routed_experts:
        expert_ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
        coupled = max(1, expert_ranks // (layout.tensor_model_parallel_size * layout.context_parallel_size))
    if cut.token_budget:
        # Whole sequences, or those of a prompt together, fill a micro-batch until the next no longer fits, which leaves
        # half of one on average.
        room, unit = cut.token_budget * layout.context_parallel_size, lengths.together * lengths.mean
        filled = max(room - unit / 2, min(room, unit))
        count = max(1.0, ceil(rows * lengths.mean / filled))
        tokens = rows * lengths.mean / count
        return MicroBatch(count, tokens, tokens, lengths.paid)
    size = min(cut.samples, rows)
    count = ceil(rows / size)
    if cut.is_padded:
        longest = size * (prompt + responses.max_of(size))
        waited = size * (prompt + responses.max_of(size * coupled))
        return MicroBatch(count, longest, waited, waited / size)
    tokens = size * lengths.mean
    if coupled > 1:
        waited = size * prompt + responses.max_of_sums(coupled, size)
    elif shape.train.is_balanced:
        waited = tokens
    else:
        all_rows = responses.max_of_sums(layout.data_parallel_size, rows)
        waited = size * prompt + all_rows / count
    return MicroBatch(count, tokens, waited, lengths.paid * waited / tokens)


def pipeline_seconds(stages: Sequence[float], num_microbatches: float, num_chunks: int = 1) -> float:
    """From the first forward to the last backward of ``num_microbatches``, each taking ``stages[s]`` on stage s.

    The slowest stage never waits between its start and its end: M max(t). The others' time passes before and
    after: sum(t) - max(t), and a chunk's share of it when the stages' layers are cut into ``num_chunks`` (interleaved).
    Exact for 1F1B and for forward-only passes when the stages are equal; a lower bound otherwise.
    """
    slowest = max(stages)
    return num_microbatches * slowest + (sum(stages) - slowest) / num_chunks


@dataclass
class _Training:
    shape: RunShape
    device: DeviceProfile
    rates: Rates

    def __post_init__(self) -> None:
        self.train, self.layout, self.work = self.shape.train, self.shape.train.layout, model_work(self.shape.model)
        self.shards = self.layout.tensor_model_parallel_size * self.layout.context_parallel_size
        self.flops_per_s = self.device.peak_flops * self.rates.train_efficiency
        self.links = Links.of(self.device, self.rates.link_efficiency)

    def passes(self, cut: MicroBatches, mini_batches: int, is_update: bool) -> dict[str, float]:
        """The terms of the slowest stage over all micro-batches, and the time that it waits for the others."""
        batch = micro_batch(self.shape, cut, mini_batches)
        stages = self._stages(batch, is_update)
        totals = [sum(stage.values()) for stage in stages]
        slowest = totals.index(max(totals))
        terms = {name: mini_batches * batch.count * spent for name, spent in stages[slowest].items()}
        whole = pipeline_seconds(totals, batch.count, self.layout.virtual_pipeline_model_parallel_size)
        terms["bubble"] = mini_batches * (whole - batch.count * totals[slowest])
        return terms

    def _stages(self, batch: MicroBatch, is_update: bool) -> list[dict[str, float]]:
        """Seconds of one micro-batch on each stage, by term."""
        stage_kinds = _stage_kinds(self.layout, self.shape.model)
        passes = {
            is_moe: self._layer_forward(batch, is_moe)
            for is_moe in sorted({is_moe for kinds in stage_kinds for is_moe in kinds})
        }
        stages = []
        for stage, kinds in enumerate(stage_kinds):
            again = len(kinds) if self.train.recomputed_layers < 0 else self.train.recomputed_layers
            terms = {"compute": 0.0, "collectives": 0.0, "exchange": 0.0, "launch": 0.0, "sends": 0.0}
            for is_moe, forward in passes.items():
                count = kinds.count(is_moe)
                _add(terms, forward, count + is_update * kinds[:again].count(is_moe), 1.0, 1.0)
                _add(terms, forward, is_update * count, 2.0, 1.5)
            if stage == self.layout.pipeline_model_parallel_size - 1:
                head = 2.0 * self.work.embedding * batch.waited / self.shards / self.flops_per_s
                terms["compute"] += head * (3 if is_update else 1)
                if is_update and self.train.prediction_layers:  # no other pass has them
                    last = passes[self.shape.model.has_moe_mtp]
                    again = self.train.recomputed_layers != 0
                    _add(terms, last, self.train.prediction_layers * (1 + again), 1.0, 1.0)
                    _add(terms, last, self.train.prediction_layers, 2.0, 1.5)
                    terms["compute"] += head * (3 + again) * self.train.prediction_layers
            if self.layout.pipeline_model_parallel_size > 1:
                sent = batch.waited * self.work.hidden * WEIGHT_BYTES / self.shards
                terms["sends"] = self.links.send(sent, self._group("pp").is_in_domain) * (2 if is_update else 1)
            stages.append(terms)
        return stages

    def _layer_forward(self, batch: MicroBatch, is_moe: bool) -> PassSeconds:
        work, layout, layer = self.work, self.layout, self.work.layer
        weights = layer.attention + (layer.shared + layer.router if is_moe else layer.dense_mlp)
        dense = (2.0 * weights + layer.score * batch.length / 2) * batch.waited / self.shards / self.flops_per_s
        experts = exchange = 0.0
        if is_moe:
            spread = self.shape.load_spread(self.rates.expert_load_spread)
            most = busiest_rank(work.num_experts, layout.expert_model_parallel_size, spread)
            busiest = batch.tokens / self.shards * most
            experts = self._experts(busiest)
            sent = busiest * work.topk * work.hidden * WEIGHT_BYTES
            exchange = 2 * self.links.all_to_all(sent, self._group("ep", is_expert=True))
            # Every expert-tensor-parallel rank gets the rows of all of them, and gives back terms of a sum.
            etp = self._group("tp", is_expert=True)
            exchange += 2 * self.links.gather(sent * etp.size, etp)
            shared = 2.0 * layer.shared * batch.waited / self.shards / self.flops_per_s
            hidden = {"nothing": 0.0, "shared": shared, "experts": experts}[self.train.exchange_beside]
            exchange = max(0.0, exchange - hidden)
        return PassSeconds(dense + experts, self._tensor_parallel(batch), exchange, self.rates.layer_pass_s)

    def _experts(self, tokens: float) -> float:
        """The routed experts of one rank for ``tokens`` tokens of its own: arithmetic, or reading their weights."""
        work, layout = self.work, self.layout
        arithmetic = 2.0 * work.topk * work.layer.expert * tokens / self.flops_per_s
        ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
        weights = work.num_experts * work.layer.expert * WEIGHT_BYTES / ranks
        return max(arithmetic, weights / (self.device.hbm_bytes_per_s * self.rates.memory_efficiency))

    def _tensor_parallel(self, batch: MicroBatch) -> float:
        """Gathers and reduce-scatters around attention and MLP, and the keys and values of context parallelism."""
        model, tp, cp = self.shape.model, self.layout.tensor_model_parallel_size, self.layout.context_parallel_size
        spent = 0.0
        if tp > 1:
            spent += 4 * self.links.gather(batch.waited / cp * self.work.hidden * WEIGHT_BYTES, self._group("tp"))
        if cp > 1:
            heads_here = max(1.0, model.num_key_value_heads / tp)
            width = 2.0 * heads_here * (model.v_head_dim or model.head_dim)
            spent += self.links.gather(batch.waited * width * WEIGHT_BYTES, self._group("cp"))
        return spent

    def optimizer(self) -> float:
        """Seconds of one optimizer step."""
        device, rates, owned = self.device, self.rates, owned_parameters(self.shape)
        host_link = device.host_link_bytes_per_s * rates.host_link_efficiency
        if self.train.optimizer == "swapped":
            return 2 * STATE_BYTES * owned / host_link
        if self.train.optimizer == "cpu":
            arithmetic = owned * device.devices_per_node * CPU_ADAM_BYTES / (device.host_memory_gbs * 1e9)
            return (4 + WEIGHT_BYTES) * owned / host_link + arithmetic
        return (2 * STATE_BYTES + 6) * owned / (device.hbm_bytes_per_s * rates.memory_efficiency)

    def gradients(self) -> float:
        """Reduce-scatter of fp32 gradients and all-gather of bf16 weights over the replicas of each."""
        dense, experts = weights_per_rank(self.shape)
        spent = self.links.gather((4 + WEIGHT_BYTES) * dense, self._group("dp", "cp"))
        return spent + self.links.gather((4 + WEIGHT_BYTES) * experts, self._group("dp", is_expert=True))

    def _group(self, *axes: str, is_expert: bool = False) -> Group:
        return layout_group(self.layout, axes, is_expert, self.device.domain_devices)


@lru_cache(maxsize=1024)
def _stage_kinds(layout: ParallelLayout, model: HFModelConfig) -> tuple[tuple[bool, ...], ...]:
    """Whether each layer of each stage has experts."""
    return tuple(
        tuple(model.is_moe_layer(layer) for layer in layout.stage_layers(stage, model.num_hidden_layers))
        for stage in range(layout.pipeline_model_parallel_size)
    )


def _add(terms: dict[str, float], forward: PassSeconds, layers: int, compute: float, collectives: float) -> None:
    """A pass of ``layers`` that computes ``compute`` times a forward pass and communicates ``collectives`` times it."""
    spent = compute * forward.compute + collectives * (forward.collectives + forward.exchange)
    terms["compute"] += layers * compute * forward.compute
    terms["collectives"] += layers * collectives * forward.collectives
    terms["exchange"] += layers * collectives * forward.exchange
    terms["launch"] += layers * max(0.0, compute * forward.launch - spent)
