"""The properties of a run that decide its time: model, layouts, batch, lengths, phases and engine features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, gcd
from typing import Any

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout
from tools.plan.timing.drafts import MTP, default_acceptance, draft_problems
from tools.plan.timing.graphs import graph_sizes, most_captured
from tools.plan.timing.lengths import DEFAULT_SPREAD, LengthDistribution, length_distribution
from tools.plan.timing.turns import Turns, default_turns
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.schedule import SCHEDULES
from verl.workers.config import McoreEngineConfig, RolloutConfig
from vllm.ops.cuda.exchange import MOST_GATHERED_TOKENS

# What an engine may lack that the fastest published one on an NPU had; constants.toml: what each costs a decode step.
DECODE_FEATURES = ("multistream", "reduce_scatter", "kv_nz", "no_transpose")
DISPATCHES = ("direct", "controller")
SYNCS = ("direct", "packed", "per_tensor")
BESIDE = ("nothing", "shared", "experts")
OPTIMIZERS = ("resident", "offloaded", "swapped", "cpu")


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and responses, and of drafts that are right."""

    prompt_mean: float  # over the batch
    response_mean: float
    prompt_limit: int  # what they are cut or padded to
    response_limit: int
    spread: float = DEFAULT_SPREAD  # standard deviation of the logarithm of uncut response lengths; 0: all equal
    together: int = 1  # samples that compute a prompt once
    turns: Turns | None = None  # None: a sample is one turn
    acceptance: tuple[float, ...] = ()  # shares of right drafts by position, see ``drafts``; empty = the method's own

    @property
    def responses(self) -> LengthDistribution:
        """The distribution of a response's length."""
        return length_distribution(self.response_mean, self.response_limit, self.spread)

    @property
    def mean(self) -> float:
        return self.prompt_mean / self.together + self.responses.mean

    @property
    def paid(self) -> float:
        """The length at which every token would attend as much as the batch's tokens do on average: E[l^2] / E[l]."""
        prompt, responses = self.prompt_mean, self.responses
        square = prompt**2 / self.together + 2 * prompt * responses.mean + responses.mean_square
        return square / self.mean


