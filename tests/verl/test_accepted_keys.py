"""No key does nothing in silence: each is acted on, reported as without effect, or refused."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import logging
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from verl.trainer import main_ppo
from verl.trainer.config import (
    ConfigError,
    PPOTrainerConfig,
    compose_config,
    load_config,
    resolve_config,
    validate_config,
    without_effect_block,
)
from verl.trainer.config.declared import declared_keys, other_names
from verl.trainer.config.fixed_keys import FIXED_KEYS
from verl.trainer.config.model_keys import _FIELDS as MODEL_KEYS
from verl.trainer.config.override_text import override
from verl.trainer.config.upstream_keys import ASYNC_KEYS, REPLACED_VALUES, REPLACED_WITHOUT_CUDA
from verl.workers.config import overrides
from verl.workers.config.keys import Section
from vllm.engine.arg_utils import EngineArgs

ROOT = Path(__file__).resolve().parents[2]
ACTOR, REF = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"
OVERRIDE = f"{ACTOR}.override_transformer_config"
NOT_OF_REFERENCE = {
    key.removeprefix(f"{REF}."): item.key.not_of_reference
    for key, item in declared_keys().items()
    if key.startswith(f"{REF}.") and item.key.not_of_reference
}
RUNNABLE = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "trainer.n_gpus_per_node=1")
# Keys of which only one value can run, whatever else is set -> another value, which is refused.
ONE_VALUE = {
    "actor_rollout_ref.hybrid_engine": "False",
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.mode": "server",
    f"{ACTOR}.sequence_parallel": "False",
    "async_training.require_batches": "3",
}
# Files whose reads are no action.
ONLY_CHECKS_OR_SHOWS = {"validate.py", "checks.py", "load.py", "preflight.py", "print_plan.py", "run_changes.py"}
# Parts of the paths in every run's YAML file, which the configs' own interpolations read.
IN_PATHS = {"trainer.project_name", "trainer.experiment_name"}
# A key that acts through one that follows it in the base YAML file.
FOLLOWED = {"data.max_response_length": "actor_rollout_ref.rollout.response_length"}
# Names under which code holds a section, besides the section's own.
HELD_AS = {
    "actor_rollout_ref.actor": {"config"},
    "actor_rollout_ref.rollout": {"config", "chosen"},
    "actor_rollout_ref.rollout.val_kwargs": {"chosen"},
    "actor_rollout_ref.rollout.multi_turn": {"turns"},
    ACTOR: {"engine", "given"},
    "actor_rollout_ref.model.gradient_checkpointing_kwargs": {"checkpointing"},
    "actor_rollout_ref.actor.checkpoint": {"config"},
    **{f"actor_rollout_ref.{role}.profiler": {"config", "role"} for role in ("actor", "rollout")},
    **{f"actor_rollout_ref.{role}.profiler.tool_config.npu": {"chosen"} for role in ("actor", "rollout")},
    "global_profiler": {"config", "general", "_config"},
    "actor_rollout_ref": {"config", "models"},
    "algorithm": {"config"},
    "algorithm.filter_groups": {"filters", "chosen"},
    "algorithm.rollout_correction": {"config", "correction"},
    "async_training": {"async_config", "config"},
    "custom_reward_function": {"custom"},
    "data": {"config", "data_config"},
    "data.custom_cls": {"custom"},
    "data.sampler": {"section"},
    "reward_model": {"config"},
    "reward_model.overlong_buffer": {"buffer", "config"},
    "trainer": {"config"},
}
CHECKS = {"contradictions", "problems", "device_problems", "schedule_problems", "warnings"}


def _taken(*given: str) -> dict[str, str]:
    """The keys without effect among ``given`` and the reason of each."""
    return {item.key: item.reason for item in resolve_config(compose_config(given))[1]}


def _acting(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and what is in it, but nothing that only says something: log lines, prints and error messages."""
    if isinstance(node, ast.Raise):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if owner in ("logger", "console") or getattr(node.func, "id", "") == "print":
            return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _acting(child)


