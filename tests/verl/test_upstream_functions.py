"""Upstream's tools around a trainer: their names and signatures, and results worked out by hand."""

from __future__ import annotations

import dataclasses
import os
import pickle
import time
from typing import ClassVar

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.verl.upstream_api import module_differences
from verl import DataProto
from verl.base_config import BaseConfig
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.constants_ppo import PPO_RAY_RUNTIME_ENV, get_ppo_ray_runtime_env
from verl.trainer.ppo.core_algos import AdaptiveKLController
from verl.trainer.ppo.ray_trainer import ResourcePoolManager, apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.utils import Role, need_critic, need_reference_policy, need_reward_model
from verl.utils import device
from verl.utils.config import omega_conf_to_dataclass, update_dict_with_config, validate_config
from verl.utils.groupwise import as_torch_index, group_mean_std
from verl.utils.import_utils import deprecated
from verl.utils.memory_utils import aggressive_empty_cache
from verl.utils.py_functional import (
    DynamicEnum,
    NestedNamespace,
    append_to_dict,
    convert_to_regular_types,
    temp_env_var,
    timeout_limit,
    union_two_dict,
)
from verl.utils.ray_utils import ray_noset_visible_devices

NAMES = {
    "verl.base_config": ("BaseConfig",),
    "verl.trainer.constants_ppo": ("PPO_RAY_RUNTIME_ENV", "get_ppo_ray_runtime_env"),
    "verl.trainer.ppo.ray_trainer": (
        *("ResourcePoolManager", "apply_kl_penalty", "compute_response_mask", "compute_advantage"),
    ),
    "verl.trainer.ppo.utils": ("WorkerType", "Role", "need_reference_policy", "need_reward_model", "need_critic"),
    "verl.utils": ("as_torch_index", "group_mean_std", "hf_tokenizer", "omega_conf_to_dataclass", "validate_config"),
    "verl.utils.config": ("omega_conf_to_dataclass", "update_dict_with_config", "validate_config"),
    "verl.utils.device": (
        *("is_torch_npu_available", "is_cuda_available", "is_npu_available", "get_visible_devices_keyword"),
        *("get_device_name", "get_torch_device", "get_device_id", "get_nccl_backend", "set_expandable_segments"),
    ),
    "verl.utils.distributed": (
        *("initialize_global_process_group", "destroy_global_process_group", "initialize_global_process_group_ray"),
    ),
    "verl.utils.groupwise": ("as_torch_index", "group_mean_std"),
    "verl.utils.import_utils": (
        *("is_megatron_core_available", "is_vllm_available", "is_nvtx_available", "is_trl_available"),
        *("import_external_libs", "load_extern_type", "deprecated"),
    ),
    "verl.utils.py_functional": (
        *("timeout_limit", "union_two_dict", "append_to_dict", "NestedNamespace", "DynamicEnumMeta", "DynamicEnum"),
        *("temp_env_var", "convert_to_regular_types"),
    ),
    "verl.utils.ray_utils": ("ray_noset_visible_devices", "parallel_put", "get_event_loop"),
}


@pytest.mark.parametrize("module", sorted(NAMES))
def test_signatures_are_upstreams(module: str) -> None:
    assert module_differences(module, *NAMES[module]) == []


def test_time_limits_end_a_call_and_pass_its_result_and_its_error_on() -> None:
    @timeout_limit(30)
    def divide(a: int, b: int) -> float:
        return a / b

    assert divide(6, b=3) == 2.0
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    for use_signals in (False, True):
        with pytest.raises(TimeoutError, match="sleep timed out after 0.1 seconds"):
            timeout_limit(0.1, use_signals=use_signals)(_sleep)()


def _sleep() -> None:
    time.sleep(60)


_sleep.__name__ = "sleep"


class Colour(DynamicEnum):
    _registry: ClassVar[dict[str, DynamicEnum]] = {}
    _next_value = 0


def test_an_enumeration_grows_and_shrinks() -> None:
    red = Colour.register("red")
    Colour.register("BLUE")
    assert Colour.RED is Colour["RED"] is Colour.from_name("Red") is red and red.value == 0  # type: ignore[attr-defined]
    assert Colour.names() == ["RED", "BLUE"] and [colour.value for colour in Colour] == [0, 1]
    assert pickle.loads(pickle.dumps(red)) is red and "RED" in Colour and red in Colour
    with pytest.raises(ValueError, match=r"Colour\.RED already exists"):
        Colour.register("red")
    Colour.remove("blue")
    assert Colour.names() == ["RED"] and Colour.from_name("blue") is None and not hasattr(Colour, "BLUE")


