"""Device memory of a layout in closed form, in microseconds: which layouts are worth a real plan.

Weights, gradients, optimizer state and the KV cache are arithmetic, exact but for padding. Activations are a bound:
numbers of values that a layer needs for a token, calibrated with plans of DeepSeek-V3 671B on 256 dies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import GROUP_AXES, PAIR, UNUSED_GROUPS
from tools.plan.devices import KINDS
from tools.plan.rank_plan import buffer_bytes
from tools.plan.search.weights import absorbed_copies, rollout_rank, training_stage
from tools.plan.setup import PlannedRun
from tools.plan.timing.run_shape import MicroBatches, RolloutShape, RunShape
from tools.plan.training import StepSize
from tools.plan.whole import PROCESS_BYTES
from tools.plan.world import environment_of, run_variables
from vllm.distributed.parallel_state import GROUP_PREFIX
from vllm.ops.cuda.exchange import is_gathered
from vllm.platforms.cpu import KV_CACHE_FRACTION_OF_HOST
from vllm.platforms.interface import ACTIVATION_FRACTION
from vllm.transformers_utils.config import HFConfig
from vllm_ascend.ops.exchanged_experts import tokens_of_a_call

STATE_BYTES = 12  # a parameter's float32 master weight and two moments
GRADIENT_BYTES = 4
ROUTER_BYTES = 4  # the rollout's gates are float32
# Temporary memory of a pass, in multiples of what one layer keeps; measured with plan_rank.
FORWARD_LAYERS, BACKWARD_LAYERS = 0.9, 1.8
MARGIN = 1.03
HEAD_BYTES = 4  # for each token and vocabulary entry
SAMPLER_COPIES = 6  # float32 copies of the logits


@dataclass
class Bounds:
    """Bounds of the memory of any layout of one run."""

    run: PlannedRun
    size: StepSize

    def __post_init__(self) -> None:
        self.config, self.hf, self.device = self.run.config, self.run.hf, self.run.device
        self.engine, self.settings = self.config.actor_rollout_ref.actor.megatron, self.config.actor_rollout_ref.rollout
        self.param_bytes = 4 if self.engine.dtype == "float32" else 2

    def memory(self, shape: RunShape) -> dict[str, float]:
        """Phase -> bound of device memory."""
        buffers = self._communicators(shape)
        training = {"log_prob": self.log_prob_bytes(shape) + buffers, "update": self.update_bytes(shape) + buffers}
        return self.rollout_bytes(shape, buffers) | training

    def _communicators(self, shape: RunShape) -> float:
        overrides, rebalances = self.engine.override_transformer_config, self.settings.rebalance_interval > 0
        dispatcher = overrides.get("moe_token_dispatcher_type", "alltoall")
        return communicator_bytes(self.device.family, shape.train.layout, dispatcher, shape.rollout, rebalances)

    def log_prob_bytes(self, shape: RunShape) -> float:
        """The memory of the fullest stage in a pass without a backward; 0 when there is no such pass."""
        if not (shape.has_reference or shape.has_old_log_prob):
            return 0.0
        models = 1 + (shape.has_reference and not self.engine.param_offload)
        tokens, most = self.tokens(shape, shape.train.log_prob), 0.0
        for stage, (stays, params) in enumerate(self._held(shape)):
            layers, head = self._largest_layer(shape, stage, tokens), self._head(shape, stage, tokens)
            most = max(most, stays + params * models + MARGIN * max(FORWARD_LAYERS * layers, head))
        return most

    def update_bytes(self, shape: RunShape) -> float:
        """The memory of the fullest stage in the update."""
        tokens, most = self.tokens(shape, shape.train.update), 0.0
        for stage, (stays, params) in enumerate(self._held(shape)):
            moving = self._owned(shape, stage) * STATE_BYTES if shape.train.optimizer == "offloaded" else 0.0
            grads = params / self.param_bytes * GRADIENT_BYTES
            most = max(most, stays + moving + params + grads + MARGIN * self._backward(shape, stage, tokens))
        return most

    def rollout_bytes(self, shape: RunShape, buffers: float) -> dict[str, float]:
        """Phase -> bytes of the rank whose training weights are fewest, which has the largest cache.

        buffers: of communicators.
        """
        rollout, weights, held = shape.rollout, self.rollout_weights(shape.rollout), self._held(shape)
        buckets = 2 * self.settings.update_weights_bucket_megabytes * 2**20
        is_offloaded = self.engine.param_offload
        # While the engine generates.
        kept = [buffers + stays + (0.0 if is_offloaded else params) for stays, params in held]
        cache, least = (self._cache_bytes(rollout, used + weights) for used in (min(kept), max(kept)))
        if self.settings.num_gpu_blocks_override is None and least < self._sequence_bytes(rollout):
            cache = inf  # the engine of the fullest stage refuses a cache that does not hold a sequence
        most_rows = max(rollout.graph_sizes or [rollout.max_num_seqs * (1 + rollout.num_drafts)])
        graphs = self._experts(shape, most_rows) if rollout.has_graphs else 0.0
        state = min(kept) + weights + cache + graphs
        return {
            "weight_sync": buffers + max(map(sum, held)) + weights + buckets,
            "generate": state + self._prefill(shape),
        }

    def rollout_weights(self, rollout: RolloutShape) -> float:
        """Bytes of weights on a rollout rank."""
        shares_tokens, hf = self.settings.use_sequence_parallel_moe, self._engine_model(rollout)
        parameters, routers = rollout_rank(hf, rollout.tp, rollout.expert_ranks, shares_tokens)
        multiplies_fp8 = rollout.weight_bytes < 2 and self.device.peak_fp8_tflops > 0
        has_copies = self.device.family == "ascend" or multiplies_fp8
        copies = absorbed_copies(hf, rollout.tp) * max(rollout.weight_bytes, 2.0) if has_copies else 0.0
        parameters += 2 * hf.hidden_size**2 * rollout.has_draft_layer
        return parameters * rollout.weight_bytes + copies + routers * ROUTER_BYTES

    def _engine_model(self, rollout: RolloutShape) -> HFModelConfig:
        """The model with the layer that drafts as one more of its own."""
        return replace(self.hf, num_hidden_layers=self.hf.num_hidden_layers + rollout.has_draft_layer)

    def host_bytes(self, shape: RunShape) -> float:
        """The host memory of a node whose ranks all need as much as the one that needs most."""
        copies = self.engine.param_offload + shape.has_reference
        state = 0 if shape.train.optimizer == "resident" else STATE_BYTES
        most = max(
            params * copies + self._owned(shape, stage) * state for stage, (_, params) in enumerate(self._held(shape))
        )
        return (most + PROCESS_BYTES) * self.config.trainer.n_gpus_per_node

    def _owned(self, shape: RunShape, stage: int) -> float:
        layout = shape.train.layout
        dense, experts = training_stage(self.hf, layout, stage)
        replicas = layout.data_parallel_size * layout.context_parallel_size
        return dense / replicas + experts / layout.expert_data_parallel_size

    def _held(self, shape: RunShape) -> list[tuple[float, float]]:
        """Bytes of (optimizer state that stays on the device during the rollout, weights) of a rank of each stage.

        Gradients are always offloaded for the rollout.
        """
        state = STATE_BYTES if shape.train.optimizer == "resident" else 0
        layout, item = shape.train.layout, float(self.param_bytes)
        return [
            (self._owned(shape, stage) * state, sum(training_stage(self.hf, layout, stage)) * item)
            for stage in range(layout.pipeline_model_parallel_size)
        ]

    def tokens(self, shape: RunShape, cut: MicroBatches) -> float:
        """Tokens of a micro-batch of the longest rows, on one context-parallel rank."""
        layout, size = shape.train.layout, self.size
        together = shape.samples_together(cut, size.prompt_length, size.response_length)
        length = size.prompt_length + together * size.response_length  # of the samples of a prompt
        rows: float = cut.samples
        if cut.token_budget:
            rows = max(1, cut.token_budget * layout.context_parallel_size // length) * together
        most = max(1, shape.num_sequences // layout.data_parallel_size)
        return min(rows, most) / together * length / layout.context_parallel_size

    def kept_layer_bytes(self, is_moe: bool, tokens: float, layout: ParallelLayout) -> float:
        """What the backward of a layer needs of its forward, without recomputation."""
        hf = self.hf
        heads, hidden = hf.num_attention_heads, hf.hidden_size
        if hf.is_mla:
            attention = heads * (2 * hf.qk_head_dim + hf.qk_nope_head_dim + 3 * hf.v_head_dim)
        else:
            attention = hf.head_dim * (4 * heads + 6 * hf.num_key_value_heads)
        values: float = attention + 4 * hidden
        if is_moe:
            # Expert-tensor-parallel ranks have the rows of all of them, and a part of the width.
            gathered = 2 * hidden * layout.expert_tensor_parallel_size
            routed = hf.num_experts_per_tok * (gathered + 3 * hf.moe_intermediate_size)
            values += 3 * hidden + 3 * hf.shared_expert_intermediate_size + self.size.load * routed
        else:
            values += 3 * hf.intermediate_size
        return values * tokens / layout.tensor_model_parallel_size * self.param_bytes

    def _backward(self, shape: RunShape, stage: int, tokens: float) -> float:
        layout, train = shape.train.layout, shape.train
        tp = layout.tensor_model_parallel_size
        numbers = layout.stage_layers(stage, self.hf.num_hidden_layers)
        again = len(numbers) if train.recomputed_layers < 0 else min(train.recomputed_layers, len(numbers))
        inputs = tokens / tp * self.hf.hidden_size * self.param_bytes
        kept = again * inputs + sum(
            self.kept_layer_bytes(self.hf.is_moe_layer(number), tokens, layout) for number in numbers[again:]
        )
        in_flight = layout.pipeline_model_parallel_size - stage
        needed = BACKWARD_LAYERS * self._largest_layer(shape, stage, tokens)
        return kept * in_flight + max(needed, self._head(shape, stage, tokens))

    def _largest_layer(self, shape: RunShape, stage: int, tokens: float) -> float:
        layout = shape.train.layout
        kinds = {self.hf.is_moe_layer(number) for number in layout.stage_layers(stage, self.hf.num_hidden_layers)}
        return max(self.kept_layer_bytes(kind, tokens, layout) for kind in kinds)

    def _head(self, shape: RunShape, stage: int, tokens: float) -> float:
        layout = shape.train.layout
        if stage != layout.pipeline_model_parallel_size - 1:
            return 0.0
        return tokens * self.hf.vocab_size / layout.tensor_model_parallel_size * HEAD_BYTES

    def _cache_bytes(self, shape: RolloutShape, used: float) -> float:
        """Bytes of the KV cache, as the engine sizes it when ``used`` bytes are taken."""
        rollout = self.settings
        if rollout.num_gpu_blocks_override is not None:
            return float(self._block_bytes(shape) * rollout.num_gpu_blocks_override)
        most = self._sequence_bytes(shape) * rollout.max_num_seqs
        if self.device.family == "cpu":
            return min(most, self.device.memory_bytes * KV_CACHE_FRACTION_OF_HOST * rollout.gpu_memory_utilization)
        allowed = self.device.memory_bytes * rollout.gpu_memory_utilization
        taken = used + self.device.reserved_bytes
        return max(0.0, min(most, allowed * (1 - ACTIVATION_FRACTION) - taken))

    def _sequence_bytes(self, shape: RolloutShape) -> float:
        """Bytes of the cache of one sequence of the greatest length."""
        rollout = self.settings
        return float(self._block_bytes(shape) * -(-rollout.context_length // rollout.block_size))

    def _block_bytes(self, shape: RolloutShape) -> int:
        rollout, item = self.settings, 4 if self.settings.dtype == "float32" else 2
        hf = self._engine_model(shape)
        return HFConfig(**vars(hf)).kv_values_per_token(shape.tp) * hf.num_hidden_layers * item * rollout.block_size

    def _prefill(self, shape: RunShape) -> float:
        """What the largest prefill step needs: its experts, or its attention, or the sampler."""
        hf, rollout, item = self.hf, shape.rollout, shape.rollout.weight_bytes
        tokens = rollout.max_num_batched_tokens
        context = tokens + self.size.prompt_length + self.size.response_length
        head = hf.qk_nope_head_dim + 2 * hf.v_head_dim + 3 * hf.qk_head_dim if hf.is_mla else 4 * hf.head_dim
        attention = context * hf.num_attention_heads / rollout.tp * head * item
        sampled = min(rollout.max_num_seqs * (1 + rollout.num_drafts), tokens) * hf.vocab_size * 4.0 * SAMPLER_COPIES
        return MARGIN * max(self._experts(shape, tokens), attention, sampled) + 4 * tokens * hf.hidden_size * item

    def _experts(self, shape: RunShape, tokens: int) -> float:
        """Bytes of one layer's routed experts, for ``tokens`` tokens of each replica."""
        hf, rollout, item = self.hf, shape.rollout, shape.rollout.weight_bytes
        hidden, inner, topk = hf.hidden_size, hf.moe_intermediate_size, hf.num_experts_per_tok
        if not hf.n_routed_experts:
            return tokens * 3.0 * hf.intermediate_size / rollout.tp * item
        span = rollout.expert_ranks
        is_shared = rollout.has_expert_parallel and span > 1
        if not is_shared or rollout.expert_exchange == "all_gather":
            gathered = tokens * (rollout.dp if is_shared else 1)
            width = inner if is_shared else inner // rollout.tp
            # Ascend's experts carry every choice along, those of other ranks too.
            rows = gathered * topk / (span if is_shared and self.device.family != "ascend" else 1)
            return (rows * (3.0 * hidden + width) + 2.0 * gathered * hidden) * item
        num_here = hf.n_routed_experts // span
        own = tokens / rollout.tp
        variables = run_variables(self.device.family)
        if self.device.family == "ascend" and own <= tokens_of_a_call(hidden, topk, num_here, span, variables):
            rows = own * span * min(num_here, topk)
            return (rows * (2.0 * hidden + 3 * inner) + 2 * own * hidden) * item
        if self.device.family == "cuda" and is_gathered(ceil(own), span):
            return own * span * (min(num_here, topk) * (2.0 * hidden + 3 * inner) + 3 * hidden) * item
        return own * topk * self.size.load * (4.0 * hidden + 3 * inner) * item


