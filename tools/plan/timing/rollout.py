"""Seconds of a generation: prefill, then decode steps while fewer and fewer sequences run, until the longest one ends.

A decode step of b sequences at context c takes

    layers x latency + weights read or multiplied + cache read or multiplied + collectives' bytes + the host's part

Replicas that share experts step together, so all of them step while one has a sequence left.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from tools.plan.devices import DeviceProfile
from tools.plan.model_work import busiest_rank, model_work
from tools.plan.timing.constants import Rates
from tools.plan.timing.links import Links, consecutive_group
from tools.plan.timing.run_shape import DECODE_FEATURES, RunShape
from tools.plan.timing.turns import generation_terms

CACHE_BYTES = 2  # bf16
ACTIVATION_BYTES = 4 << 30  # what a step needs in addition to weights and cache
TERMS = ("latency", "weights", "cache", "collectives", "host")  # of a decode step


def rollout_seconds(shape: RunShape, device: DeviceProfile, rates: Rates) -> dict[str, float]:
    """Terms of the generation of one step's responses."""
    return RolloutTimes(shape, device, rates).seconds()


def rollout_weights(shape: RunShape) -> float:
    """Bytes of weights on one rollout rank."""
    work, rollout = model_work(shape.model), shape.rollout
    return (work.dense_parameters / rollout.tp + work.expert_parameters / rollout.expert_ranks) * rollout.weight_bytes