@dataclass(frozen=True)
class MicroBatches:
    """How the samples of a data-parallel rank are cut."""

    samples: int = 0  # of one micro-batch; 0 = filled by tokens
    token_budget: int = 0  # packed tokens of a micro-batch on each rank; context parallelism has CP times as many
    is_padded: bool = False  # every row is as long as the micro-batch's longest

    def together(self, most: int, prompt: float, response: float) -> int:
        """Samples of a micro-batch that share a prompt, of ``most`` that a rank has; the others are their tokens."""
        if not self.token_budget:
            return gcd(most, self.samples)
        return ceil(most / ceil(most / max(1, (self.token_budget - prompt) // response)))


@dataclass(frozen=True)
class TrainShape:
    layout: ParallelLayout  # of its ranks
    update: MicroBatches
    log_prob: MicroBatches
    mini_batches: int = 1  # optimizer steps of an update
    recomputed_layers: int = 0  # of each stage, forward again in the backward pass; -1 = all
    # Where its state is: ``resident`` on the device, ``offloaded`` to host memory for the rollout, ``swapped`` through
    # the device during the update, ``cpu`` with the arithmetic on the host too.
    optimizer: str = "resident"
    offloads: bool = False  # weights leave the device for the rollout
    # What hides the experts' exchange: nothing, the ``shared`` experts, or all ``experts`` and their gradients
    # (MindSpeed's overlap).
    exchange_beside: str = "nothing"
    is_balanced: bool = False  # rows are balanced over data-parallel ranks by length
    shares_prompts: bool = False  # samples of a micro-batch compute their prompt once
    prediction_layers: int = 0  # of multi-token prediction, behind the last stage's, each with logits of its own


@dataclass(frozen=True)
class RolloutShape:
    world_size: int  # ranks that generate
    tp: int  # tensor-parallel ranks of a replica
    dp: int  # replicas that share experts
    has_expert_parallel: bool = True  # experts are spread over tp x dp ranks, else each is cut over tp
    max_num_seqs: int = 1024  # running sequences of a replica
    memory_share: float = 0.8  # of device memory, for weights and cache
    weight_bytes: float = 2.0  # of one parameter
    has_graphs: bool = True  # decode steps are captured
    graph_sizes: tuple[int, ...] = ()  # for these numbers of sequences; empty = powers of two
    host_sync: bool = False  # replicas agree on each step through host memory (gloo) instead of their devices
    lacks: tuple[str, ...] = ()  # of ``DECODE_FEATURES``
    most_gathered: int = 0  # tokens of an engine up to which every rank gets all of them; more go to their experts
    has_whole_shared: bool = False  # every rank reads the shared experts whole, else its part of their width
    shares_prompts: bool = False  # samples take what another of their prompt has computed
    draft_method: str = ""  # of the drafts that decode steps verify; none where there are none
    num_drafts: int = 0  # at most, of a sequence and step
    most_drafting: int = 0  # sequences up to which there are drafts; 0 = any number
    # Of these depends memory alone, not the time of a step.
    expert_exchange: str = "all_gather"
    max_num_batched_tokens: int = 0

    @property
    def replicas(self) -> int:
        return self.world_size // self.tp

    @property
    def ranks_sharing_experts(self) -> int:
        """Ranks that tokens go to; 1 where every replica has all experts."""
        return self.tp * self.dp if self.has_expert_parallel else 1

    @property
    def has_draft_layer(self) -> bool:
        """Whether the model's prediction layer drafts."""
        return self.draft_method == MTP

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold the experts of an engine once, whole or cut."""
        return self.tp * self.dp if self.has_expert_parallel else self.tp


@dataclass(frozen=True)
class RunShape:
    """One step of a run, for ``predict``."""

    name: str
    model: HFModelConfig
    lengths: Lengths
    num_prompts: int
    samples: int  # responses to each prompt
    train: TrainShape
    rollout: RolloutShape
    has_reference: bool = True
    has_old_log_prob: bool = False
    reward_workers: int = 0  # processes that grade while log-probs are computed; 0 = the controller does, one by one
    # ``sync``, or generation on ranks of its own ahead of training, step by step (``one_step_off``) or without a stop
    # (``fully_async``).
    schedule: str = "sync"
    dispatch: str = "direct"  # rows go from rank to rank (``direct``), or from the ``controller`` to one rank at a time
    # Each rollout rank gets the weights that it needs (``direct``), or all of them, gathered in large buckets
    # (``packed``) or one tensor at a time (``per_tensor``).
    sync: str = "direct"
    gen_prompts: int = 0  # prompts that a step generates for; 0 = num_prompts
    expert_load_spread: float | None = None  # instead of the constant; 0 = every expert gets as many tokens

    def load_spread(self, usual: float) -> float:
        """The standard deviation of an expert's tokens over their mean: ``usual`` where the shape has none."""
        return usual if self.expert_load_spread is None else self.expert_load_spread

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Shares of right drafts by position, each where those before it are right."""
        return self.lengths.acceptance or default_acceptance(self.rollout.draft_method)

    def with_train(self, **changes: Any) -> RunShape:
        """The shape with other fields of ``train``."""
        return replace(self, train=replace(self.train, **changes))

    def samples_together(self, cut: MicroBatches, prompt: float, response: float) -> int:
        """Samples of a prompt in a micro-batch that compute it once."""
        layout = self.train.layout
        if not self.train.shares_prompts or layout.context_parallel_size > 1:
            return 1
        rows = self.num_sequences // layout.data_parallel_size // self.train.mini_batches
        return cut.together(gcd(self.samples, max(1, rows)), prompt, response)

    def computed_lengths(self, cut: MicroBatches) -> Lengths:
        """The lengths in micro-batches of ``cut``."""
        together = self.samples_together(cut, self.lengths.prompt_mean, self.lengths.responses.mean)
        return replace(self.lengths, together=together)

    @property
    def num_sequences(self) -> int:
        """Responses that a step trains on."""
        return self.num_prompts * self.samples

    @property
    def generated_sequences(self) -> int:
        """Responses that a step generates; more than it trains on with dynamic sampling."""
        return (self.gen_prompts or self.num_prompts) * self.samples

    @property
    def num_devices(self) -> int:
        separate = self.rollout.world_size if self.schedule != "sync" else 0
        return self.train.layout.world_size + separate

    def problems(self) -> list[str]:
        """What cannot be run or priced, one sentence each."""
        model, rollout = self.model, self.rollout
        found = self.train.layout.problems(
            model.num_hidden_layers, model.n_routed_experts or None, model.num_attention_heads, model.vocab_size
        )
        engine, data_parallel = f"TP {rollout.tp} x DP {rollout.dp}", self.train.layout.data_parallel_size
        if not rollout.tp * rollout.dp or rollout.world_size % (rollout.tp * rollout.dp):
            found.append(f"rollout: {rollout.world_size} ranks do not divide into engines of {engine}")
        if data_parallel and self.num_sequences % data_parallel:
            found.append(f"{self.num_sequences} sequences do not divide over data_parallel_size {data_parallel}")
        if rollout.has_expert_parallel and rollout.expert_ranks and model.n_routed_experts % rollout.expert_ranks:
            found.append(f"rollout: {model.n_routed_experts} experts do not divide over {engine} ranks")
        for what, value, allowed in (
            ("dispatch", self.dispatch, DISPATCHES),
            ("sync", self.sync, SYNCS),
            ("train.optimizer", self.train.optimizer, OPTIMIZERS),
            ("train.exchange_beside", self.train.exchange_beside, BESIDE),
            ("schedule", self.schedule, SCHEDULES),
            *(("rollout.lacks", feature, DECODE_FEATURES) for feature in rollout.lacks),
        ):
            if value not in allowed:
                found.append(f"{what} is {value!r}; expected one of {', '.join(allowed)}")
        return found + draft_problems(model, rollout.draft_method)

    @staticmethod
    def of(config: PPOTrainerConfig, hf: HFModelConfig, lengths: Lengths | None = None, name: str = "run") -> RunShape:
        """The shape of a recipe's config. Without ``lengths``: prompts a quarter and responses half of their limits.

        This repository's own ways: rows move by reference, weights go straight to who needs them, replicas agree over
        their devices. ValueError with every problem of the shape.
        """
        models, trainer = config.actor_rollout_ref, config.trainer
        actor, ref, rollout, engine = models.actor, models.ref, models.rollout, models.actor.megatron
        num_rollout_ranks, given = config.rollout_world_size, models.model
        num_drafts = _given_count(rollout, "num_speculative_tokens")
        fields = engine.transformer_fields(given.gradient_checkpointing_kwargs, given.enable_gradient_checkpointing)
        update = MicroBatches(samples=actor.ppo_micro_batch_size_per_gpu or 1)
        if actor.use_dynamic_bsz:
            update = MicroBatches(token_budget=actor.ppo_max_token_len_per_gpu)
        log_prob = MicroBatches(samples=ref.log_prob_micro_batch_size_per_gpu or 1)
        if ref.log_prob_use_dynamic_bsz:
            log_prob = MicroBatches(token_budget=ref.log_prob_max_token_len_per_gpu)
        shape = RunShape(
            name=name,
            model=hf,
            lengths=lengths or default_lengths(config),
            num_prompts=config.data.train_batch_size,
            samples=rollout.n,
            gen_prompts=config.gen_batch_size,
            train=TrainShape(
                layout=engine.layout(trainer.world_size),
                update=update,
                log_prob=log_prob,
                mini_batches=ceil(config.data.train_batch_size / actor.ppo_mini_batch_size) * actor.ppo_epochs,
                recomputed_layers=_recomputed_layers(fields),
                optimizer=_optimizer(config),
                offloads=engine.param_offload and trainer.schedule == "sync",
                exchange_beside="shared" if fields.get("moe_shared_expert_overlap") else "nothing",
                is_balanced=trainer.balance_batch,
                shares_prompts=not (actor.shuffle or actor.skip_sharing_reason(trainer.device)),
                prediction_layers=_trained_prediction_layers(engine),
            ),
            rollout=RolloutShape(
                world_size=num_rollout_ranks,
                tp=rollout.tensor_model_parallel_size,
                dp=rollout.replicas_per_engine(num_rollout_ranks),
                has_expert_parallel=rollout.enable_expert_parallel and num_rollout_ranks > 1,
                max_num_seqs=rollout.max_num_seqs,
                memory_share=rollout.gpu_memory_utilization,
                weight_bytes={"fp8": 1.0}.get(rollout.quantization or "", 4.0 if rollout.dtype == "float32" else 2.0),
                has_graphs=not rollout.enforce_eager,
                graph_sizes=graph_sizes(rollout, trainer.device, num_drafts),
                lacks=_lacking(rollout),
                most_gathered=MOST_GATHERED_TOKENS if trainer.device == "cuda" else 0,
                has_whole_shared=rollout.use_sequence_parallel_moe,
                shares_prompts=rollout.enable_prefix_caching,
                draft_method=rollout.draft_method,
                num_drafts=num_drafts,
                most_drafting=_given_count(rollout, "disable_by_batch_size"),
                expert_exchange=rollout.expert_exchange,
                max_num_batched_tokens=rollout.max_num_batched_tokens,
            ),
            has_reference=config.use_reference_policy,
            has_old_log_prob=config.needs_old_log_prob,
            reward_workers=config.reward_model.num_workers,
            schedule=trainer.schedule,
            expert_load_spread=0.0 if engine.fix_router and rollout.fix_router else None,
        )
        if num_drafts:
            shape = replace(shape, rollout=_with_captured_sizes(shape, rollout, trainer.device))
        if problems := shape.problems():
            raise ValueError(f"{name} cannot be timed:\n" + "\n".join(f"  - {problem}" for problem in problems))
        return shape


def _lacking(rollout: RolloutConfig) -> tuple[str, ...]:
    """Which of ``DECODE_FEATURES`` a rollout does not have."""
    has = {
        "multistream": rollout.multistream_overlap_shared_expert and rollout.enable_multistream_mla,
        "reduce_scatter": rollout.use_sequence_parallel_moe,
        "kv_nz": rollout.kv_cache_layout == "nz",
    }
    return tuple(name for name, is_on in has.items() if not is_on)


def default_lengths(config: PPOTrainerConfig) -> Lengths:
    """Prompts of a quarter and responses of half of their limits; of the limit where end-of-sequence is ignored."""
    limit, is_fixed = config.data.max_response_length, config.actor_rollout_ref.rollout.ignore_eos
    return Lengths(
        prompt_mean=config.data.max_prompt_length / 4,
        response_mean=limit if is_fixed else limit / 2,
        prompt_limit=config.data.max_prompt_length,
        response_limit=limit,
        spread=0.0 if is_fixed else DEFAULT_SPREAD,
        turns=default_turns(config.actor_rollout_ref.rollout),
    )


def _recomputed_layers(fields: dict[str, object]) -> int:
    """Layers of a stage whose forward pass runs again: all with the uniform method, the first so many with block."""
    if fields.get("recompute_granularity") != "full":
        return 0
    count = fields.get("recompute_num_layers")
    return count if fields.get("recompute_method") == "block" and isinstance(count, int) else -1


def _with_captured_sizes(shape: RunShape, rollout: RolloutConfig, kind: str) -> RolloutShape:
    """The rollout with the graphs that can have the exchange of experts: an engine leaves out all those for drafts if
    one of them cannot, and captures none if one of the others cannot.
    """
    given = shape.rollout
    most = most_captured(shape.model, kind, given.tp, given.ranks_sharing_experts)
    largest = max(given.graph_sizes, default=given.max_num_seqs * (1 + given.num_drafts))
    if rollout.expert_exchange != "dispatch" or largest <= most:
        return given
    plain = tuple(size for size in given.graph_sizes if size <= given.max_num_seqs)
    if not plain or plain[-1] > most:
        return replace(given, has_graphs=False)
    return replace(given, graph_sizes=plain)


def _trained_prediction_layers(engine: McoreEngineConfig) -> int:
    overrides = engine.override_transformer_config
    return (overrides.get("mtp_num_layers") or 0) if overrides.get("mtp_loss_scaling_factor", 0.1) else 0


def _given_count(rollout: RolloutConfig, name: str) -> int:
    """A number of ``speculative_config``; 0 for one that is not given, or refused elsewhere."""
    value = rollout.speculative_config.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _optimizer(config: PPOTrainerConfig) -> str:
    actor = config.actor_rollout_ref.actor
    if actor.optim.override_optimizer_config.get("optimizer_cpu_offload"):
        return "cpu"
    if actor.megatron.swap_optimizer:
        return "swapped"
    return "offloaded" if actor.megatron.optimizer_offload else "resident"
