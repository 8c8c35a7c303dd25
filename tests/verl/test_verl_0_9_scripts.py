"""Keys and values of verl v0.9.0's launch scripts, for Megatron and for other engines: each has a verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl.trainer import device_room, main_ppo
from verl.trainer.config import ConfigError, PPOTrainerConfig, compose_config, load_config, resolve_config
from verl.trainer.config.declared import declared_keys, other_names
from verl.trainer.config.fixed_keys import FIXED_KEYS
from verl.trainer.config.load import other_defaults
from verl.trainer.config.override_text import override

FOLDER = Path(__file__).parent / "upstream_scripts"
SHARED = Path(__file__).resolve().parents[3] / "shared"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OVERRIDE = f"{ACTOR}.megatron.override_transformer_config"
# Keys and values that ask for what is not there -> the feature, as the message names it.
MISSING = {
    f"{ACTOR}.calculate_sum_pi_squared=True": "optimal_token_baseline",
    f"{OVERRIDE}.apply_dsa_kernel_fusion=True": "sparse attention",
    f"{OVERRIDE}.dsa_indexer_use_sparse_loss=True": "sparse attention",
    "actor_rollout_ref.model.lora.rank=32": "LoRA",
    "actor_rollout_ref.model.lora_rank=64": "LoRA",
    "actor_rollout_ref.model.lora_rank=32": "LoRA",
    f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8": "the cache has the weights' dtype",
    "distillation.enabled=True": "distillation",
    "reward.reward_model.enable=True": "reward network",
    "skip.async_rollout.enable=True": "trainer.train_only",
    "skip.rollout.enable=True": "trainer.train_only",
    "trainer.v1.trainer_mode=colocate_async": "trainer.schedule",
}
# Its values are refused where they need a critic or a greedy answer, and the table does not say which script has which.
ESTIMATOR = "algorithm.adv_estimator"
UNKNOWN = {"actor_rollout_ref.ref.megatron"}  # of which no value is known
BASE = {"algorithm.adv_estimator": "grpo", "trainer.logger": "console", "trainer.n_gpus_per_node": "2"}


def _rows() -> Iterator[tuple[bool, str, list[str]]]:
    """(whether scripts for Megatron have the key, key, values)."""
    for line in (FOLDER / "union_0_9.tsv").read_text().splitlines():
        if not line.startswith("#"):
            megatron, other, key, values = line.split("\t")
            for is_megatron, count in ((True, megatron), (False, other)):
                if int(count):
                    yield is_megatron, key, [value.strip() for value in values.split("|")]


def _target(key: str) -> str:
    """What a key sets here, roughly: two keys of the same last part may be one setting."""
    return other_names().get(key, key).rpartition(".")[2]


def _batches(is_megatron: bool) -> list[dict[str, str]]:
    """The values of all keys, as few configs as there can be with each setting once."""
    found: list[dict[str, str]] = []
    taken: list[set[str]] = []
    for of_megatron, key, values in _rows():
        if of_megatron is not is_megatron or key.startswith("hydra."):
            continue
        for value in values:
            index = next((index for index, keys in enumerate(taken) if _target(key) not in keys), len(found))
            if index == len(found):
                found.append({})
                taken.append(set())
            found[index][key] = value
            taken[index].add(_target(key))
    return found


@cache
def _refused() -> Mapping[str, str]:
    """Key and value of what is refused -> the sentence."""
    found = {}
    for is_megatron, name in ((True, "fully_async_ppo_megatron_trainer"), (False, "fully_async_ppo_trainer")):
        for chosen in _batches(is_megatron):
            while True:
                given = [
                    f"{key}={value}" if "@" in key else f"++{key}={value}" for key, value in (BASE | chosen).items()
                ]
                try:
                    resolve_config(compose_config(given, config_name=name))
                    break
                except ConfigError as error:
                    told = {key: text for key in chosen for text in error.problems if f"{key} is " in text}
                    assert told, error
                    told = {f"{key}={chosen.pop(key)}": text for key, text in told.items()}
                    found |= {
                        given: text for given, text in told.items() if "ranks: give" not in text
                    }  # of other sizes
    return found


def test_every_value_has_a_verdict_and_what_is_refused_names_a_feature() -> None:
    assert len(list(_rows())) > 450
    refused = _refused()
    assert refused.keys() == MISSING.keys()
    for given, feature in MISSING.items():
        assert feature in refused[given], given


def test_most_scripts_have_nothing_that_is_refused_any_more_and_each_of_the_others_names_it() -> None:
    free = {"M": 0, "F": 0}
    refused = {given.partition("=")[0] for given in MISSING}
    for line in (FOLDER / "refused_0_9.tsv").read_text().splitlines():
        if line.startswith("#"):
            continue
        script, keys = line.split("\t")
        stops = {key for key in keys.split() if key in refused | UNKNOWN}
        if ESTIMATOR in keys.split() and "algorithm.gdpo_reward_keys" not in keys:
            stops.add(ESTIMATOR)
        free[script[0]] += not stops
    assert free == {"M": 30, "F": 32}, free


def _config(*given: str, name: str = "ppo_trainer") -> PPOTrainerConfig:
    base = (f"{key}={value}" for key, value in BASE.items())
    return resolve_config(compose_config([*base, *(f"++{text}" for text in given)], config_name=name))[0]


def _taken(*given: str, name: str = "ppo_trainer") -> dict[str, str]:
    base = (f"{key}={value}" for key, value in BASE.items())
    composed = compose_config([*base, *(f"++{text}" for text in given)], config_name=name)
    return {item.key: item.reason for item in resolve_config(composed)[1]}


def _defaults() -> str:
    """The values of both of upstream's configs, ``ppo_trainer``'s first; without them a test is skipped."""
    facts = SHARED / "reference" / "verl-0.9-defaults.txt"
    if not facts.is_file():
        pytest.skip(f"{facts} is not there")
    return facts.read_text().split("== ppo_trainer")[1]


def test_what_a_script_leaves_out_has_upstreams_default() -> None:
    """Of every key that is acted on under upstream's name; where a folder of facts is at hand."""
    text = _defaults().split("== ppo_megatron_trainer")[0]
    theirs = {
        key: json.loads(value) for key, _, value in (line.partition(" = ") for line in text.splitlines()) if value
    }
    config = load_config(["algorithm.adv_estimator=gae"], config_name="ppo_trainer")
    ours = OmegaConf.create(asdict(config))
    # Where ours differ: the device is found out, there is one engine, which captures graphs where it can and lays out a
    # rollout's experts by itself, prompts are shared where that changes nothing, traces are among a run's outputs, and
    # FSDP's checkpointing is a recomputation.
    different = {
        *("trainer.device", f"{ROLLOUT}.mode", f"{ROLLOUT}.name", f"{ROLLOUT}.data_parallel_size"),
        f"{ROLLOUT}.enforce_eager",
        *(
            "global_profiler.save_path",
            f"{ACTOR}.use_prefix_grouper",
            "actor_rollout_ref.model.enable_gradient_checkpointing",
        ),
    }
    compared = 0
    for key, value in theirs.items():
        name = other_names().get(key, key)
        if name not in declared_keys() or key in different or value is None:
            continue
        if isinstance(value, str) and "${" in value:
            continue
        found = OmegaConf.select(ours, name)
        found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
        value = str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~") else value
        assert found == value or found == str(value), (key, found, value)
        compared += 1
    assert compared > 90