def test_dicts_and_environment() -> None:
    metrics: dict[str, list[float]] = {}
    append_to_dict(metrics, {"loss": 1.0, "actor/kl": 2.0}, prefix="actor/")
    append_to_dict(metrics, {"loss": 3.0}, prefix="actor/")
    assert metrics == {"actor/loss": [1.0, 3.0], "actor/kl": [2.0]}
    assert union_two_dict({"a": 1}, {"b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(AssertionError, match="different values"):
        union_two_dict({"a": 1}, {"a": 2})
    assert NestedNamespace({"a": {"b": 3}}).a.b == 3
    with temp_env_var("VERL_TEST_NAME", "1"):
        assert os.environ["VERL_TEST_NAME"] == "1"
    assert "VERL_TEST_NAME" not in os.environ
    plain = convert_to_regular_types(OmegaConf.create({"a": [1, {"b": 2}]}))
    assert plain == {"a": [1, {"b": 2}]} and type(plain["a"]) is list
    assert ray_noset_visible_devices({"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"})
    assert not ray_noset_visible_devices({})


def test_groups_are_numbered_and_their_moments_computed() -> None:
    assert as_torch_index([2, 2, 5, 7, 5, 2]).tolist() == [0, 0, 1, 2, 1, 0]
    assert as_torch_index(np.array(["b", "a", "b"], dtype=object)).tolist() == [0, 1, 0]
    assert as_torch_index(torch.tensor([1.0000001, 2.0, 1.0])).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="one group per row"):
        as_torch_index(np.zeros((2, 2)))
    mean, std, count = group_mean_std(torch.tensor([1.0, 3.0, 7.0]), torch.tensor([0, 0, 1]))
    assert mean.tolist() == [2.0, 0.0] and count.tolist() == [2.0, 1.0]
    torch.testing.assert_close(std, torch.tensor([2.0**0.5, 1.0]))


@dataclasses.dataclass
class Inner(BaseConfig):
    size: int = 1


@dataclasses.dataclass
class Outer(BaseConfig):
    _mutable_fields: ClassVar[set[str]] = {"name"}
    name: str = "x"
    inner: Inner = dataclasses.field(default_factory=Inner)


def test_a_config_is_a_frozen_mapping() -> None:
    config = Outer(name="y")
    assert config["name"] == "y" and config.get("no", 3) == 3 and set(config) == {"_target_", "name", "inner"}
    config.name = "z"
    with pytest.raises(dataclasses.FrozenInstanceError, match="'inner'"):
        config.inner = Inner()
    with pytest.raises(KeyError):
        config["no"]


def test_yaml_becomes_the_dataclass_it_names() -> None:
    given = {"name": "a", "inner": {"size": 4}}
    typed = omega_conf_to_dataclass(OmegaConf.create(given), Outer)
    assert isinstance(typed, Outer) and typed.inner == Inner(size=4)
    module = f"{__name__}."
    named = {"_target_": f"{module}Outer", "name": "a", "inner": {"_target_": f"{module}Inner", "size": 5}}
    found = omega_conf_to_dataclass(OmegaConf.create(named))
    assert type(found).__name__ == "Outer" and found.inner.size == 5
    assert omega_conf_to_dataclass({}, Outer) == Outer()
    with pytest.raises(ValueError, match="needs a dataclass_type"):
        omega_conf_to_dataclass({"name": "a"})
    with pytest.raises(ValueError, match="must be a dataclass"):
        omega_conf_to_dataclass({"name": "a"}, dict)
    values = {"name": "q", "other": 1}
    update_dict_with_config(values, OmegaConf.create({"name": "w"}))
    assert values == {"name": "w", "other": 1}


def test_a_critic_is_refused_by_the_check_of_a_config() -> None:
    with pytest.raises(ValueError, match="there is no critic"):
        validate_config(PPOTrainerConfig(), use_reference_policy=True, use_critic=True)


def test_roles_and_what_a_run_needs() -> None:
    assert Role.from_string("ref") is Role.RefPolicy and str(Role.ActorRolloutRef) == "actor_rollout_ref"
    assert all(Role.from_string(str(role)) is role for role in Role)
    with pytest.raises(ValueError, match="No Role found for string 'judge'"):
        Role.from_string("judge")
    workers = {Role.ActorRollout: object, Role.RefPolicy: object}
    assert need_reference_policy(workers) and not need_reward_model(workers)  # type: ignore[arg-type]
    assert need_critic(OmegaConf.create({"algorithm": {"adv_estimator": "gae"}, "critic": {"enable": None}}))
    assert not need_critic(OmegaConf.create({"algorithm": {"adv_estimator": "grpo"}}))
    assert not need_critic(OmegaConf.create({"algorithm": {"adv_estimator": "gae"}, "critic": {"enable": False}}))
    pools = ResourcePoolManager({"a": [2, 2], "b": [1]}, {Role.ActorRollout: "a", Role.RewardModel: "b"})
    assert pools.get_n_gpus() == 5


def rewarded() -> DataProto:
    return DataProto.from_dict(
        {
            "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]]),
            "responses": torch.zeros(2, 2, dtype=torch.long),
            "token_level_scores": torch.tensor([[0.0, 1.0], [2.0, 0.0]]),
            "old_log_probs": torch.tensor([[-1.0, -1.0], [-1.0, -9.0]]),
            "ref_log_prob": torch.tensor([[-1.5, -1.0], [-2.0, -1.0]]),
        },
        {"uid": ["p", "p"]},
    )


def test_kl_is_taken_from_the_reward_and_steers_its_coefficient() -> None:
    data = rewarded()
    data.batch["response_mask"] = compute_response_mask(data)
    assert data.batch["response_mask"].tolist() == [[1, 1], [1, 0]]
    control = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.5, horizon=10)
    data, metrics = apply_kl_penalty(data, kl_ctrl=control)
    expected = torch.tensor([[-0.05, 1.0], [1.9, 0.0]])  # the KL is 0.5, 0 and 1; a padded token has none
    torch.testing.assert_close(data.batch["token_level_rewards"], expected)
    assert metrics == {"actor/reward_kl_penalty": 0.625, "actor/reward_kl_penalty_coeff": 0.1}
    assert control.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))  # 0.625 / 0.5 - 1, clipped to 0.2; two rows


