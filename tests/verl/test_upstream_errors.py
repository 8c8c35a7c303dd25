"""What upstream's users catch: each error is a ValueError here, and of the type that upstream's callers expect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from verl.trainer.ppo import core_algos
from verl.utils.import_utils import import_external_libs, load_extern_type
from verl.utils.partitions import get_seqlen_balanced_partitions
from verl.utils.reward_score import default_compute_score
from verl.utils.tokenizer import set_pad_token_id
from verl.utils.torch_functional import postprocess_data
from verl.utils.tracking import Tracking
from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY, get_reward_manager_cls, register

IDS = torch.arange(6)[None]
ONES = torch.ones(1, 3)

CASES: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "a KL estimate": (NotImplementedError, lambda: core_algos.kl_penalty(ONES, ONES, "full")),
    "a KL controller": (
        NotImplementedError,
        lambda: core_algos.get_kl_controller(SimpleNamespace(type="other", kl_coef=0.1)),
    ),
    "a KL controller's horizon": (
        AssertionError,
        lambda: core_algos.get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=0.1, horizon=0)),
    ),
    "an estimator": (ValueError, lambda: core_algos.get_adv_estimator_fn("absent")),
    "a loss": (ValueError, lambda: core_algos.get_policy_loss_fn("absent")),
    "an aggregation": (ValueError, lambda: core_algos.agg_loss(ONES, ONES, "absent")),
    "a prompt that is too long": (NotImplementedError, lambda: postprocess_data(IDS, IDS, 4, 0)),
    "a truncation": (AssertionError, lambda: postprocess_data(IDS, IDS, 4, 0, truncation="absent")),
    "ids without rows": (AssertionError, lambda: postprocess_data(IDS[0], IDS[0], 4, 0)),
    "more parts than rows": (AssertionError, lambda: get_seqlen_balanced_partitions([1, 2], 3, False)),
    "unequal parts": (AssertionError, lambda: get_seqlen_balanced_partitions([1, 2, 3], 2, True)),
    "a source without a function": (NotImplementedError, lambda: default_compute_score("absent", "1", "1")),
    "a tracker": (AssertionError, lambda: Tracking("project", "experiment", ["absent"], directory=".")),
    "a file": (ValueError, lambda: load_extern_type("/absent.py", "name")),
    "a module": (ValueError, lambda: load_extern_type("pkg://absent_package", "name")),
    "a name of a module": (ValueError, lambda: load_extern_type("pkg://json", "absent")),
}


@pytest.mark.parametrize("case", CASES)
def test_errors_are_of_the_type_that_upstreams_users_catch(case: str) -> None:
    expected, call = CASES[case]
    with pytest.raises(expected) as caught:
        call()
    assert isinstance(caught.value, ValueError | KeyError)


def test_errors_of_a_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Plain: ...\n")
    with pytest.raises(ValueError, match="defines no 'absent'; it defines Plain"):
        load_extern_type(str(file), "absent")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"broken\.py cannot be imported: ZeroDivisionError: division by zero"):
        import_external_libs(str(broken))


def test_registries_are_dicts() -> None:
    assert core_algos.ADV_ESTIMATOR_REGISTRY["grpo"] is core_algos.compute_grpo_outcome_advantage
    assert core_algos.POLICY_LOSS_REGISTRY["vanilla"] is core_algos.compute_policy_loss_vanilla

    class Mine: ...

    try:
        assert register("of_a_test")(Mine) is Mine
        assert get_reward_manager_cls("of_a_test") is REWARD_MANAGER_REGISTRY["of_a_test"] is Mine
        with pytest.raises(ValueError, match="registered already"):
            register("of_a_test")(type("Other", (), {}))
    finally:
        del REWARD_MANAGER_REGISTRY["of_a_test"]
    with pytest.raises(ValueError, match="Unknown reward manager: of_a_test"):
        get_reward_manager_cls("of_a_test")


def test_a_missing_pad_token_is_the_end_token_with_a_warning() -> None:
    tokenizer: Any = SimpleNamespace(pad_token_id=None, pad_token=None, eos_token_id=3, eos_token="</s>")
    with pytest.warns(UserWarning, match="it is the end token now, 3"):
        set_pad_token_id(tokenizer)
    assert (tokenizer.pad_token_id, tokenizer.pad_token) == (3, "</s>")


def test_rays_references_are_the_futures_of_a_batch() -> None:
    assert hasattr(ray.ObjectRef, "task_id")  # by which a group recognises them without importing Ray
