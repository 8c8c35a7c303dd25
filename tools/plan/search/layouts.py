"""Every training and rollout layout of a world that divides, with the micro-batches and settings that go with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout
from tools.plan.devices import KINDS, DeviceProfile
from tools.plan.setup import PlannedRun
from tools.plan.timing.drafts import MTP
from tools.plan.timing.graphs import most_captured
from tools.plan.timing.run_shape import MicroBatches, RolloutShape
from tools.plan.world import run_variables
from verl.trainer.config import PPOTrainerConfig
from vllm.ops.cuda.exchange import is_gathered
from vllm_ascend.ops.exchanged_experts import tokens_of_a_call

MAX_CP = 8
DRAFTS_TRIED = (1, 2, 3)
LEAST_PREFILL_TOKENS = 256


def training_layouts(run: PlannedRun) -> Iterator[ParallelLayout]:
    """Layouts that divide: TP, PP with each of ``layer_lists``, CP, EP, ETP; rows divide over data-parallel ranks."""
    config, hf, own = run.config, run.hf, run.config.training_layout
    world, layers, experts = own.world_size, hf.num_hidden_layers, hf.n_routed_experts
    rows = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    for pp in (pp for pp in divisors(world) if pp <= layers):
        for tp in (tp for tp in divisors(world // pp) if joined(tp, run.device)):
            for cp in (cp for cp in divisors(world // pp // tp) if cp <= MAX_CP):
                if rows % (world // (pp * tp * cp)):
                    continue
                for etp in divisors(tp) if experts else [1]:
                    for ep in divisors(world // pp // etp) if experts else [1]:
                        plain = replace(
                            own,
                            tensor_model_parallel_size=tp,
                            pipeline_model_parallel_size=pp,
                            context_parallel_size=cp,
                            expert_model_parallel_size=ep,
                            expert_tensor_parallel_size=etp,
                            virtual_pipeline_model_parallel_size=1,
                            num_layers_in_first_pipeline_stage=None,
                            num_layers_in_last_pipeline_stage=None,
                            noop_layers=(),
                        )
                        for counts in layer_lists(layers, pp):
                            layout = replace(plain, num_layer_list=counts)
                            sizes = (experts or None, hf.num_attention_heads, hf.vocab_size)
                            if not layout.problems(layers, *sizes) and not _indivisible(hf, tp, etp):
                                yield layout


def layer_lists(num_layers: int, pp: int) -> list[tuple[int, ...] | None]:
    """Layers of the stages: even, or as the recipes write them.

    With too few layers for equal stages, those that are missing are left out at the ends (6, 8, ..., 8, 7) in every
    way, or one each of the first stages and the last (7, 7, 8, ..., 8, 7).
    """
    if pp == 1:
        return [None]
    most = -(-num_layers // pp)
    missing = most * pp - num_layers
    found = []
    for first in range(missing + 1):
        counts = [most - first, *[most] * (pp - 2), most - (missing - first)]
        found.append(tuple(counts))
    if missing:
        short = [*range(missing - 1), pp - 1]
        found.append(tuple(most - (stage in short) for stage in range(pp)))
    possible = [counts for counts in found if min(counts) >= 1 and sum(counts) == num_layers]
    return list(dict.fromkeys(possible))


def update_batches(config: PPOTrainerConfig, data_parallel: int) -> list[MicroBatches]:
    """Micro-batches of an update: samples that divide a rank's rows, or the config's tokens and multiples of them."""
    actor = config.actor_rollout_ref.actor
    rows = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n // data_parallel
    tokens = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else 0
    return _batches(rows, actor.ppo_micro_batch_size_per_gpu, tokens, most_samples=8, most_tokens=4)


def log_prob_batches(config: PPOTrainerConfig, data_parallel: int) -> list[MicroBatches]:
    """Micro-batches of the passes before the update, in the same way."""
    ref = config.actor_rollout_ref.ref
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n // data_parallel
    tokens = ref.log_prob_max_token_len_per_gpu if ref.log_prob_use_dynamic_bsz else 0
    return _batches(rows, ref.log_prob_micro_batch_size_per_gpu, tokens, most_samples=32, most_tokens=8)


def rollout_layouts(run: PlannedRun, own: RolloutShape) -> Iterator[RolloutShape]:
    """Layouts that divide: TP, and replicas that share experts; without expert parallelism each replica is alone."""
    hf, world = run.hf, own.world_size
    rows = run.config.gen_batch_size * run.config.actor_rollout_ref.rollout.n
    for tp in (tp for tp in divisors(world) if joined(tp, run.device)):
        if rows % (world // tp) or hf.num_attention_heads % tp or hf.vocab_size % tp or _indivisible(hf, tp, 1):
            continue
        shape = replace(own, tp=tp, dp=1, has_expert_parallel=False)
        if hf.moe_intermediate_size % tp == 0:
            yield shape
        for dp in divisors(world // tp):
            if tp * dp > 1 and hf.n_routed_experts and hf.n_routed_experts % (tp * dp) == 0:
                shared = replace(shape, dp=dp, has_expert_parallel=True)
                yield shared
                if own.has_graphs and not _can_capture_dispatch(run, shared):
                    yield replace(shared, has_graphs=False)


def rollout_settings(run: PlannedRun, shape: RolloutShape) -> list[RolloutShape]:
    """``shape`` with its own settings first, then with what needs less memory: the other exchange, and smaller prefill
    steps.

    With ``use_sequence_parallel_moe`` tokens are dispatched or there are no settings.
    """
    exchanges = ["all_gather"]
    is_capturable = not shape.has_graphs or _can_capture_dispatch(run, shape)
    if shape.has_expert_parallel and _can_dispatch(run.hf, run.device, shape) and is_capturable:
        exchanges.append("dispatch")
    if shape.expert_exchange in exchanges:
        exchanges.sort(key=lambda name: name != shape.expert_exchange)
    if run.config.actor_rollout_ref.rollout.use_sequence_parallel_moe:
        exchanges.remove("all_gather")
    tokens = [shape.max_num_batched_tokens]
    while tokens[-1] >= 2 * LEAST_PREFILL_TOKENS and run.config.actor_rollout_ref.rollout.enable_chunked_prefill:
        tokens.append(tokens[-1] // 2)
    return [
        replace(shape, max_num_batched_tokens=count, expert_exchange=exchange)
        for count in tokens
        for exchange in exchanges
    ]


def drafting_rollouts(run: PlannedRun, shape: RolloutShape) -> list[RolloutShape]:
    """``shape`` without drafts, and with some: of the config's method, else of a prediction layer that is trained.

    With graphs of given sizes each number of drafts has one for its rows, as far as those can be captured.
    """
    sizes = tuple(size for size in shape.graph_sizes if size <= shape.max_num_seqs)
    plain = replace(shape, draft_method="", num_drafts=0, most_drafting=0, graph_sizes=sizes)
    overrides = run.config.actor_rollout_ref.actor.megatron.override_transformer_config
    method = shape.draft_method or (MTP if overrides.get("mtp_num_layers") else "")
    if not method:
        return [plain]
    most = most_captured(run.hf, KINDS[run.device.family], shape.tp, shape.ranks_sharing_experts)
    most = min(most, max(shape.max_num_seqs, shape.max_num_batched_tokens))
    found = [plain]
    for count in sorted({*DRAFTS_TRIED, *([shape.num_drafts] if shape.num_drafts else [])}):
        rows = {min(shape.max_num_seqs * (1 + drafts), most) for drafts in range(1, count + 1)}
        larger = sorted(size for size in rows if sizes and size > max(sizes))
        found.append(replace(shape, draft_method=method, num_drafts=count, graph_sizes=(*sizes, *larger)))
    return found


def _can_capture_dispatch(run: PlannedRun, shape: RolloutShape) -> bool:
    """Whether graphs of all sizes can have ``expert_exchange=dispatch``."""
    if KINDS[run.device.family] != "cuda":
        return True
    largest = max(shape.graph_sizes, default=shape.max_num_seqs * (1 + shape.num_drafts))
    return is_gathered(-(-largest // shape.tp), shape.expert_ranks)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def joined(tp: int, device: DeviceProfile) -> bool:
    """Whether the fast links join groups of ``tp`` ranks: see ``whole.layout_problems``."""
    return max(device.devices_per_node, device.domain_devices) % tp == 0


def _indivisible(hf: HFModelConfig, tp: int, etp: int) -> bool:
    widths = [hf.intermediate_size, hf.shared_expert_intermediate_size]
    return any(width % tp for width in widths) or bool(hf.moe_intermediate_size % etp)


def _batches(rows: int, own: int | None, tokens: int, *, most_samples: int, most_tokens: int) -> list[MicroBatches]:
    if tokens:
        return [MicroBatches(token_budget=tokens * more) for more in (1, 2, 4, 8) if more <= most_tokens]
    sizes = {own or 1, *(size for size in (1, 2, 4, 8, 16, 32) if size <= most_samples)}
    return [MicroBatches(samples=size) for size in sorted(sizes) if size <= rows and rows % size == 0]


def _can_dispatch(hf: HFModelConfig, device: DeviceProfile, shape: RolloutShape) -> bool:
    if device.family != "ascend":
        return True
    try:
        tokens_of_a_call(
            hf.hidden_size,
            hf.num_experts_per_tok,
            hf.n_routed_experts // shape.expert_ranks,
            shape.expert_ranks,
            run_variables(device.family),
        )
    except ValueError:
        return False
    return True