def test_the_defaults_that_differ_are_listed() -> None:
    lines = other_defaults(compose_config(["trainer.total_epochs=2"], config_name="ppo_megatron_trainer"))
    assert {f"{ROLLOUT}.tensor_model_parallel_size=2 (here 1)", "algorithm.adv_estimator=gae (here grpo)"} <= {*lines}
    assert not any("total_epochs" in line for line in lines)
    assert other_defaults(compose_config([])) == []


def test_fsdps_keys_mean_this_engine() -> None:
    given = [
        f"{ACTOR}.strategy=fsdp2",
        f"{ACTOR}.fsdp_config.param_offload=True",
        f"{ACTOR}.fsdp_config.optimizer_offload=True",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32",
        f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype=bf16",
        f"{ACTOR}.grad_clip=0.5",
        f"{ACTOR}.optim.lr_scheduler_type=cosine",
        f"{ACTOR}.optim.min_lr_ratio=0.1",
        f"{ACTOR}.optim.lr=2e-6",
        f"{ACTOR}.use_prefix_grouper=True",
        f"{ACTOR}.fsdp_config.fsdp_size=8",
        f"{ACTOR}.fsdp_config.model_dtype=bf16",
    ]
    config, taken = _config(*given), _taken(*given)
    actor = config.actor_rollout_ref.actor
    engine = actor.megatron
    assert engine.param_offload and engine.grad_offload and engine.optimizer_offload and engine.fit_layout
    assert engine.context_parallel_size == 2 == config.actor_rollout_ref.ref.megatron.context_parallel_size
    assert engine.dtype == "float32" and engine.override_ddp_config == {"grad_reduce_in_fp32": False}
    assert engine.override_transformer_config == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert actor.optim.clip_grad == 0.5 and actor.optim.lr_decay_style == "cosine"
    assert actor.optim.min_lr == pytest.approx(2e-7)
    assert actor.share_prompts.lower() == "true"
    assert "not sharded over data-parallel ranks" in taken[f"{ACTOR}.fsdp_config.fsdp_size"]
    assert "float32 masters" in taken[f"{ACTOR}.fsdp_config.model_dtype"]
    assert "weights and gradients are whole" in taken["model_engine"] and "whole" in taken[f"{ACTOR}.strategy"]
    offload = _config(f"{ACTOR}.fsdp_config.offload_policy=True").actor_rollout_ref.actor.megatron
    assert offload.param_offload and offload.grad_offload and offload.optimizer_offload
    megatron = _config("model_engine=megatron", name="ppo_megatron_trainer").actor_rollout_ref.actor.megatron
    assert not megatron.fit_layout and megatron.override_transformer_config == {}


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        (("mindspeed.tensor_model_parallel_size=4", "mindspeed.mcore_kwargs.moe_grouped_gemm=True"), (4, 1, 1)),
        (("torchtitan.tensor_parallel_size=2", "torchtitan.expert_parallel_size=4"), (2, 4, 1)),
        (("engine.tp=2", "engine.ep=8", "engine.cp=8", "engine.etp=1"), (2, 8, 8)),
        (
            ("megatron.override_transformer_config.tensor_model_parallel_size=2", "ulysses_sequence_parallel_size=4"),
            (2, 1, 4),
        ),
    ],
)
def test_sizes_of_other_engines_arrive(given: tuple[str, ...], sizes: tuple[int, int, int]) -> None:
    engine = _config(*(f"{ACTOR}.{text}" for text in given)).actor_rollout_ref.actor.megatron
    found = (engine.tensor_model_parallel_size, engine.expert_model_parallel_size, engine.context_parallel_size)
    assert found == sizes