@lru_cache(maxsize=4096)
def communicator_bytes(
    family: str, layout: ParallelLayout, dispatcher: str, rollout: RolloutShape, rebalances: bool
) -> int:
    """Device memory of the communicators that a step uses on a rank of a stage that has one before it and one after it,
    each with the buffers that its group asks for.

    family: of the device · dispatcher: ``moe_token_dispatcher_type``.
    """
    used = ["world"] if layout.world_size > 1 else []
    for name in GROUP_AXES.keys() - UNUSED_GROUPS[dispatcher]:
        used += [name] if len(layout.members(0, *GROUP_AXES[name])) > 1 else []
    used += [PAIR, PAIR] if layout.pipeline_model_parallel_size > 1 else []
    shares_experts = rollout.has_expert_parallel and rollout.expert_ranks > 1
    engine = {
        "tp": rollout.tp > 1,
        "exchange": shares_experts and rollout.expert_exchange == "dispatch",
        "ep": shares_experts and rollout.expert_exchange != "dispatch",
        "dp": rollout.dp > 1 and (shares_experts or rebalances),
    }
    used += [GROUP_PREFIX + name for name, is_used in engine.items() if is_used]
    with environment_of(run_variables(family)):
        return sum(buffer_bytes(KINDS[family], name) for name in used)
