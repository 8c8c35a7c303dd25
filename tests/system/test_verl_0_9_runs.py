"""Command lines of verl v0.9.0, for FSDP and for Megatron: the same settings in our keys, trained and resumed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from recipes.common.recipe import load_recipe
from tests.system.command import read_metrics
from tests.system.in_process import FEW_CPUS, fit
from tests.system.jobs import Prepared
from tests.verl.test_upstream_scripts import FOLDER
from verl.trainer.command_line import read_command_line
from verl.trainer.config import PPOTrainerConfig, compose_config, resolve_config, validate_config
from verl.trainer.config.declared import declared_keys
from verl.trainer.config.load import replaced
from verl.trainer.config.override_text import override
from verl.trainer.device_room import fit_to_devices
from verl.workers.config.keys import flat

pytestmark = pytest.mark.timeout(600)
MODELS, ACTOR, ROLLOUT = "actor_rollout_ref", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON, OVERRIDE = f"{ACTOR}.megatron", f"{ACTOR}.megatron.override_transformer_config"
# Another size of everything, whoever names it.
SMALLER = (
    "data.train_batch_size=8",
    "data.max_prompt_length=512",
    "data.max_response_length=32",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.ppo_max_token_len_per_gpu=4096",
    f"{MODELS}.ref.log_prob_max_token_len_per_gpu=4096",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu=4096",
    f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.max_num_seqs=32",
    f"{ROLLOUT}.max_num_batched_tokens=2048",
    f"{ROLLOUT}.num_gpu_blocks_override=512",
    f"{ROLLOUT}.dtype=float32",
    *(f"{MODELS}.{role}.megatron.dtype=float32" for role in ("actor", "ref")),
    *(
        f"{MODELS}.{role}.megatron.{axis}_model_parallel_size=1"
        for role in ("actor", "ref")
        for axis in ("tensor", "pipeline", "expert")
    ),
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=2",
    "trainer.device=cpu",
    "trainer.total_training_steps=2",
    "trainer.logger=console",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    FEW_CPUS,
)
SEPARATE = ("trainer.n_gpus_per_node=1", "rollout.nnodes=1", "rollout.n_gpus_per_node=1")
FULL = (
    f"+{OVERRIDE}.recompute_granularity=full",
    f"+{OVERRIDE}.recompute_method=uniform",
    f"+{OVERRIDE}.recompute_num_layers=1",
)
# v0.9.0's defaults that ours are not.
DEFAULTS = (
    f"{MODELS}.model.path=x",
    f"{ACTOR}.clip_ratio_low=0.2",
    f"{ACTOR}.clip_ratio_high=0.2",
    f"{ACTOR}.data_loader_seed=42",
    f"{ACTOR}.router_replay.mode=disabled",
    f"{ACTOR}.profiler.tool_config.npu.level=level0",
    f"{ROLLOUT}.seed=42",
    f"{ROLLOUT}.update_weights_bucket_megabytes=2048",
    "data.return_raw_chat=True",
    "reward_model.num_workers=8",
    "trainer.project_name=verl_examples",
    "trainer.experiment_name=gsm8k",
    "trainer.total_epochs=30",
)
# script -> what its keys that have another name or form here are in ours; further changes of size
SCRIPTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "grpo_qwen2_5_fsdp2": (
        (*FULL, f"{MEGATRON}.fit_layout=True", f"{ROLLOUT}.update_weights_bucket_megabytes=4096"),
        (f"{ACTOR}.ulysses_sequence_parallel_size=1",),
    ),
    "grpo_qwen3_megatron": (
        (
            f"{MODELS}.model.enable_gradient_checkpointing=True",
            f"{ROLLOUT}.enable_expert_parallel=False",
            f"+{ACTOR}.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True",
        ),
        (),
    ),
    "dapo_qwen3_dynamic": (
        (
            f"{MODELS}.model.enable_gradient_checkpointing=True",
            "reward_model.reward_manager=dapo",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=8",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.log=False",
            "+reward_model.reward_kwargs.max_resp_len=32",
            f"{OVERRIDE}.moe_token_dispatcher_type=alltoall",
        ),
        (
            "reward.reward_kwargs.overlong_buffer_cfg.len=8",
            "reward.reward_kwargs.max_resp_len=32",
            "data.gen_batch_size=12",
            "algorithm.filter_groups.max_num_gen_batches=0",
        ),
    ),
    "gspo_npu": (
        (
            *FULL,
            *(
                f"{MEGATRON}.{name}=True"
                for name in ("param_offload", "grad_offload", "optimizer_offload", "fit_layout")
            ),
            f"{MEGATRON}.context_parallel_size=2",
            f"{ACTOR}.optim.clip_grad=1.0",
        ),
        (),
    ),
    "fully_async": (
        (
            f"{MODELS}.model.enable_gradient_checkpointing=True",
            "trainer.schedule=fully_async",
            "data.train_batch_size=8",
            "trainer.total_training_steps=2",
            f"{ROLLOUT}.update_weights_bucket_megabytes=1024",
        ),
        (
            *SEPARATE,
            "data.train_batch_size=0",
            "rollout.total_rollout_steps=16",
            "async_training.trigger_parameter_sync_step=1",
        ),
    ),
}


def _arguments(name: str) -> tuple[str, list[str]]:
    lines = (line for line in (FOLDER / "v0_9" / f"{name}.args").read_text().splitlines() if line[0] != "#")
    module, *arguments = lines
    return module, arguments


def _theirs(name: str, *paths: str) -> PPOTrainerConfig:
    args = read_command_line([*_arguments(name)[1], *paths, *SMALLER, *SCRIPTS[name][1]])
    config, taken = resolve_config(compose_config(args.overrides, config_name=args.config_name))
    assert validate_config(config) == [] and taken
    return config


def _ours(name: str, *paths: str) -> PPOTrainerConfig:
    """The script's keys that are the same here, and the others in our words, over our defaults."""
    translated, sizes = SCRIPTS[name]
    same = [text for text in _arguments(name)[1] if _is_here(text)]
    given = [*DEFAULTS, *same, *paths, *SMALLER, *(text for text in sizes if _is_here(text)), *translated]
    return resolve_config(compose_config(given))[0]