@dataclass
class RolloutTimes:
    shape: RunShape
    device: DeviceProfile
    rates: Rates

    def __post_init__(self) -> None:
        self.rollout, self.lengths, self.work = self.shape.rollout, self.shape.lengths, model_work(self.shape.model)
        self.links, layer = Links.of(self.device, self.rates.link_efficiency), self.work.layer
        # Bytes of the cache of one token and layer on one rank.
        self.cache_per_token = layer.cache * CACHE_BYTES / min(self.rollout.tp, layer.cache_shards)

    @property
    def peak_of_weights(self) -> float:
        """Operations a second of products with weights, at best: FP8 weights are multiplied as such where a device does
        that at all.
        """
        is_fp8 = self.rollout.weight_bytes < 2 and self.device.peak_fp8_tflops > 0
        return self.device.peak_fp8_tflops * 1e12 if is_fp8 else self.device.peak_flops

    def seconds(self) -> dict[str, float]:
        """See ``rollout_seconds``."""
        lengths, responses = self.lengths, self.lengths.responses
        rows = self.shape.generated_sequences / self.rollout.replicas
        mean_context = lengths.prompt_mean + responses.mean_square / responses.mean / 2
        slots = min(rows, self.running_sequences(mean_context))
        terms = dict.fromkeys(TERMS, 0.0)
        terms["prefill"] = self._prefill(rows)
        turns, never_ends = lengths.turns, self.shape.schedule == "fully_async"

        def spend(sequences: float, context: float, count: float) -> None:
            for name, seconds in self.decode_step(sequences, context).items():
                terms[name] += seconds * count

        # While rows wait, every slot is taken: (rows - slots) rows pass before the last one starts. A generation that
        # never stops for a step always has waiting rows; samples that wait for a tool then cost nothing.
        if never_ends:
            sampled = responses.mean - (turns.given_tokens() if turns is not None else 0.0)
            spend(slots, mean_context, rows * max(sampled, 1.0) / slots)
            return terms
        terms["memory"] = self.rates.generation_fixed_s
        if turns is not None:
            given = (turns, responses, lengths.prompt_mean, rows, slots, self.rollout.dp)
            return terms | generation_terms(*given, self.decode_step)
        spend(slots, mean_context, (rows - slots) * responses.mean / slots)
        longest = responses.max_of(slots * self.rollout.dp)
        before = 0.0
        for point, ended in zip(responses.points, (0.0, *responses.below), strict=False):
            if (end := min(point, longest)) > before:
                spend(max(1.0, slots * (1 - ended)), lengths.prompt_mean + (before + end) / 2, end - before)
                before = end
        return terms

    def running_sequences(self, mean_context: float) -> float:
        """Sequences that a replica runs at a time: as many as allowed and as its cache has room for.

        At least one even without room for it: the memory plan refuses that.
        """
        free = self.device.memory_bytes * self.rollout.memory_share - rollout_weights(self.shape) - ACTIVATION_BYTES
        tokens = max(free, 0.0) / (self.work.num_layers * self.cache_per_token)
        return max(1.0, min(self.rollout.max_num_seqs, tokens / mean_context))

    def decode_step(self, sequences: float, context: float) -> dict[str, float]:
        """``TERMS`` of one step of ``sequences`` running on each replica, each with ``context`` tokens in the cache."""
        work, rollout, device, rates = self.work, self.rollout, self.device, self.rates
        computed = self._graph_size(sequences)
        bytes_per_s = device.hbm_bytes_per_s * rates.memory_efficiency
        flops_per_s = device.peak_flops * rates.decode_efficiency
        peak = self.peak_of_weights * rates.decode_efficiency
        dense = max(
            2.0 * work.dense_parameters / rollout.tp * computed / peak,
            work.dense_parameters / rollout.tp * rollout.weight_bytes / bytes_per_s,
        )
        if rollout.has_whole_shared:
            more = work.num_moe * work.layer.shared * (1 - 1 / rollout.tp)
            dense += more * rollout.weight_bytes / bytes_per_s
        read = sequences * context * work.num_layers
        layer = rates.decode_layer_s if rollout.has_graphs else max(rates.decode_layer_s, rates.eager_layer_s)
        agreement = (rates.host_sync_s if rollout.host_sync else rates.device_sync_s) if rollout.dp > 1 else 0.0
        return {
            "latency": work.num_layers * (layer + sum(map(self._lacking_us, rollout.lacks)) * 1e-6),
            "weights": dense + self._experts(peak, bytes_per_s, computed),
            "cache": max(
                read * self.cache_per_token / bytes_per_s, read * work.layer.absorbed_score / rollout.tp / flops_per_s
            ),
            "collectives": self._collectives(computed),
            "host": rates.decode_host_s + rates.decode_host_s_per_sequence * sequences + 2 * agreement,
        }

    def _experts(self, flops_per_s: float, bytes_per_s: float, sequences: float) -> float:
        """The routed experts of one rank: all that some token chose are read, and each token's are multiplied."""
        work, rollout = self.work, self.rollout
        if not work.num_moe:
            return 0.0
        tokens = sequences * (rollout.dp if rollout.has_expert_parallel else 1)
        ranks = rollout.expert_ranks
        chosen = 1.0 - (1.0 - work.topk / work.num_experts) ** tokens
        spread = self.shape.load_spread(self.rates.expert_load_spread)
        busiest = busiest_rank(work.num_experts, ranks, spread) if rollout.has_expert_parallel else 1.0
        read = work.expert_parameters * chosen / ranks * rollout.weight_bytes / bytes_per_s
        multiplied = 2.0 * work.num_moe * work.topk * work.layer.expert * tokens / ranks * busiest / flops_per_s
        return max(read, multiplied)

    def _collectives(self, sequences: float) -> float:
        """All-reduces of tensor parallelism, and the experts' exchange; kernels' own latency is in ``latency``."""
        work, rollout = self.work, self.rollout
        spent = 0.0
        if rollout.tp > 1:
            group = consecutive_group(rollout.tp, self.device.domain_devices)
            spent += 2 * work.num_layers * self.links.all_reduce(sequences * work.hidden * CACHE_BYTES, group)
        if rollout.has_expert_parallel and work.num_moe:
            group = consecutive_group(rollout.expert_ranks, self.device.domain_devices)
            tokens = sequences * rollout.dp
            if rollout.dp > 1 and tokens <= rollout.most_gathered:
                return spent + 2 * work.num_moe * self.links.gather(tokens * work.hidden * CACHE_BYTES, group)
            sent = sequences / rollout.tp * work.topk * work.hidden * CACHE_BYTES
            spent += 2 * work.num_moe * self.links.all_to_all(sent, group)
        return spent

    def _lacking_us(self, feature: str) -> float:
        assert feature in DECODE_FEATURES
        # Only a rank with a single expert transposed its weights.
        if feature == "no_transpose" and self.work.num_experts / self.rollout.expert_ranks > 1:
            return 0.0
        us: float = getattr(self.rates, f"{feature}_us")
        return us

    def _prefill(self, rows: float) -> float:
        work, prompt = self.work, self.lengths.prompt_mean
        num_prompts = rows / min(self.shape.samples, rows) if self.rollout.shares_prompts else rows
        per_token = 2.0 * (
            work.num_layers * work.layer.attention
            + work.num_dense * work.layer.dense_mlp
            + work.num_moe * (work.topk * work.layer.expert + work.layer.shared)
        )

        def seconds(tokens: float, context: float) -> float:
            scores = work.num_layers * work.layer.score * context / 2
            token_s = per_token / self.peak_of_weights + scores / self.device.peak_flops
            return tokens * token_s / self.rollout.tp / self.rates.train_efficiency

        spent = seconds(num_prompts * prompt, prompt)
        if (turns := self.lengths.turns) is not None:  # what was computed before is found in the cache
            spent += seconds(rows * turns.given_tokens(), 2 * prompt + self.lengths.responses.mean)
        return spent

    def _graph_size(self, sequences: float) -> float:
        """Sequences that a step computes: the smallest captured graph that holds them; without graphs, themselves."""
        if not self.rollout.has_graphs:
            return sequences
        sizes = self.rollout.graph_sizes or [2**power for power in range(ceil(log2(sequences)) + 2)]
        return next((float(size) for size in sizes if size >= sequences), sequences)
