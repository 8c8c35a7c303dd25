"""A key that acts only beside another setting is reported without it, and not reported with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.verl.composed import composed
from verl.trainer.config import compose_config, resolve_config, validate_config
from verl.trainer.config.declared import declared_keys
from verl.workers.config.keys import Idle

PROFILED = ("actor_rollout_ref.actor.profiler.enable=True", "global_profiler.steps=[1]")
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
MODEL, ENGINE, OPTIM = "actor_rollout_ref.model", f"{ACTOR}.megatron", f"{ACTOR}.optim"
OVERRIDE, STATE = f"{ENGINE}.override_transformer_config", f"{OPTIM}.override_optimizer_config"
LOSS, ESTIMATOR = f"{ACTOR}.policy_loss.loss_mode", "algorithm.adv_estimator"
DYNAMIC, KL = f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.use_kl_loss=True"
OLD = f"{ACTOR}.recompute_old_log_prob=True"
FULL = f"{OVERRIDE}.recompute_granularity=full"
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
TURNS = f"{ROLLOUT}.multi_turn"
TOOLS = (f"{TURNS}.enable=True", f"{TURNS}.tool_config_path=/x.yaml")
TURNS_OF_USER = (f"{TURNS}.enable=True", f"{TURNS}.environment.path=/x.py")
CORRECTION, FILTERS = "algorithm.rollout_correction", "algorithm.filter_groups"
# (a key with a value, settings under which it changes nothing, settings under which it acts)
CASES: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    (f"{REF}.log_prob_micro_batch_size_per_gpu=2", (), (KL,)),
    (f"{REF}.log_prob_micro_batch_size_per_gpu=2", (KL, DYNAMIC), (KL,)),
    (f"{REF}.log_prob_max_token_len_per_gpu=99", (KL,), (KL, DYNAMIC)),
    (f"{REF}.megatron.tensor_model_parallel_size=2", (), (KL,)),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2", (f"{ACTOR}.ppo_mini_batch_size=1024",), (OLD,)),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2", (OLD, DYNAMIC), (OLD,)),
    (f"{ROLLOUT}.log_prob_max_token_len_per_gpu=99", (OLD,), (OLD, DYNAMIC)),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", (DYNAMIC,), ()),
    (f"{ACTOR}.ppo_max_token_len_per_gpu=99", (), (DYNAMIC,)),
    (f"{ACTOR}.kl_loss_coef=0.1", (), (KL,)),
    (f"{ACTOR}.kl_loss_type=mse", (), (KL,)),
    ("algorithm.kl_penalty=mse", (), ("algorithm.use_kl_in_reward=True",)),
    ("algorithm.kl_ctrl.kl_coef=0.1", (), ("algorithm.use_kl_in_reward=True",)),
    (
        "algorithm.kl_ctrl.horizon=5",
        ("algorithm.use_kl_in_reward=True",),
        ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"),
    ),
    ("algorithm.gamma=0.9", (), (f"{ESTIMATOR}=reinforce_plus_plus",)),
    ("algorithm.norm_adv_by_std_in_grpo=False", (f"{ESTIMATOR}=rloo",), ()),
    (f"{ACTOR}.clip_ratio_c=5", (f"{LOSS}=gspo",), ()),
    (f"{ACTOR}.clip_ratio_high=0.3", (f"{LOSS}=gpg",), ()),
    (f"{ACTOR}.clip_ratio_low=0.1", (f"{ACTOR}.ppo_mini_batch_size=1024",), (f"{ACTOR}.ppo_mini_batch_size=512",)),
    (
        f"{ACTOR}.clip_ratio_low=0.1",
        (f"{ACTOR}.ppo_mini_batch_size=1024",),
        (f"{ACTOR}.ppo_mini_batch_size=1024", f"{CORRECTION}.bypass_mode=True"),
    ),
    (f"{ACTOR}.clip_ratio=0.3", (f"{LOSS}=kl_cov",), (f"{LOSS}=of_a_user",)),
    (f"{ACTOR}.policy_loss.clip_cov_lb=2", (), (f"{LOSS}=clip_cov",)),
    (f"{ACTOR}.policy_loss.ppo_kl_coef=2", (), (f"{LOSS}=kl_cov",)),
    (f"{ACTOR}.data_loader_seed=2", (), (f"{ACTOR}.shuffle=True",)),
    (f"{CORRECTION}.rollout_is_threshold=3", (), (f"{CORRECTION}.rollout_is=token",)),
    (f"{CORRECTION}.rollout_is_threshold=3", (), (f"{CORRECTION}.rollout_rs=token",)),
    (f"{CORRECTION}.rollout_rs_threshold=3", (), (f"{CORRECTION}.rollout_rs=token",)),
    (f"{CORRECTION}.loss_type=reinforce", (), (f"{CORRECTION}.bypass_mode=True",)),
    (f"{CORRECTION}.rollout_is=token", (BYPASS,), (BYPASS, f"{CORRECTION}.loss_type=reinforce")),
    (f"{LOSS}=gspo", (BYPASS, f"{CORRECTION}.loss_type=reinforce"), (BYPASS,)),
    (f"{ACTOR}.policy_loss.tau_pos=2", (), (f"{LOSS}=sapo",)),
    (f"+{ACTOR}.clip_ratio_high=0.3", (f"{LOSS}=sapo",), (f"{LOSS}=dppo_tv",)),
    ("algorithm.gdpo_reward_keys=[form]", (), (f"{ESTIMATOR}=gdpo",)),
    (f"{FILTERS}.metric=acc", (), (f"{FILTERS}.enable=True",)),
    (
        f"{MODEL}.gradient_checkpointing_kwargs.activations_checkpoint_num_layers=2",
        (),
        (f"{MODEL}.enable_gradient_checkpointing=True",),
    ),
    (
        f"{MODEL}.enable_gradient_checkpointing=True",
        (FULL,),
        (f"{MODEL}.gradient_checkpointing_kwargs.activations_checkpoint_granularity=full",),
    ),
    (f"{OVERRIDE}.recompute_num_layers=2", (), (FULL,)),
    (f"{OVERRIDE}.recompute_modules=[mlp]", (FULL,), (f"{OVERRIDE}.recompute_granularity=selective",)),
    (f"{OVERRIDE}.tp_comm_overlap=True", (), (f"{ENGINE}.tensor_model_parallel_size=2",)),
    (f"{OVERRIDE}.cp_comm_type=a2a", (), (f"{ENGINE}.context_parallel_size=2",)),
    (f"{OVERRIDE}.mtp_loss_scaling_factor=0.3", (), (f"{OVERRIDE}.mtp_num_layers=1",)),
    (f"{OVERRIDE}.moe_aux_loss_coeff=0.1", (f"{OVERRIDE}.moe_router_load_balancing_type=none",), ()),
    (f"{OVERRIDE}.moe_router_load_balancing_type=seq_aux_loss", (), (f"{OVERRIDE}.moe_aux_loss_coeff=0.1",)),
    (f"{ENGINE}.dist_checkpointing_path=/x", (), (f"{ENGINE}.use_dist_checkpointing=True",)),
    (f"{ENGINE}.use_dist_checkpointing=True", (f"{ENGINE}.load_weight=False",), ()),
    (f"{STATE}.pin_cpu_grads=True", (), (f"{STATE}.optimizer_cpu_offload=True",)),
    (f"{STATE}.overlap_cpu_optimizer_d2h_h2d=True", (), (f"{STATE}.optimizer_cpu_offload=True",)),
    (f"{STATE}.optimizer_offload_fraction=0.5", (), (f"{STATE}.optimizer_cpu_offload=True",)),
    (f"{STATE}.use_precision_aware_optimizer=True", (), (f"{STATE}.exp_avg_dtype=bf16",)),
    (f"{OPTIM}.min_lr=1e-8", (), (f"{OPTIM}.lr_decay_style=cosine",)),
    (f"{OPTIM}.lr_warmup_steps_ratio=0.1", (f"{OPTIM}.lr_warmup_steps=3",), ()),
    (f"{OPTIM}.lr_warmup_init=1e-9", (), (f"{OPTIM}.lr_warmup_steps=3",)),
    (f"{ROLLOUT}.val_kwargs.temperature=0.7", (), (f"{ROLLOUT}.val_kwargs.do_sample=True",)),
    ("reward_model.overlong_buffer.len=9", (), ("reward_model.overlong_buffer.enable=True",)),
    ("+reward_model.reward_kwargs.max_resp_len=512", (), ("reward_model.overlong_buffer.enable=True",)),
    ("+reward_model.reward_kwargs.max_resp_len=512", (), ("reward_model.reward_manager=of_a_user",)),
    (
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=9",
        (),
        ("+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",),
    ),
    ("reward_model.num_workers=3", ("reward_model.reward_manager=of_a_user",), ()),
    ("reward_model.manager_timeout_s=3", (), ("reward_model.reward_manager=of_a_user",)),
    ("reward_model.manager_path=/x.py", (), ("reward_model.manager_source=importlib",)),
    ("custom_reward_function.name=score", (), ("custom_reward_function.path=/x.py",)),
    (f"{TURNS}.max_user_turns=3", (), TOOLS),
    (f"{TURNS}.environment.num_processes=3", (), TURNS_OF_USER),
    (f"{TURNS}.max_parallel_calls=3", TURNS_OF_USER, TOOLS),
    ("data.max_response_length=99", (f"{ROLLOUT}.response_length=9",), ()),
    ("data.seed=3", ("data.shuffle=False",), ()),
    ("data.sampler.kwargs.threshold=1", (), ("data.sampler.class_path=my_order.py",)),
    ("rollout.n_gpus_per_node=3", (), ("rollout.nnodes=1",)),
    ("async_training.staleness_threshold=1.0", (), ("trainer.schedule=fully_async",)),
    ("trainer.resume_from_path=/x", (), ("trainer.resume_mode=resume_path",)),
    ("trainer.log_samples_rows=3", (), ("trainer.log_samples_freq=2",)),
    ("trainer.interrupt_grace_s=3", ("trainer.save_on_interrupt=False",), ()),
    ("global_profiler.steps=[1]", (), PROFILED),
    (f"{ACTOR}.profiler.ranks=[1]", (), PROFILED),
    (f"{ROLLOUT}.profiler.ranks=[1]", PROFILED, (*PROFILED, "trainer.schedule=fully_async")),
]


def _reasons(*given: str) -> dict[str, str]:
    return {item.key: item.reason for item in resolve_config(composed(*given))[1]}


@pytest.fixture(scope="module")
def reasons() -> dict[int, str]:
    """By case, the reason that is reported where its key changes nothing."""
    return {
        index: _reasons(*idle, given).get(given.partition("=")[0].lstrip("+"), "")
        for index, (given, idle, _) in enumerate(CASES)
    }


def test_each_is_reported_without_its_setting_and_not_with_it(reasons: dict[int, str]) -> None:
    assert [CASES[index][0] for index, reason in reasons.items() if not reason] == []
    for given, _, acting in CASES:
        assert given.partition("=")[0].lstrip("+") not in _reasons(*acting, given), given


def _declared() -> Iterator[tuple[str, str, Idle]]:
    """Each key with each of its rules and the section that the rule speaks of; the reference has the actor's rules."""
    for key, item in declared_keys().items():
        yield from ((key, where, rule) for where, rule in item.idle)
        section = key.rpartition(".")[0]
        for name, member in item.key.members.items():
            yield from ((f"{key}.{name}", section, rule) for rule in member.idle)


