"""Seconds of a generation: prefill, then decode steps while fewer and fewer sequences run, until the longest one ends.

A decode step of b sequences at context c takes

    layers x latency + weights read or multiplied + cache read or multiplied + collectives' bytes + the host's part

With k drafts of each sequence it computes b (1 + k) rows, and brings ``drafts.tokens_per_step`` tokens. Replicas that
share experts step together, so all of them step while one has a sequence left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2

from tools.plan.devices import DeviceProfile
from tools.plan.model_work import ModelWork, busiest_rank, draft_layer_work, model_work
from tools.plan.timing.constants import Rates
from tools.plan.timing.drafts import acceptance_note, progress_variance, tokens_per_step
from tools.plan.timing.lengths import scattered
from tools.plan.timing.links import Links, consecutive_group
from tools.plan.timing.run_shape import DECODE_FEATURES, RunShape
from tools.plan.timing.turns import generation_terms

CACHE_BYTES = 2  # bf16
ACTIVATION_BYTES = 4 << 30  # what a step needs in addition to weights and cache
TERMS = ("latency", "weights", "cache", "collectives", "host")  # of a decode step
DRAFTS = "drafts"  # the term of the passes that make drafts


def rollout_seconds(shape: RunShape, device: DeviceProfile, rates: Rates) -> dict[str, float]:
    """Terms of the generation of one step's responses."""
    return RolloutTimes(shape, device, rates).seconds()


def rollout_weights(shape: RunShape) -> float:
    """Bytes of weights on one rollout rank."""
    work, rollout = model_work(shape.model), shape.rollout
    parts = [work, draft_layer_work(work, rollout.tp)] if rollout.has_draft_layer else [work]
    counts = (part.dense_parameters / rollout.tp + part.expert_parameters / rollout.expert_ranks for part in parts)
    return sum(counts) * rollout.weight_bytes