def test_mindspeeds_section_and_rewards_have_other_places() -> None:
    section = f"{ACTOR}.mindspeed.mcore_kwargs"
    given = [
        f"{section}.overlap_grad_reduce=True",
        f"{section}.fix_router=True",
        f"{section}.moe_aux_loss_coeff=0.001",
        f"{section}.micro_batch_size=1",
        f"{ACTOR}.mindspeed.strategy=mindspeed_megatron",
        "reward.num_workers=4",
        "reward.reward_manager.name=dapo",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=False",
        "reward.custom_reward_function.path=/rewards/mine.py",
        f"{ACTOR}.megatron.router_replay.mode=R3",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=4096",
        f"{ROLLOUT}.engine_kwargs.vllm.max_model_len=8192",
        "actor_rollout_ref.rollout.nnodes=2",
    ]
    config, taken = _config(*given), _taken(*given)
    engine = config.actor_rollout_ref.actor.megatron
    assert engine.override_ddp_config == {"overlap_grad_reduce": True} and engine.fix_router
    assert engine.override_transformer_config["moe_aux_loss_coeff"] == 0.001
    assert taken[f"{section}.micro_batch_size"].startswith(
        "ppo_micro_batch_size_per_gpu"
    )  # under the name it was given
    assert config.reward_model.num_workers == 4 and config.reward_model.reward_manager == "dapo"
    assert config.custom_reward_function.path == "/rewards/mine.py"
    assert config.actor_rollout_ref.actor.router_replay.mode == "R3"
    assert config.actor_rollout_ref.rollout.update_weights_bucket_megabytes == 4096
    assert config.actor_rollout_ref.rollout.context_length == 8192 and config.rollout.nnodes == 2


def test_no_key_that_acts_is_dropped_by_a_pattern() -> None:
    taken = [name for name in declared_keys() for pattern in FIXED_KEYS if fnmatchcase(name, pattern)]
    assert taken == []


def test_two_names_with_two_values_are_a_problem() -> None:
    with pytest.raises(ConfigError, match="num_workers is 4 and reward_model.num_workers is 3, which mean the same"):
        _config("reward.num_workers=4", "reward_model.num_workers=3")


def test_arguments_of_vllms_engine_are_those_of_the_rollout() -> None:
    vllm = f"{ROLLOUT}.engine_kwargs.vllm"
    given = {"max_num_seqs": 8, "enforce_eager": False, "seed": 3, "quantization": "fp8", "block_size": 32}
    rollout = _config(*(f"{vllm}.{name}={value}" for name, value in given.items())).actor_rollout_ref.rollout
    assert {name: getattr(rollout, name) for name in given} == given
    with pytest.raises(ConfigError, match="max_num_seqs is 8 and .*max_num_seqs is 9, which mean the same"):
        _config(f"{vllm}.max_num_seqs=8", f"{ROLLOUT}.max_num_seqs=9")
    sizes = _config(f"{vllm}.compilation_config.cudagraph_capture_sizes=[1,2]", f"{vllm}.compilation_config.mode=3")
    assert sizes.actor_rollout_ref.rollout.cudagraph_capture_sizes == [1, 2]
    assert set(_taken(f"{vllm}.enable_eplb=True", f"{vllm}.swap_space=8")) >= {f"{vllm}.enable_eplb"}