def _is_here(text: str) -> bool:
    key = text.partition("=")[0].lstrip("+")
    if text in (f"{ROLLOUT}.mode=async", "data.train_batch_size=0", "data.gen_batch_size=1"):
        return False
    if key.endswith("enable_gradient_checkpointing"):  # of FSDP it is a recomputation
        return False
    return key in declared_keys() or key.startswith(
        (f"{OVERRIDE}.recompute", f"{OVERRIDE}.moe_router", f"{OVERRIDE}.sequ")
    )


def _paths(converted: Prepared, folder: Path) -> Iterator[str]:
    data = converted.folder / "data"
    yield override("data.train_files", data / "train.parquet")
    yield override("data.val_files", data / "test.parquet")
    yield f"{MODELS}.model.path={converted.model_path}"
    yield override("custom_reward_function.path", load_recipe("r1_zero").reward_path)
    yield override("trainer.default_local_dir", folder / "checkpoints")
    yield override("trainer.report_dir", folder)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_means_the_same_settings_in_our_keys(converted: Prepared, tmp_path: Path, name: str) -> None:
    paths = [*_paths(converted, tmp_path)]
    theirs, ours = (dict(flat(asdict(make(name, *paths)))) for make in (_theirs, _ours))
    assert {key: (theirs.get(key), ours.get(key)) for key in theirs | ours if theirs.get(key) != ours.get(key)} == {}


@pytest.mark.slow  # about half a minute each
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_exports_and_resumes(local_ray: None, converted: Prepared, tmp_path: Path, name: str) -> None:
    config, line = fit_to_devices(_theirs(name, *_paths(converted, tmp_path)))
    assert line == ""
    fit(config)
    fit(replaced(config, "trainer.total_training_steps", 3))
    rows = [row for row in read_metrics(tmp_path) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["actor/grad_norm"] > 0 and math.isfinite(row["actor/pg_loss"]) for row in rows)
    assert (tmp_path / "export_hf" / "config.json").is_file() and list((tmp_path / "export_hf").glob("*.safetensors"))
