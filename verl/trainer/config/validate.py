"""Checks of a typed config: every problem at once, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from verl.trainer.config.checks import exact_problems, registry_problems, schedule_problems
from verl.trainer.config.config import PPOTrainerConfig
from verl.trainer.config.model_keys import config_json
from verl.workers.config.overrides import OP_CHOICES
from verl.workers.config.profiler import profiling_problems

_OF_GROUPS = ("grpo", "grpo_vectorized", "grpo_turns", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg")
_ACTOR, _REF = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"


def validate_config(config: PPOTrainerConfig) -> list[str]:
    """Every reason why ``config`` cannot run, one sentence each; empty when it can."""
    models = config.actor_rollout_ref
    found = [problem for field in fields(config) for problem in getattr(config, field.name).problems(field.name)]
    # ref.megatron starts as a copy of the actor's, with the same problems.
    found = [problem for problem in found if _REF not in problem or problem.replace(_REF, _ACTOR) not in found]
    found += models.actor.optim.schedule_problems("actor_rollout_ref.actor.optim", config.trainer.total_training_steps)
    found += models.rollout.device_problems("actor_rollout_ref.rollout", config.trainer.device)
    found += models.actor.megatron.device_problems(_ACTOR, config.trainer.device)
    roles = {"actor_rollout_ref.actor.profiler": models.actor.profiler}
    if config.has_rollout_ranks:
        roles["actor_rollout_ref.rollout.profiler"] = models.rollout.profiler
    found += dict.fromkeys(profiling_problems(config.global_profiler, roles, config.trainer.device))
    for problems in (
        *(schedule_problems, exact_problems, registry_problems),
        *(_overlong_problems, _pair_problems, _length_problems),
    ):
        found += problems(config)
    layout_problems = list(_layout_problems(config))
    found += layout_problems
    if not layout_problems and not any("must be at least 1" in problem for problem in found):
        found += _batch_problems(config)
    return found


def _pair_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Every two settings of different sections that cannot work together."""
    models = config.actor_rollout_ref
    if models.actor.takes_rollout_routing and not models.rollout.enable_rollout_routing_replay:
        yield (
            "actor_rollout_ref.actor.router_replay.mode is 'R3', which replays what the rollout chose; set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
        )
    if config.algorithm.rollout_correction.needs_rollout_log_probs and not models.rollout.calculate_log_probs:
        yield (
            "algorithm.rollout_correction compares with log-probs that the rollout reports; set "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    if config.algorithm.filter_groups.enable and models.rollout.n < 2:
        yield (
            f"algorithm.filter_groups.enable is True, but actor_rollout_ref.rollout.n is {models.rollout.n}: the "
            "samples of a prompt are compared with each other, give at least 2"
        )
    if config.algorithm.adv_estimator == "grpo_passk" and models.rollout.n < 2:
        yield (
            f"algorithm.adv_estimator is grpo_passk, but actor_rollout_ref.rollout.n is {models.rollout.n}: the best "
            "two samples of a prompt are compared, give at least 2"
        )
    has_prediction = models.actor.megatron.override_transformer_config.get("mtp_num_layers")
    if models.rollout.draft_method == "mtp" and not has_prediction:
        yield (
            "actor_rollout_ref.rollout.speculative_config.method is mtp, and the trainer has no prediction layer to "
            f"send: set {_ACTOR}.override_transformer_config.mtp_num_layers=1, and mtp_loss_scaling_factor=0 there to "
            "leave the layer as it is"
        )


def _overlong_problems(config: PPOTrainerConfig) -> Iterator[str]:
    reward, longest = config.reward_model, config.data.max_response_length
    limit = reward.reward_kwargs.get("max_resp_len") if reward.is_pooled else None
    if limit not in (None, longest):
        yield (
            f"reward_model.reward_kwargs.max_resp_len is {limit}, but data.max_response_length is {longest}: the "
            "penalty of long responses ends at the length at which they are cut; give both the same value"
        )
    if any(reward.contradictions("reward_model")):
        return  # among the problems of the section
    if reward.overlong.enable and not 1 <= reward.overlong.len <= longest:
        in_kwargs = reward.overlong is not reward.overlong_buffer
        key = "reward_kwargs.overlong_buffer_cfg" if in_kwargs else "overlong_buffer"
        yield (
            f"reward_model.{key}.len is {reward.overlong.len}; expected 1 to data.max_response_length ({longest}) "
            "tokens"
        )
    parts = config.algorithm.gdpo_reward_keys
    if config.algorithm.adv_estimator == "gdpo" and reward.overlong.enable and "overlong_reward" not in parts:
        yield "algorithm.gdpo_reward_keys lacks overlong_reward, the penalty of the overlong buffer; it needs log=True"


def config_warnings(config: PPOTrainerConfig) -> Iterator[str]:
    """Settings that work but deserve a warning before the run starts, one sentence each."""
    models = config.actor_rollout_ref
    yield from models.rollout.warnings("actor_rollout_ref.rollout")
    if models.actor.recompute_old_log_prob.lower() == "false" and config.needs_old_log_prob:
        why = _why_old_log_prob(config)
        yield (
            f"actor_rollout_ref.actor.recompute_old_log_prob is False, but {why}, so old log-probs are computed all "
            "the same"
        )
    generated, replicas = config.gen_batch_size * models.rollout.n, config.rollout_replicas
    if not config.has_rollout_ranks and replicas and (more := -generated % replicas):
        yield (
            f"{generated} samples of a generation do not divide over the {replicas} rollout replicas: {more} of them "
            "are made twice, and once thrown away"
        )
    correction = config.algorithm.rollout_correction
    if config.has_rollout_ranks and not (correction.is_on or correction.bypass_mode):
        yield (
            f"trainer.schedule is {config.trainer.schedule}, so samples may be {config.async_config.max_staleness} "
            "weight syncs old, and nothing corrects for that: set algorithm.rollout_correction, as {rollout_is:token}"
        )
    if config.trainer.log_samples_freq > 0 and not models.rollout.calculate_log_probs:
        yield (
            "trainer.log_samples_freq is on and actor_rollout_ref.rollout.calculate_log_probs is False: the records "
            "will have no log-probs of the rollout"
        )
    if models.rollout.n == 1 and config.algorithm.adv_estimator in _OF_GROUPS:
        yield (
            f"actor_rollout_ref.rollout.n is 1: {config.algorithm.adv_estimator} compares the samples of a prompt, and "
            "a group of one has nothing to compare with"
        )
    if models.actor.policy_loss.loss_mode == "gspo" and models.actor.loss_agg_mode != "seq-mean-token-mean":
        yield (
            f"actor_rollout_ref.actor.loss_agg_mode is {models.actor.loss_agg_mode}: GSPO's objective is that of "
            "seq-mean-token-mean"
        )
    cp, longest = models.actor.megatron.context_parallel_size, models.rollout.context_length
    for limit in config.exceeded_token_limits:
        times = f" x context_parallel_size {cp}" if cp > 1 else ""
        yield (
            f"{limit.key} {limit.tokens // cp}{times} is below the {longest} tokens of the longest sequence: a longer "
            f"one than that gets a micro-batch of its own, which needs more memory ({limit.metric} counts them)"
        )
    if models.actor.policy_loss.loss_mode == "geo_mean" and models.actor.loss_agg_mode != "seq-mean-token-mean":
        yield (
            f"actor_rollout_ref.actor.loss_agg_mode is {models.actor.loss_agg_mode}: the policy loss geo_mean is a "
            "mean over sequences in any case, and only KL loss and entropy are aggregated so"
        )


def _why_old_log_prob(config: PPOTrainerConfig) -> str:
    if config.algorithm.rollout_correction.is_on:
        return "algorithm.rollout_correction compares with them"
    if config.actor_rollout_ref.actor.records_routing:
        return "routing is recorded there"
    if config.algorithm.use_kl_in_reward:
        return "algorithm.use_kl_in_reward compares with them"
    return "the run makes several updates per batch"


def _model_sizes(config: PPOTrainerConfig) -> dict[str, int]:
    """The numbers of the model's config.json, if it exists; preflight reports it, and values that are none."""
    found = config_json(config.actor_rollout_ref.model.path) or {}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def _length_problems(config: PPOTrainerConfig) -> Iterator[str]:
    models, positions = config.actor_rollout_ref, _model_sizes(config).get("max_position_embeddings")
    if positions is None:
        return
    path, limit = Path(models.model.path).expanduser() / "config.json", models.model.max_position_embeddings
    source = str(path)
    if limit is not None and limit > positions:
        yield (
            f"actor_rollout_ref.model.override_config.max_position_embeddings is {limit}, but {path} has "
            f"{positions}; a limit can only be lower: change the file if the model is meant to read longer texts"
        )
    elif limit is not None:
        positions, source = limit, "actor_rollout_ref.model.override_config"
    longest = models.rollout.context_length
    if longest > positions:
        yield f"prompt plus response reach {longest} tokens; {source} allows max_position_embeddings {positions}"


def _layout_problems(config: PPOTrainerConfig) -> Iterator[str]:
    models, world, sizes = config.actor_rollout_ref, config.trainer.world_size, _model_sizes(config)
    engine, ref = models.actor.megatron, models.ref.megatron
    heads, experts = sizes.get("num_attention_heads"), sizes.get("n_routed_experts")
    try:
        layout = engine.layout(world)
        for problem in layout.problems(sizes.get("num_hidden_layers"), experts, heads, sizes.get("vocab_size")):
            yield f"{_ACTOR}: {problem}"
        ours, theirs = (asdict(part.layout(1)) for part in (engine, ref))
    except (TypeError, ValueError) as error:
        yield f"{_ACTOR}: {error}"
        return
    for key in ours:
        if theirs[key] != ours[key]:
            why = "the reference lives in the actor's processes and needs the same layout"
            yield f"{_REF}: {key} is {theirs[key]} and the actor's {ours[key]}; {why}"
    for key in OP_CHOICES:
        choice, other = ref.op_choices.get(key), engine.op_choices.get(key)
        if choice != other:
            yield f"{_REF}: {key} is {choice} and the actor's {other}; both run on one op table"
    rollout_tp, world = models.rollout.tensor_model_parallel_size, config.rollout_world_size
    if world < 1:
        return  # schedule_problems reports this
    section = "rollout" if config.has_rollout_ranks else "trainer"
    if rollout_tp < 1 or world % rollout_tp:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size is {rollout_tp}; it must divide the "
            f"{world} devices of {section}.nnodes x {section}.n_gpus_per_node"
        )
        return
    if heads is not None and heads % rollout_tp:
        yield f"{heads} attention heads do not divide over rollout.tensor_model_parallel_size {rollout_tp}"
    data_parallel = models.rollout.data_parallel_size
    if data_parallel is not None and (data_parallel < 1 or world // rollout_tp % data_parallel):
        yield (
            f"actor_rollout_ref.rollout.data_parallel_size is {data_parallel}; it must divide the "
            f"{world // rollout_tp} replicas of {world} devices / TP {rollout_tp}, or leave it empty for one engine"
        )
        return
    over = models.rollout.experts_over(world)
    if experts is not None and models.rollout.enable_expert_parallel and experts % over:
        yield (
            f"{experts} experts do not divide over the {over} rollout ranks; set "
            "actor_rollout_ref.rollout.enable_expert_parallel=False or change the number of devices"
        )


def _batch_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Every number of prompts or samples that does not divide, with the nearest one that does."""
    models = config.actor_rollout_ref
    actor, n = models.actor, models.rollout.n
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    dp = config.training_layout.data_parallel_size
    if config.data.gen_batch_size is not None and not config.algorithm.filter_groups.enable:
        yield (
            f"data.gen_batch_size is {config.data.gen_batch_size}, which only algorithm.filter_groups.enable=True "
            "uses; leave it out: a step generates data.train_batch_size prompts"
        )
    if mini > batch:
        yield f"actor_rollout_ref.actor.ppo_mini_batch_size {mini} is above data.train_batch_size {batch}"
    elif batch % mini:
        yield (
            f"data.train_batch_size {batch} is not a multiple of ppo_mini_batch_size {mini}; "
            f"nearest: {_nearest_multiple(batch, mini)}"
        )
    if mini * n % dp:
        yield (
            f"ppo_mini_batch_size {mini} x rollout.n {n} = {mini * n} samples do not divide over data parallelism "
            f"{dp}; nearest number of samples: {_nearest_multiple(mini * n, dp)}"
        )
        return
    local = mini * n // dp
    micro = actor.ppo_micro_batch_size_per_gpu
    if not actor.use_dynamic_bsz and micro and local % micro:
        yield (
            f"{local} samples per rank and mini-batch (ppo_mini_batch_size x n / DP) are not a multiple of "
            f"ppo_micro_batch_size_per_gpu {micro}; nearest: {_nearest_divisor(local, micro)}"
        )


def _nearest_multiple(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} or {below + step}" if below else str(below + step)


def _nearest_divisor(value: int, wanted: int) -> int:
    return min((size for size in range(1, value + 1) if value % size == 0), key=lambda size: abs(size - wanted))
