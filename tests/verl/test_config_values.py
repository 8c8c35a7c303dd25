"""Values that would stop a run only later: every one is told from the config alone. The recipe's configs have none."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from verl.trainer.config import ConfigError, PPOTrainerConfig, config_warnings, load_config, validate_config
from verl.trainer.config.data import file_list, val_sets
from verl.trainer.config.fixed_keys import FIXED_KEYS

RECIPE_CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "r1_zero" / "config"
LARGE = ("r1_ascend_671b_256die", "cann_true_weight_671b_256die", "cann_random_init_671b_256die")


def _recipe(name: str, *overrides: str) -> PPOTrainerConfig:
    given = ["actor_rollout_ref.actor.megatron.dist_checkpointing_path=/checkpoint", *overrides]
    return load_config(given, config_name=name, config_dir=RECIPE_CONFIGS)


def test_every_config_of_the_recipe_is_tested() -> None:
    assert {path.stem for path in RECIPE_CONFIGS.glob("*.yaml")} == {*LARGE, "r1_zero_tiny", "cann_random_init_tiny"}


@pytest.mark.parametrize("name", LARGE)
def test_recipe_for_256_dies_divides_over_16_nodes_of_16(name: str) -> None:
    config = _recipe(name)
    assert validate_config(config) == []
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (16, 16)
    layout = config.actor_rollout_ref.actor.megatron.layout(256)
    dims = {"num_layers": 61, "num_experts": 256, "num_attention_heads": 128, "vocab_size": 129280}
    assert layout.problems(**dims) == []
    assert layout.expert_model_parallel_size == 32
    assert layout.data_parallel_size == (32 if name.startswith("r1") else 8)
    assert (
        config.actor_rollout_ref.ref.megatron.num_layer_list == config.actor_rollout_ref.actor.megatron.num_layer_list
    )


def test_recipe_for_one_machine_validates_and_is_on_policy() -> None:
    config = _recipe("r1_zero_tiny")
    assert validate_config(config) == []
    assert not config.actor_rollout_ref.actor.needs_old_log_prob(config.data.train_batch_size)


def test_recipe_on_half_the_nodes_says_what_no_longer_divides() -> None:
    problems = "\n".join(validate_config(_recipe("r1_ascend_671b_256die", "trainer.nnodes=3")))
    assert "world size 48 is not a multiple of expert TP 1 x EP 32 x PP 8 = 256" in problems


@pytest.mark.parametrize("override", ["trainer=5", "actor_rollout_ref=text", "actor_rollout_ref.actor.megatron=[1]"])
def test_a_value_where_a_section_belongs_is_named(override: str) -> None:
    with pytest.raises(ConfigError, match=f"{override.split('=')[0]} is .*; expected a section, with keys like"):
        load_config([override])


def test_an_empty_section_means_its_defaults() -> None:
    empty = ["actor_rollout_ref.actor=null", "algorithm.kl_ctrl=null"]
    config, plain = load_config(empty), load_config()
    assert (config.actor_rollout_ref.actor, config.algorithm) == (plain.actor_rollout_ref.actor, plain.algorithm)


def test_home_is_expanded_wherever_a_path_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_config(
        [
            "data.train_files=['~/a.parquet',/b.parquet]",
            "actor_rollout_ref.model.path=~/model",
            "trainer.default_local_dir=~/checkpoints",
            "custom_reward_function.path=~/reward.py",
        ]
    )
    assert config.data.train_files == ["/home/someone/a.parquet", "/b.parquet"]
    assert config.actor_rollout_ref.model.path == "/home/someone/model"
    assert config.trainer.default_local_dir == "/home/someone/checkpoints"
    assert config.custom_reward_function.path == "/home/someone/reward.py"
    assert config.data.val_files == "/home/someone/data/rlhf/test.parquet", "defaults are expanded too"


def test_evaluation_sets_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_config(["data.val_files={aime:'~/a.parquet',math-500:[/b.parquet,/c.parquet]}"])
    assert val_sets(config.data.val_files) == {
        "aime": ["/home/someone/a.parquet"],
        "math-500": ["/b.parquet", "/c.parquet"],
    }
    assert file_list(config.data.val_files) == ["/home/someone/a.parquet", "/b.parquet", "/c.parquet"]
    by_key = load_config(["data.val_files.aime=/a.parquet", "data.val_files.math=/b.parquet"])
    assert by_key.data.val_files == {"aime": "/a.parquet", "math": "/b.parquet"}
    with pytest.raises(ConfigError, match="unknown key data.train_files.aime"):
        load_config(["data.train_files={aime:/a.parquet}"])
    assert val_sets("/a.parquet") == {"": ["/a.parquet"]}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.val_files={a b:/a.parquet}", "data.val_files names 'a b'"),
        ("data.val_files={aime:null}", "data.val_files.aime is None; expected a path or a list"),
        ("actor_rollout_ref.rollout.data_parallel_size=3", "data_parallel_size is 3; it must divide the 8 replicas"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=0", "ppo_mini_batch_size is 0; it must be at least 1"),
        ("actor_rollout_ref.rollout.n=0", "rollout.n is 0; it must be at least 1"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=0", "rollout.tensor_model_parallel_size is 0"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=0", "tensor_model_parallel_size is 0"),
        ("actor_rollout_ref.actor.megatron.num_layer_list=[a,b]", "are not a list of whole numbers"),
        ("trainer.nnodes=0", "trainer.nnodes is 0; it must be at least 1"),
        ("trainer.logger=[wandb,vemlp_wandb]", "expected names out of console, tensorboard, file, wandb, mlflow"),
        ("data.train_max_samples=0", "train_max_samples is 0"),
        ("data.val_batch_size=0", "val_batch_size is 0; it must be at least 1"),
        ("algorithm.kl_penalty=k9", "kl_penalty is 'k9'; expected one of kl"),
        ("algorithm.kl_ctrl={type:adaptive,horizon:0}", "horizon 0 must be above 0"),
        ("reward_model.timeout_s=0", "timeout_s is 0"),
        ("actor_rollout_ref.actor.optim.lr_warmup_init=1", "lr_warmup_init 1.0 is above lr"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "give trainer.total_training_steps"),
        ("actor_rollout_ref.actor.optim.lr_decay_style=cosine", "give trainer.total_training_steps"),
        (
            "actor_rollout_ref.actor.optim={lr_decay_style:linear,lr_warmup_steps:5,lr_decay_steps:5}",
            "decays over 5 steps; that must be more than the 5 of warm-up",
        ),
    ],
)
def test_a_bad_value_is_told_and_breaks_nothing_else(override: str, told: str) -> None:
    config = load_config(["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", override])
    assert told in "\n".join(validate_config(config))


def test_a_schedule_follows_the_length_of_the_run() -> None:
    optim = ["lr_decay_style=cosine", "lr_warmup_steps_ratio=0.1"]
    given = [f"actor_rollout_ref.actor.optim.{override}" for override in optim]
    config = load_config(
        [*given, "trainer.total_training_steps=50", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
    )
    assert not any("optim" in problem for problem in validate_config(config))
    schedule = config.actor_rollout_ref.actor.optim
    assert (schedule.warmup_steps(50), schedule.decay_steps(50)) == (5, 50)


def test_every_fixed_key_takes_upstreams_values_and_no_others() -> None:
    given: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    for pattern, (accepted, reason) in FIXED_KEYS.items():
        for role in ("actor", "ref") if ".*." in pattern else ("",):
            key = pattern.replace(".*.", f".{role}.").replace("*", "some")
            if next(first for first in FIXED_KEYS if fnmatchcase(key, first)) != pattern:
                continue  # an earlier pattern counts
            given[key] = ["null" if value is None else str(value) for value in accepted or ("[1]", "anything")]
            if accepted:
                refused[key] = reason
    plain = load_config()
    given["actor_rollout_ref.actor.megatron.fit_layout"] = ["False"]  # which keys of engines like FSDP set
    for index in range(max(map(len, given.values()))):
        assert load_config([f"+{key}={values[min(index, len(values) - 1)]}" for key, values in given.items()]) == plain
    with pytest.raises(ConfigError) as caught:
        load_config([f"+{key}=other" for key in refused])
    for key, reason in refused.items():
        assert re.search(re.escape(f"{key} is 'other'; expected") + ".*" + re.escape(reason), str(caught.value)), key


def test_generalised_advantages_are_refused() -> None:
    with pytest.raises(ConfigError, match="lam is 0.9; expected 1.0"):
        load_config(["algorithm.lam=0.9"])


def test_another_reward_column_is_refused_not_ignored() -> None:
    assert load_config(["data.reward_fn_key=data_source"])
    with pytest.raises(ConfigError, match="data.reward_fn_key is 'source'; expected 'data_source'"):
        load_config(["data.reward_fn_key=source"])


def test_no_sample_is_lost_between_batches_and_replicas() -> None:
    config = _recipe(
        "r1_zero_tiny", "trainer.n_gpus_per_node=3", "actor_rollout_ref.actor.megatron.expert_model_parallel_size=1"
    )
    text = "\n".join(config_warnings(config))
    assert "512 samples of a generation do not divide over the 3 rollout replicas: 1 of them are made twice" in text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["kv_cache_layout=blocks"], "kv_cache_layout is 'blocks'; expected one of nd, nz"),
        (["kv_cache_layout=nz"], "kv_cache_layout is 'nz', which only an NPU has"),
        (["enable_multistream_mla=True"], "enable_multistream_mla needs an NPU's second stream; leave it out"),
        (["expert_exchange=ring"], "expert_exchange is 'ring'; expected one of all_gather, dispatch"),
        (["expert_exchange=dispatch", "enable_expert_parallel=False"], "needs actor_rollout_ref.rollout.enable_expert"),
        (["use_sequence_parallel_moe=true"], "is True; it needs actor_rollout_ref.rollout.expert_exchange=dispatch"),
        (["rebalance_interval=-1"], "rebalance_interval is -1; give a number of steps, or 0 for never"),
        (
            ["cudagraph_capture_sizes=[1,9999]"],
            "cudagraph_capture_sizes is [1, 9999]; give numbers of sequences from 1",
        ),
    ],
)
def test_engine_knobs_that_cannot_work_are_named_before_anything_starts(overrides: list[str], said: str) -> None:
    keys = [f"actor_rollout_ref.rollout.{override}" for override in overrides]
    problems = validate_config(_recipe("r1_zero_tiny", "trainer.device=cpu", *keys))
    assert any(said in problem for problem in problems), problems


def test_engine_knobs_of_the_device_pass() -> None:
    keys = ("kv_cache_layout=nz", "expert_exchange=dispatch", "rebalance_interval=100", "cudagraph_capture_sizes=[1,8]")
    assert (
        validate_config(
            _recipe("r1_zero_tiny", "trainer.device=npu", *(f"actor_rollout_ref.rollout.{k}" for k in keys))
        )
        == []
    )


def test_gdpo_does_not_lose_the_penalty_of_long_responses() -> None:
    given = ["algorithm.adv_estimator=gdpo", "reward_model.overlong_buffer={enable:True,len:9,log:True}"]
    for keys, is_told in (("[acc]", True), ("[acc,overlong_reward]", False)):
        problems = "\n".join(validate_config(load_config([*given, f"algorithm.gdpo_reward_keys={keys}"])))
        assert ("lacks overlong_reward" in problems) == is_told


def test_a_value_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.name has no value \(\?\?\?\); give it one"):
        load_config(["actor_rollout_ref.rollout.name=???"])
