"""The configuration tree: typed, checked as a whole, helpful about mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from verl.trainer.config import ConfigError, load_config, validate_config
from verl.trainer.config.checks import has_default_names
from verl.trainer.config.load import to_yaml, typed_config
from verl.trainer.config.override_text import override
from verl.trainer.config.validate import config_warnings
from verl.trainer.ppo.algos import ESTIMATORS
from verl.trainer.ppo.metric_utils import count_samples_above
from verl.trainer.ppo.policy_losses import LOSSES
from verl.workers.reward_manager import MANAGERS

RUNNABLE = (
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.n=4",
    "trainer.n_gpus_per_node=2",
)
R1_ASCEND = (
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=32",
    "actor_rollout_ref.actor.megatron.swap_optimizer=True",
    "+actor_rollout_ref.actor.megatron.override_transformer_config.multi_head_latent_attention=True",
    "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=alltoall",
    "+actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=6",
    "+actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=7",
    "+actor_rollout_ref.actor.megatron.override_transformer_config.pipeline_num_transformer_layers="
    "[[6],[8],[8],[8],[8],[8],[8],[7]]",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "algorithm.kl_ctrl.kl_coef=0.0",
    "trainer.critic_warmup=0",
    "trainer.nnodes=16",
    "trainer.n_gpus_per_node=16",
    "data.train_batch_size=512",
    "actor_rollout_ref.actor.ppo_mini_batch_size=512",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.n=16",
)


def test_defaults_follow_the_keys_they_derive_from() -> None:
    config = load_config(
        [
            "data.max_prompt_length=100",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
            "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4",
            "actor_rollout_ref.ref.megatron.seed=7",
        ]
    )
    models = config.actor_rollout_ref
    assert models.rollout.prompt_length == 100
    assert models.ref.log_prob_micro_batch_size_per_gpu == models.rollout.log_prob_micro_batch_size_per_gpu == 3
    assert models.ref.megatron.expert_model_parallel_size == 4
    assert (models.ref.megatron.seed, models.actor.megatron.seed) == (7, 42)


def test_all_mistakes_come_in_one_message_with_the_nearest_key() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            [
                "actor_rollout_ref.rolout.n=16",
                "trainer.n_gpu_per_node=3",
                "data.train_batch_size=many",
                "trainer.critic_warmup=3",
                "reward_model.enable=True",
                "rollout.temperature=1",
            ]
        )
    text = str(caught.value)
    assert len(caught.value.problems) == 6
    assert "actor_rollout_ref.rolout.n; the nearest known key is actor_rollout_ref.rollout.n" in text
    assert "trainer.n_gpu_per_node; the nearest known key is trainer.n_gpus_per_node" in text
    assert "rollout.temperature; the nearest known key is actor_rollout_ref.rollout.temperature" in text
    assert "data.train_batch_size is 'many'" in text
    assert "trainer.critic_warmup is 3; expected 0" in text
    assert (
        "reward_model.enable is True; expected False or None (rewards are functions: there is no reward network)"
        in text
    )


def test_malformed_override_and_unknown_config_name_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_config(["actor_rollout_ref.rollout.n"])
    with pytest.raises(ConfigError, match="'ABSENT' not found"):
        load_config(["trainer.project_name=${ABSENT}"])
    with pytest.raises(ConfigError, match="no config 'absent'"):
        load_config(config_name="absent", config_dir=tmp_path)


def test_recipe_yaml_builds_on_the_base_config(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults:\n  - base\n  - _self_\ndata:\n  seed: 7\n")
    config = load_config(["data.seed=9"], config_name="mine", config_dir=tmp_path)
    assert config.data.seed == 9
    assert config.trainer.default_local_dir == "checkpoints/r1_zero/grpo"


def test_config_is_frozen_and_its_yaml_loads_back_to_the_same() -> None:
    config = load_config(RUNNABLE)
    with pytest.raises(FrozenInstanceError):
        config.data.train_batch_size = 1  # type: ignore[misc]
    assert typed_config(DictConfig(OmegaConf.create(to_yaml(config)))) == config


def test_upstream_keys_of_the_ascend_script_are_accepted_and_make_its_layout() -> None:
    config = load_config(R1_ASCEND)
    assert validate_config(config) == []
    layout = config.training_layout
    assert layout.num_layer_list == (6, 8, 8, 8, 8, 8, 8, 7)
    assert layout.data_parallel_size == 32


def test_layers_per_stage_from_first_and_last_from_text_and_from_a_list() -> None:
    prefix = "actor_rollout_ref.actor.megatron"
    uneven = load_config(
        [
            f"{prefix}.pipeline_model_parallel_size=4",
            f"+{prefix}.override_transformer_config.num_layers_in_first_pipeline_stage=1",
            f"+{prefix}.override_transformer_config.num_layers_in_last_pipeline_stage=2",
        ]
    ).actor_rollout_ref.actor.megatron
    assert uneven.layer_counts(9) == (1, 3, 3, 2)
    counted = [
        f"+{prefix}.override_transformer_config.account_for_{end}_in_pipeline_split" for end in ("embedding", "loss")
    ]
    even = [f"{prefix}.pipeline_model_parallel_size=8", *(f"{key}=True" for key in counted)]
    assert load_config(even).actor_rollout_ref.actor.megatron.layer_counts(94) == (11, *[12] * 6, 11)
    assert load_config(even[:2]).actor_rollout_ref.actor.megatron.layer_counts(95) == (11, *[12] * 7)
    with pytest.raises(ValueError, match="94 layers do not divide"):
        load_config([*even[:2], f"{counted[1]}=False"]).actor_rollout_ref.actor.megatron.layer_counts(94)
    chunks = load_config([*even, f"{prefix}.virtual_pipeline_model_parallel_size=2"]).actor_rollout_ref.actor.megatron
    with pytest.raises(ValueError, match="shorten the end stages of an even split; with virtual stages"):
        chunks.layer_counts(94)
    for given in ("[7,7,8]", "'7,7,8'"):
        engine = load_config([f"{prefix}.num_layer_list={given}"]).actor_rollout_ref.actor.megatron
        assert engine.layer_counts() == (7, 7, 8)


def test_tensor_parallel_ranks_join_the_experts_only_when_asked() -> None:
    prefix = "actor_rollout_ref.actor.megatron"
    keys = [f"{prefix}.tensor_model_parallel_size=4", f"{prefix}.expert_model_parallel_size=8"]
    assert load_config(keys).actor_rollout_ref.actor.megatron.expert_parallel == 8
    joined = load_config([*keys, f"{prefix}.moe_tp_extend_ep=True"]).actor_rollout_ref.actor.megatron
    assert joined.expert_parallel == 32


def test_every_arithmetic_problem_at_once() -> None:
    config = load_config(
        [
            *RUNNABLE,
            "actor_rollout_ref.actor.ppo_mini_batch_size=6",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5",
            "actor_rollout_ref.rollout.temperature=0",
            "algorithm.adv_estimator=gae",
        ]
    )
    text = "\n".join(validate_config(config))
    assert "train_batch_size 16 is not a multiple of ppo_mini_batch_size 6; nearest: 12 or 18" in text
    assert "12 samples per rank and mini-batch" in text
    assert "temperature is 0" in text
    assert "adv_estimator is 'gae'" in text


def test_shared_prompts_are_refused_with_what_needs_whole_sequences() -> None:
    actor, transformer = "actor_rollout_ref.actor", "megatron.override_transformer_config"
    others = (
        "megatron.context_parallel_size=2",
        "router_replay.mode=R2",
        f"+{transformer}.moe_router_load_balancing_type=seq_aux_loss",
    )
    given = [f"{'+' * text.startswith('+')}{actor}.{text.removeprefix('+')}" for text in others]
    text = "\n".join(validate_config(load_config([*RUNNABLE, *given, f"{actor}.share_prompts=True"])))
    for name in ("context_parallel_size is 2", "router_replay.mode is R2", "seq_aux_loss"):
        assert any("share_prompts is True" in line and name in line for line in text.splitlines()), name
    for other, name in zip(given, ("context_parallel_size", "replay", "seq_aux_loss"), strict=True):
        config = load_config([*RUNNABLE, other])
        assert name in config.actor_rollout_ref.actor.skip_sharing_reason("cpu")
        assert "share_prompts" not in "\n".join(validate_config(config))


def test_drafts_of_the_prediction_layer_need_one() -> None:
    drafts = "actor_rollout_ref.rollout.speculative_config={method:mtp,num_speculative_tokens:1}"
    layer = "+actor_rollout_ref.actor.megatron.override_transformer_config.mtp_num_layers=1"
    assert "has no prediction layer" in "\n".join(validate_config(load_config([*RUNNABLE, drafts])))
    assert not validate_config(load_config([*RUNNABLE, drafts, layer]))


def test_samples_share_their_prompt_unless_something_forbids_it() -> None:
    def reason(device: str, *given: str) -> str:
        return load_config([*RUNNABLE, *given]).actor_rollout_ref.actor.skip_sharing_reason(device)

    switch = "actor_rollout_ref.actor.share_prompts"
    assert reason("cpu") == reason("cuda") == reason("npu", f"{switch}=True") == ""
    assert "NPU" in reason("npu") and "share_prompts is False" in reason("cpu", f"{switch}=False")


@pytest.mark.parametrize(("experts", "mode"), [({}, "disabled"), ({"n_routed_experts": 8}, "R2")])
def test_several_updates_replay_routing_only_where_there_are_experts(
    tmp_path: Path, experts: dict[str, int], mode: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3, "vocab_size": 100, **experts}))
    given = [override("actor_rollout_ref.model.path", tmp_path), "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    actor = load_config([*RUNNABLE, *given]).actor_rollout_ref.actor
    assert actor.router_replay.mode == mode
    assert bool(actor.skip_sharing_reason("cpu")) == bool(experts)


def test_the_default_names_are_registered() -> None:
    """A run with the defaults of estimator, loss and reward manager is checked without their registries."""
    config = load_config(RUNNABLE)
    assert has_default_names(config)
    assert config.algorithm.adv_estimator in ESTIMATORS.names
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode in LOSSES.names
    assert config.reward_model.reward_manager in MANAGERS.names


@pytest.mark.parametrize("experts", ["n_routed_experts", "num_experts", "num_local_experts"])  # by family
def test_layout_is_checked_against_the_models_dimensions(tmp_path: Path, experts: str) -> None:
    dims = {"num_hidden_layers": 3, experts: 6, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({**dims, "max_position_embeddings": 64}))
    config = load_config(
        [
            *RUNNABLE,
            override("actor_rollout_ref.model.path", tmp_path),
            "trainer.n_gpus_per_node=8",
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
            "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
        ]
    )
    text = "\n".join(validate_config(config))
    assert "3 layers do not divide over pipeline_model_parallel_size 2" in text
    assert "6 experts do not divide over expert_model_parallel_size 4" in text
    assert "4 attention heads do not divide over rollout.tensor_model_parallel_size 8" in text
    assert not config.actor_rollout_ref.rollout.enable_expert_parallel  # not given, and 6 experts over 8 ranks
    given = [
        override("actor_rollout_ref.model.path", tmp_path),
        "actor_rollout_ref.rollout.enable_expert_parallel=True",
    ]
    assert "6 experts do not divide over the 8 rollout ranks" in "\n".join(validate_config(load_config(given)))
    assert "max_position_embeddings 64" in text


def test_old_log_probs_are_skipped_only_when_provably_on_policy() -> None:
    actor = load_config(RUNNABLE).actor_rollout_ref.actor
    assert not actor.needs_old_log_prob(train_batch_size=16)
    assert actor.needs_old_log_prob(train_batch_size=32)
    forced = load_config([*RUNNABLE, "actor_rollout_ref.actor.recompute_old_log_prob=True"]).actor_rollout_ref.actor
    assert forced.needs_old_log_prob(train_batch_size=16)
    epochs = load_config([*RUNNABLE, "actor_rollout_ref.actor.ppo_epochs=2"]).actor_rollout_ref.actor
    assert epochs.needs_old_log_prob(train_batch_size=16)


def test_warnings_for_cut_distributions_and_groups_of_one() -> None:
    config = load_config([*RUNNABLE, "actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.n=1"])
    text = "\n".join(config_warnings(config))
    assert "top_p 0.9" in text and "rollout.n is 1" in text


def test_a_token_limit_below_the_longest_sequence_is_told_and_its_samples_are_counted() -> None:
    """Update and reference with dynamic micro-batches of 40 tokens a rank, where a sequence may have 48 or more."""
    models = "actor_rollout_ref"
    lengths = ("data.max_prompt_length=16", "data.max_response_length=80")
    dynamic = (f"{models}.actor.use_dynamic_bsz=True", f"{models}.ref.log_prob_use_dynamic_bsz=True")
    limits = [f"{models}.{key}_max_token_len_per_gpu=40" for key in ("actor.ppo", "rollout.log_prob", "ref.log_prob")]
    layout = (f"{models}.actor.megatron.context_parallel_size=2", f"{models}.actor.use_kl_loss=True")
    config = load_config([*RUNNABLE, *lengths, *dynamic, *limits, *layout])
    assert "tokens of" not in "\n".join(validate_config(config))
    told = [warning for warning in config_warnings(config) if "micro-batch of its own" in warning]
    assert len(told) == 2 and told[0].startswith(
        f"{models}.actor.ppo_max_token_len_per_gpu 40 x context_parallel_size 2 is below the 96 tokens of the longest"
    )
    lengths_B = torch.tensor([3, 77, 80, 81, 96])  # a row is padded to four chunks, so 77 tokens take 80
    assert count_samples_above(lengths_B, config.exceeded_token_limits, 2) == {
        "training/samples_above_token_limit/update_actor": 2.0,
        "training/samples_above_token_limit/ref": 2.0,
    }
    enough = load_config([*RUNNABLE, *lengths, *dynamic, f"{models}.actor.ppo_max_token_len_per_gpu=96"])
    assert enough.exceeded_token_limits == []


def test_config_modules_import_neither_torch_nor_ray() -> None:
    code = "import sys, verl.trainer.config; print([m for m in ('torch', 'ray') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"