def test_every_rule_has_a_case_and_every_case_a_rule_of_its_key(reasons: dict[int, str]) -> None:
    told = {rule.reason.replace("{where}", where) for key, where, rule in _declared() if f"{REF}.megatron" not in key}
    assert told == set(reasons.values())
    for index, reason in reasons.items():
        key = CASES[index][0].partition("=")[0].lstrip("+")
        declared = {(name, rule.reason.replace("{where}", where)) for name, where, rule in _declared()}
        assert {(key, reason), (key.rpartition(".")[0], reason)} & declared, key  # the latter of a key with names in it


def test_keys_that_only_follow_others_are_not_reported() -> None:
    """The base YAML file fills them from the actor's."""
    assert not [key for key in _reasons(DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu=99") if "log_prob" in key]


def test_values_that_validation_refuses_break_nothing_here() -> None:
    """The rules run before it."""
    wrong = (f"{OVERRIDE}.recompute_modules=5", f"{STATE}.exp_avg_dtype=[1]", f"{OVERRIDE}.moe_aux_loss_coeff=[1]")
    given = (*wrong, f"{STATE}.use_precision_aware_optimizer=5", "reward_model.reward_kwargs.overlong_buffer_cfg=3")
    problems = "\n".join(validate_config(resolve_config(compose_config(given))[0]))
    assert all(text.partition("=")[0] in problems for text in given)