def test_advantages_of_groups_and_of_values() -> None:
    data = rewarded()
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    dr_grpo = compute_advantage(data, "grpo", norm_adv_by_std_in_grpo=False)
    assert dr_grpo.batch["advantages"].tolist() == [[-0.5, -0.5], [0.5, 0.0]]  # sums 1 and 2, mean 1.5
    data.batch["values"] = torch.tensor([[0.5, 0.25], [1.0, 0.0]])
    gae = compute_advantage(data, "gae", gamma=1.0, lam=0.0)  # returns are r + V of the next token
    assert gae.batch["returns"].tolist()[0] == [0.25, 1.0] and gae.batch["returns"][1, 0] == 2.0


def test_the_device_of_this_machine() -> None:
    name = device.get_device_name()
    assert device.get_torch_device() is getattr(torch, name)
    assert device.is_cuda_available == torch.cuda.is_available()
    if name == "cpu":
        assert (device.get_nccl_backend(), device.get_device_id()) == ("gloo", 0)
        assert not device.is_npu_available and device.get_visible_devices_keyword() == "CUDA_VISIBLE_DEVICES"
    aggressive_empty_cache()
    assert "TOKENIZERS_PARALLELISM" in PPO_RAY_RUNTIME_ENV["env_vars"]
    with temp_env_var("NCCL_DEBUG", "INFO"):
        assert "NCCL_DEBUG" not in get_ppo_ray_runtime_env()["env_vars"]


def test_a_deprecated_function_names_its_successor() -> None:
    @deprecated("pack.new")
    def old() -> int:
        return 3

    with pytest.warns(FutureWarning, match=r"old is deprecated; use pack\.new instead"):
        assert old() == 3


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("verl.single_controller.base", "Critic"),
        ("verl.utils.import_utils", "is_sglang_available"),
        ("verl.trainer.ppo.ray_trainer", "FSDPWorker"),
    ],
)
def test_names_of_what_is_not_here_do_not_exist(module: str, name: str) -> None:
    with pytest.raises(ImportError):
        exec(f"from {module} import {name}")