def _reads(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(what is before the dot, attribute) of every attribute that the code reads to act on it."""
    for node in _acting(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            yield (getattr(owner, "attr", None) or getattr(owner, "id", "")), node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setting":
            section, key = node.args[0], node.args[1]  # setting(section, "key", default)
            if isinstance(section, ast.Name) and isinstance(key, ast.Constant):
                yield section.id, key.value


def _sections(cls: type = PPOTrainerConfig, prefix: str = "") -> Iterator[tuple[str, type]]:
    yield prefix, cls
    for field in dataclasses.fields(cls):
        default = field.default_factory() if callable(field.default_factory) else field.default
        if isinstance(default, Section):
            yield from _sections(type(default), f"{prefix}.{field.name}".lstrip("."))


def _read_by_itself(cls: type) -> set[str]:
    """Fields that the section's own methods and properties read, checks not counted."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name not in CHECKS]
    return {name for method in methods for owner, name in _reads(method) if owner == "self"}


def _keys_read_by_code() -> set[str]:
    """Keys of the schema that the driver, a worker or an engine reads."""
    files = [*(ROOT / "verl").glob("**/*.py"), *(ROOT / "tools" / "launch").glob("*.py")]
    code = [file for file in files if file.name not in ONLY_CHECKS_OR_SHOWS]
    reads = {read for file in code for read in _reads(ast.parse(file.read_text(encoding="utf-8")))}
    found = set()
    passed_on = {field.name for field in dataclasses.fields(EngineArgs)}  # under the same name, all together
    for section, cls in _sections():
        holders = {section.rpartition(".")[2], *HELD_AS.get(section, ())}
        own = _read_by_itself(cls) | (passed_on if section == "actor_rollout_ref.rollout" else set())
        for field in dataclasses.fields(cls):
            if field.name in own or any((holder, field.name) in reads for holder in holders):
                found.add(f"{section}.{field.name}".lstrip("."))
    return found


def test_every_key_of_the_schema_is_acted_on_or_checked() -> None:
    keys = {key for key in declared_keys() if not key.startswith(REF)}
    acted_on = keys & (_keys_read_by_code() | IN_PATHS | FOLLOWED.keys())
    assert keys - acted_on - ONE_VALUE.keys() == set()
    for key, follower in FOLLOWED.items():
        assert OmegaConf.select(OmegaConf.structured(load_config([f"{key}=77"])), follower) == 77
    for key, value in ONE_VALUE.items():
        given = [f"{key}={value}", f"{ACTOR}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"]
        if key.startswith("async_training"):
            given += ["trainer.schedule=fully_async", "actor_rollout_ref.hybrid_engine=False", "rollout.nnodes=1"]
        assert any(key.rpartition(".")[2] in problem for problem in validate_config(load_config(given))), key
    sections = (overrides.TRANSFORMER_OVERRIDES, overrides.DDP_OVERRIDES, overrides.OPTIMIZER_OVERRIDES)
    in_sections = sum(map(len, sections)) + len(overrides.MODEL_OVERRIDES) + len(other_names()) + len(ASYNC_KEYS)
    without_effect = len(FIXED_KEYS) + len(MODEL_KEYS) + len(NOT_OF_REFERENCE)
    refusing = sum(bool(accepted) and set(accepted) != {True, False} for accepted, _ in FIXED_KEYS.values())
    counts = (
        f"{len(acted_on) + in_sections} are acted on, {without_effect} are without effect, "
        f"{refusing + len(ONE_VALUE)} have values that are refused"
    )
    print(counts)
    assert counts in (ROOT / "docs" / "upstream" / "verl_scripts.md").read_text(encoding="utf-8")


def test_every_key_of_the_free_sections_is_a_field_of_its_engine() -> None:
    def names(cls: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(cls)}

    assert overrides.DDP_OVERRIDES.keys() <= names(DistributedDataParallelConfig)
    assert overrides.OPTIMIZER_OVERRIDES.keys() <= names(OptimizerConfig)
    given = {key: True if key in overrides.OP_CHOICES else 1 for key in overrides.TRANSFORMER_OVERRIDES}
    given |= {"recompute_modules": ["moe"], "noop_layers": "1", "pipeline_num_transformer_layers": None}
    fields = overrides.transformer_fields(given)
    assert fields.keys() <= names(TransformerConfig)
    engine = dataclasses.replace(load_config().actor_rollout_ref.actor.megatron, override_transformer_config=given)
    layout, plain = dataclasses.asdict(engine.layout(1)), dataclasses.asdict(load_config().training_layout)
    of_layout = {key for key, value in layout.items() if value != plain[key]} - {"world_size"}
    renamed = {"moe_alltoall_overlap_comm"}  # MindSpeed's name of moe_shared_expert_overlap
    acted_on = fields.keys() | of_layout | engine.op_choices.keys() | renamed | {"pipeline_num_transformer_layers"}
    assert overrides.TRANSFORMER_OVERRIDES.keys() == acted_on


def test_every_key_without_effect_is_reported_with_its_reason_and_its_other_values_are_refused() -> None:
    """The refusals: tests/verl/test_config_values.py."""
    keys = {}
    for pattern, (accepted, reason) in FIXED_KEYS.items():
        key = pattern.replace(".*.", ".actor.").replace("*", "some")
        keys[key] = (accepted[0] if accepted else "x", reason)
    taken = _taken(*(f"+{key}={'null' if value is None else value}" for key, (value, _) in keys.items()))
    assert taken == {key: reason for key, (_, reason) in keys.items()}


def test_every_key_that_has_another_place_arrives_there() -> None:
    moved = load_config([f"+{OVERRIDE}.swap_optimizer=True", "actor_rollout_ref.ref.load_weight=False"])
    assert moved.actor_rollout_ref.actor.megatron.swap_optimizer
    assert moved.actor_rollout_ref.actor.load_weight and not moved.actor_rollout_ref.ref.megatron.load_weight
    assert set(other_names().values()) <= declared_keys().keys()
    for key, (values, _, reason) in (REPLACED_VALUES | REPLACED_WITHOUT_CUDA).items():
        assert all(_taken(f"+{key}={value}")[key] == reason for value in values)
        with_cuda = _taken(f"+{key}={values[0]}", "trainer.device=cuda", "actor_rollout_ref.actor.use_kl_loss=True")
        assert (key in with_cuda) == (key in REPLACED_VALUES)
    fades = load_config(["+actor_rollout_ref.actor.tau_pos=1.5", "+actor_rollout_ref.actor.policy_loss.tau_neg=2"])
    assert fades.actor_rollout_ref.actor.policy_loss.tau_pos == 1.5
    assert fades.actor_rollout_ref.actor.policy_loss.tau_neg == 2
    with pytest.raises(ConfigError, match="swap_optimizer is False and .*swap_optimizer is True, which mean the same"):
        load_config([f"+{OVERRIDE}.swap_optimizer=False", f"{ACTOR}.swap_optimizer=True"])
    with pytest.raises(ConfigError, match="the reference starts from the actor's weights"):
        load_config(["actor_rollout_ref.ref.load_weight=True", "actor_rollout_ref.actor.load_weight=False"])


def test_the_lengths_of_fully_async_scripts_become_steps() -> None:
    mini, schedule = "actor_rollout_ref.actor.ppo_mini_batch_size=32", "trainer.schedule=fully_async"
    given = ["data.train_batch_size=0", "rollout.total_rollout_steps=204800", "rollout.test_freq=20"]
    given += ["async_training.require_batches=1", "async_training.trigger_parameter_sync_step=4", mini]
    config = load_config([schedule, *given, "async_training.use_rollout_log_probs=True"])
    assert config.data.train_batch_size == 32
    assert config.trainer.total_training_steps == 204800 // 32
    assert config.trainer.test_freq == 20 * 4
    saves = ["async_training.trigger_parameter_sync_step=4", "trainer.save_freq=10", "rollout.total_epochs=3"]
    assert load_config([schedule, *saves]).trainer.save_freq == 12
    assert _taken(schedule, *saves) == {"trainer.save_freq": "rounded up to whole weight syncs of 4 steps"}
    both = _taken(schedule, "rollout.total_epochs=3", "trainer.total_epochs=5")
    assert both == {"trainer.total_epochs": "rollout.total_epochs is given, and decides"}
    assert load_config([schedule, "rollout.total_epochs=3", "trainer.total_epochs=5"]).trainer.total_epochs == 3
    assert config.algorithm.rollout_correction.bypass_mode
    proximal = load_config([schedule, *given, "async_training.compute_prox_log_prob=True"])
    assert proximal.actor_rollout_ref.actor.recompute_old_log_prob == "True"
    assert not proximal.algorithm.rollout_correction.bypass_mode
    with pytest.raises(ConfigError, match="only trainer.schedule=fully_async has such keys"):
        load_config([f"{key}=1" for key in ASYNC_KEYS])


def test_keys_that_repeat_config_json_are_compared_with_it(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32}
    raw = {"kv_lora_rank": 512, "rope_scaling": scaling | {"original_max_position_embeddings": 4096}}
    raw |= {"rope_theta": 10000, "max_position_embeddings": 163840, "n_routed_experts": 256, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = override("actor_rollout_ref.model.path", tmp_path)
    same = {
        **dict.fromkeys(("rope_scaling_factor", "yarn_scaling_factor", "rotary_scaling_factor"), 40),
        **dict.fromkeys(("rope_scaling_mscale", "yarn_mscale", "mscale_all_dim"), 1),
        **dict.fromkeys(("rope_scaling_beta_fast", "yarn_beta_fast"), 32.0),
        **dict.fromkeys(("multi_head_latent_attention", "use_rope_scaling", "qk_layernorm"), True),
        "rope_scaling_type": "yarn",
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "rope_scaling_original_max_position_embeddings": 4096,
        "num_moe_experts": 256,
        "kv_lora_rank": 512,
        "layernorm_epsilon": "1e-6",
    }
    taken = _taken(model, *(f"+{OVERRIDE}.{key}={value}" for key, value in same.items()))
    assert taken == {f"{OVERRIDE}.{key}": "config.json of the model decides, and says the same" for key in same}
    other = {"yarn_scaling_factor": 32, "rope_scaling_type": "linear", "multi_head_latent_attention": False}
    with pytest.raises(ConfigError) as caught:
        load_config([model, *(f"+{OVERRIDE}.{key}={value}" for key, value in other.items())])
    assert len(caught.value.problems) == len(other)
    text = str(caught.value)
    assert f"yarn_scaling_factor is 32, but rope_scaling.factor of {tmp_path}/config.json is 40; the file" in text
    unread = _taken(f"+{OVERRIDE}.yarn_scaling_factor=40", "actor_rollout_ref.model.path=/absent")
    assert "will be compared" in unread[f"{OVERRIDE}.yarn_scaling_factor"]


def test_max_position_embeddings_can_only_be_lowered(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    model = override("actor_rollout_ref.model.path", tmp_path)
    for section in ("override_config", "override_config.model_config"):
        key = f"+actor_rollout_ref.model.{section}.max_position_embeddings"
        assert validate_config(load_config([*RUNNABLE, model, f"{key}=2048"])) == []
        assert "allows max_position_embeddings 512" in "\n".join(validate_config(load_config([model, f"{key}=512"])))
        problems = "\n".join(validate_config(load_config([model, f"{key}=32768"])))
        assert f"is 32768, but {tmp_path}/config.json has 4096" in problems


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("actor_rollout_ref.model.lora_rank=32", "there is no LoRA"),
        ("distillation.enabled=True", "there is no distillation"),
        ("actor_rollout_ref.rollout.do_sample=False", "training always samples"),
        ("actor_rollout_ref.rollout.load_format=gguf", "weights always come from the trainer"),
        ("reward_model.enable=True", "there is no reward network"),
        ("critic.enable=True", "no estimator here uses a critic network"),
        ("trainer.critic_warmup=5", "no estimator here uses a critic network"),
        (f"{ACTOR}.dtype=float16", "no float16 training"),
        ("actor_rollout_ref.rollout.dtype=float16", "no float16 training"),
        ("algorithm.adv_estimator=gae", "needs the values of a critic network, and there is none"),
        ("algorithm.adv_estimator=remax", "needs the reward of a greedy response to every prompt"),
        ("algorithm.adv_estimator=optimal_token_baseline", "needs the sum of squared probabilities at every token"),
        ("algorithm.adv_estimator=gdpo", "gdpo_reward_keys is empty"),
        ("algorithm={adv_estimator:gdpo,gdpo_reward_keys:[a],use_kl_in_reward:True}", "gdpo reads only the parts"),
    ],
)
def test_a_value_that_asks_for_what_is_not_there_is_refused_by_name(given: str, missing: str) -> None:
    try:
        problems = validate_config(load_config([*RUNNABLE, given]))
    except ConfigError as error:
        problems = error.problems
    assert [missing in problem for problem in problems] == [True], problems


def test_empty_values_of_unset_shell_variables_leave_the_default() -> None:
    given = {
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "",
        "data.return_raw_chat": "",
        "trainer.default_local_dir": "",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "null",
    }
    config, taken = resolve_config(compose_config([f"{key}={value}" for key, value in given.items()]))
    assert config == load_config()
    assert {item.key for item in taken} == given.keys()
    path = f"{ACTOR}.dist_checkpointing_path"
    assert load_config([f"{path}="]).actor_rollout_ref.actor.megatron.dist_checkpointing_path is None


@pytest.mark.parametrize("given", ["console,tensorboard", "[console,tensorboard]", '\'["console","tensorboard"]\''])
def test_loggers_come_in_every_quoting_of_a_shell(given: str) -> None:
    assert load_config([f"trainer.logger={given}"] if "," not in given or "[" in given else []).trainer.logger == [
        "console",
        "tensorboard",
    ]
    assert load_config(["trainer.logger=console"]).trainer.logger == ["console"]


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("foo", None),
        ("trainer.foo", None),
        ("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"),
        ("temperature", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.rolout.n", "actor_rollout_ref.rollout.n"),
    ],
)
def test_only_a_near_key_is_suggested(key: str, near: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([f"{key}=1"])
    assert caught.value.problems == [
        f"unknown key {key}"
        + (f"; the nearest known key is {near}" if near else ", and none is like it; docs/parameters.md has them all")
    ]


def test_every_key_of_the_reference_is_read_or_must_be_the_actors_or_is_reported() -> None:
    """``megatron_workers.py`` builds the reference's model from what it reads here."""
    read = {"dtype", "seed", "fix_router", "use_dist_checkpointing", "dist_checkpointing_path", "load_weight"}
    read |= {"override_transformer_config"}
    keys = {key.removeprefix(f"{REF}.") for key in declared_keys() if key.startswith(f"{REF}.")}
    reported = NOT_OF_REFERENCE.keys()
    for key, reason in NOT_OF_REFERENCE.items():
        assert _taken(f"{REF}.{key}={'{}' if 'ddp' in key else 'False'}") == {f"{REF}.{key}": reason}
    assert _taken(f"{ACTOR}.grad_offload=True", f"{ACTOR}.param_offload=True") == {}
    for key in keys - read - reported:
        value = {"num_layer_list": "[7]", "moe_tp_extend_ep": "True"}.get(key, "2")
        given = [f"{ACTOR}.tensor_model_parallel_size=4", "trainer.n_gpus_per_node=4", f"{REF}.{key}={value}"]
        problems = validate_config(load_config([*RUNNABLE, *given]))
        assert any("needs the same layout" in problem for problem in problems), (key, problems)


def test_the_block_is_logged_once_at_start(caplog: pytest.LogCaptureFixture) -> None:
    given = ["actor_rollout_ref.model.use_fused_kernels=True", "actor_rollout_ref.model.use_remove_padding=True"]
    with caplog.at_level(logging.INFO, logger="verl.trainer.main_ppo"):
        assert main_ppo.main(["--check", "config", "-cn", "base", *RUNNABLE, *given]) == 0
        assert main_ppo.main(["--check", "config", "-cn", "base", *RUNNABLE]) == 0
    blocks = [record.getMessage() for record in caplog.records if "taken without effect" in record.getMessage()]
    assert blocks == [without_effect_block(resolve_config(compose_config(given))[1])]
    assert "use_fused_kernels=True: trainer.train_ops decides which kernels run" in blocks[0]