def test_experts_and_depths_and_stages() -> None:
    experts = _config(f"{ROLLOUT}.expert_parallel_size=16", f"{ROLLOUT}.tensor_model_parallel_size=4")
    assert experts.actor_rollout_ref.rollout.data_parallel_size == 4
    assert not _config(f"{ROLLOUT}.expert_parallel_size=1").actor_rollout_ref.rollout.enable_expert_parallel
    with pytest.raises(ConfigError, match="expert_parallel_size is 16; .* x data_parallel_size = 2 x 4 ranks: give 8"):
        _config(f"{ROLLOUT}.expert_parallel_size=16", f"{ROLLOUT}.data_parallel_size=4")
    mtp = "actor_rollout_ref.model.mtp"
    for given, detaches in (((), True), (("True",), True), (("False",), False)):
        switches = (f"{mtp}.detach_encoder={value}" for value in given)
        depths = _config(f"{mtp}.enable=True", f"{mtp}.enable_train=True", *switches)
        overrides = depths.actor_rollout_ref.actor.megatron.override_transformer_config
        assert (overrides["mtp_num_layers"], overrides["mtp_detach_encoder"]) == (1, detaches)
    drafts = _config(f"{mtp}.enable=True", f"{mtp}.enable_rollout=True", f"{mtp}.num_speculative_tokens=2")
    overrides = drafts.actor_rollout_ref.actor.megatron.override_transformer_config
    assert (overrides["mtp_num_layers"], overrides["mtp_loss_scaling_factor"]) == (1, 0.0)
    given = drafts.actor_rollout_ref.rollout.speculative_config
    assert dict(given) == {"method": "mtp", "num_speculative_tokens": 2}
    assert not _config(f"{mtp}.enable_rollout=True").actor_rollout_ref.rollout.speculative_config
    layout = _config(f"{OVERRIDE}.pipeline_model_parallel_layout='Et*6/t*6/t*5/ttL'").actor_rollout_ref.actor.megatron
    assert layout.layer_counts() == (6, 6, 5, 2)
    with pytest.raises(ConfigError, match="expected stages like"):
        _config(f"{OVERRIDE}.pipeline_model_parallel_layout='Et*6/m'")


def test_only_validation_needs_a_validation() -> None:
    problems = main_ppo.validate_config(_config("trainer.val_only=True", "trainer.val_before_train=False"))
    assert any("val_only is True, but nothing is validated" in problem for problem in problems)


QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}


@pytest.mark.parametrize(
    ("devices", "gib", "layout"), [(8, 80, (1, 1)), (8, 64, (2, 1)), (8, 24, (4, 2)), (4, 12, None), (4, None, (1, 1))]
)
def test_a_script_for_fsdp_gets_a_layout_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int, gib: int | None, layout: tuple[int, int] | None
) -> None:
    """7.6B parameters, of which every device has 10 bytes and its part of 12 more."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    monkeypatch.setattr(device_room, "_device_bytes", lambda config: gib and gib * 2**30)
    config = _config(override("actor_rollout_ref.model.path", tmp_path), f"trainer.n_gpus_per_node={devices}")
    if layout is None:
        with pytest.raises(ConfigError, match=r"take at least \d+\.\d GiB on each of 4 devices in every layout"):
            device_room.fit_to_devices(config)
        return
    fitted, line = device_room.fit_to_devices(config)
    for engine in (fitted.actor_rollout_ref.actor.megatron, fitted.actor_rollout_ref.ref.megatron):
        assert (engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size) == layout
    assert (f"tensor_model_parallel_size={layout[0]}" in line) == (layout != (1, 1))
    assert gib is not None or "is not checked" in line
    for kept in ("ppo_mini_batch_size", "ppo_max_token_len_per_gpu", "loss_agg_mode"):
        before: Any = getattr(config.actor_rollout_ref.actor, kept)
        assert getattr(fitted.actor_rollout_ref.actor, kept) == before


def test_every_key_of_both_configs_is_known() -> None:
    """A script may give any key that upstream's own config has, its default included."""
    lines = _defaults().splitlines()
    given = dict(line.split(" = ", 1) for line in lines if " = " in line and "???" not in line and "${" not in line)
    assert len(given) > 900
    resolve_config(compose_config([f"++{key}={value}" for key, value in given.items()]))


def test_a_chat_template_of_the_script_is_that_of_the_prompts() -> None:
    kwargs = "data.apply_chat_template_kwargs"
    template = override("actor_rollout_ref.model.custom_chat_template", "{{ messages[0].content }}")
    wanted = {"enable_thinking": False, "chat_template": "{{ messages[0].content }}"}
    for given in ([template, f"{kwargs}.enable_thinking=False"], [f"+{kwargs}={{enable_thinking:False}}", template]):
        assert load_config(given).data.apply_chat_template_kwargs == wanted