def speculation_text(shape: RunShape, device: DeviceProfile, rates: Rates) -> str:
    """What is expected of the run's drafts, and how many pay by the sequences of a replica; empty without any."""
    rollout, times = shape.rollout, RolloutTimes(shape, device, rates)
    if not rollout.num_drafts:
        return ""
    if note := acceptance_note(rollout.draft_method, shape.lengths.acceptance):
        return f"speculation: {rollout.draft_method}, {_drafts(rollout.num_drafts)}; {note}"
    most = max(1, int(min(rollout.max_num_seqs, shape.generated_sequences / rollout.replicas)))
    loads = [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
    pay = ", ".join(f"{load}: {times.best_drafts(load, times.mean_context)}" for load in loads)
    tokens = tokens_per_step(shape.acceptance, rollout.num_drafts)
    right = ", ".join(f"{rate:g}" for rate in shape.acceptance[: rollout.num_drafts])
    return (
        f"speculation: {rollout.draft_method}, {_drafts(rollout.num_drafts)}, "
        f"{tokens:.2f} tokens a step expected ({right} right); drafts that pay by running sequences: {pay}"
    )


def _drafts(num_drafts: int) -> str:
    return f"{num_drafts} draft{'s' if num_drafts > 1 else ''}"


@dataclass
class RolloutTimes:
    shape: RunShape
    device: DeviceProfile
    rates: Rates

    def __post_init__(self) -> None:
        self.rollout, self.lengths, self.work = self.shape.rollout, self.shape.lengths, model_work(self.shape.model)
        self.links, layer = Links.of(self.device, self.rates.link_efficiency), self.work.layer
        self.draft_layer = draft_layer_work(self.work, self.rollout.tp)
        self.head = replace(self.work, num_layers=0, num_dense=0, embedding=0.0)
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
        mean_context = self.mean_context
        slots = min(rows, self.running_sequences(mean_context))
        terms = dict.fromkeys((*TERMS, *([DRAFTS] if self.rollout.has_draft_layer else [])), 0.0)
        terms["prefill"] = self._prefill(rows)
        turns, never_ends = lengths.turns, self.shape.schedule == "fully_async"

        def spend(sequences: float, context: float, count: float) -> None:
            for name, seconds in self.token_terms(sequences, context).items():
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
            return terms | generation_terms(*given, self.token_terms)
        spend(slots, mean_context, (rows - slots) * responses.mean / slots)
        if self.rollout.num_drafts:  # some get more right ones than others, and end earlier
            responses = scattered(responses, progress_variance(self.shape.acceptance, self.rollout.num_drafts))
        longest = responses.max_of(slots * self.rollout.dp)
        before = 0.0
        for point, ended in zip(responses.points, (0.0, *responses.below), strict=False):
            if (end := min(point, longest)) > before:
                spend(max(1.0, slots * (1 - ended)), lengths.prompt_mean + (before + end) / 2, end - before)
                before = end
        return terms

    @property
    def mean_context(self) -> float:
        """Tokens in the cache of a sequence, over the steps of all."""
        responses = self.lengths.responses
        return self.lengths.prompt_mean + responses.mean_square / responses.mean / 2

    def running_sequences(self, mean_context: float) -> float:
        """Sequences that a replica runs at a time: as many as allowed and as its cache has room for.

        At least one even without room for it: the memory plan refuses that.
        """
        free = self.device.memory_bytes * self.rollout.memory_share - rollout_weights(self.shape) - ACTIVATION_BYTES
        num_layers = self.work.num_layers + self.rollout.has_draft_layer
        tokens = max(free, 0.0) / (num_layers * self.cache_per_token)
        return max(1.0, min(self.rollout.max_num_seqs, tokens / mean_context))

    def token_terms(self, sequences: float, context: float) -> dict[str, float]:
        """Terms of a token of every sequence: those of the fastest decode step over the tokens that it brings."""
        count = self.best_drafts(sequences, context)
        tokens = tokens_per_step(self.shape.acceptance, count)
        return {name: seconds / tokens for name, seconds in self.decode_step(sequences, context, count).items()}

    def best_drafts(self, sequences: float, context: float) -> int:
        """The number of drafts, at most ``num_drafts``, with which a token takes least."""
        rollout, acceptance = self.rollout, self.shape.acceptance
        if not rollout.num_drafts or 0 < rollout.most_drafting < sequences:
            return 0

        def seconds(count: int) -> float:
            return sum(self.decode_step(sequences, context, count).values()) / tokens_per_step(acceptance, count)

        return min(range(rollout.num_drafts + 1), key=seconds)

    def decode_step(self, sequences: float, context: float, num_drafts: int = 0) -> dict[str, float]:
        """``TERMS`` of one step of ``sequences`` running on each replica, each with ``context`` tokens in the cache and
        ``num_drafts`` drafts; with a prediction layer ``DRAFTS`` too.

        That layer computes all rows where it drafts at all, and one row of each sequence for every further draft; it is
        captured as the others are. Ngrams and suffixes are looked up in no time.
        """
        rollout, rates = self.rollout, self.rates
        rows = sequences * (1 + num_drafts)
        agreement = (rates.host_sync_s if rollout.host_sync else rates.device_sync_s) if rollout.dp > 1 else 0.0
        host = rates.decode_host_s + rates.decode_host_s_per_sequence * rows + 2 * agreement
        terms = self._pass(self.work, rows, context) | {"host": host}
        if rollout.has_draft_layer:
            terms[DRAFTS] = 0.0
        if rollout.has_draft_layer and num_drafts:
            of_layer = [sum(self._pass(self.draft_layer, count, context).values()) for count in (rows, sequences)]
            heads = num_drafts * sum(self._pass(self.head, sequences, context).values())
            terms[DRAFTS] = of_layer[0] + (num_drafts - 1) * of_layer[1] + heads
        return terms

    def _pass(self, work: ModelWork, rows: float, context: float) -> dict[str, float]:
        """``TERMS`` of the layers of ``work`` on ``rows`` rows of a replica, without the host's."""
        rollout, device, rates = self.rollout, self.device, self.rates
        computed = self._graph_size(rows)
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
        read = rows * context * work.num_layers
        is_captured = rollout.has_graphs and computed <= max(rollout.graph_sizes, default=computed)
        layer = rates.decode_layer_s if is_captured else max(rates.decode_layer_s, rates.eager_layer_s)
        return {
            "latency": work.num_layers * (layer + sum(map(self._lacking_us, rollout.lacks)) * 1e-6),
            "weights": dense + self._experts(work, peak, bytes_per_s, computed),
            "cache": max(
                read * self.cache_per_token / bytes_per_s, read * work.layer.absorbed_score / rollout.tp / flops_per_s
            ),
            "collectives": self._collectives(work, computed),
        }

    def _experts(self, work: ModelWork, flops_per_s: float, bytes_per_s: float, sequences: float) -> float:
        """The routed experts of one rank: all that some token chose are read, and each token's are multiplied."""
        rollout = self.rollout
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

    def _collectives(self, work: ModelWork, sequences: float) -> float:
        """All-reduces of tensor parallelism, and the experts' exchange; kernels' own latency is in ``latency``."""
        rollout = self.rollout
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
        prompt, num_layers = self.lengths.prompt_mean, self.work.num_layers + self.rollout.has_draft_layer
        work = replace(self.work, num_layers=num_layers)
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
