"""Names that a user's module registers are names of the config, in a process that has only the config too."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from tests.parallel.launcher import run_ranks
from verl.trainer.config import load_config, validate_config
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.import_utils import import_external_libs, load_extern_type
from verl.workers.megatron_workers import ActorRolloutRefWorker

pytestmark = pytest.mark.usefixtures("registries_as_before")
LIBRARY = "actor_rollout_ref.model.external_lib"
NAMES = (
    "algorithm.adv_estimator={0}",
    "actor_rollout_ref.actor.policy_loss.loss_mode={0}",
    "reward_model.reward_manager={0}",
)
MODULE = """
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
from verl.workers.reward_manager import register

register_adv_est("{0}")(lambda **given: given)
register_policy_loss("{0}")(lambda *given: given)


@register("{0}")
class Manager:
    pass
"""


def _problems(*overrides: str) -> list[str]:
    keys = [f"{LIBRARY}=", "algorithm.adv_estimator", "loss_mode", "reward_manager", LIBRARY]
    return [problem for problem in validate_config(load_config(overrides)) if any(key in problem for key in keys)]


@pytest.fixture
def module(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MODULE.format(request.node.name))
    return path


def test_names_of_a_users_file_are_accepted(module: Path, request: pytest.FixtureRequest) -> None:
    names = [name.format(request.node.name) for name in NAMES]
    problems = _problems(*names)
    assert len(problems) == 3 and "adv_estimator is 'test_names_of_a" in problems[0]
    assert all("expected one of " in problem and "external_lib registers" in problem for problem in problems)
    assert _problems(*names, f"{LIBRARY}={module}") == _problems(*names, f"{LIBRARY}=[{module}]") == []


def test_a_module_by_name_in_a_worker(module: Path, request: pytest.FixtureRequest) -> None:
    """As Ray hands the config to a worker: pickled, to a process that has seen nothing else."""
    name = request.node.name
    config = load_config([f"{LIBRARY}=mine", *(key.format(name) for key in NAMES)])
    (module.parent / "config").write_bytes(pickle.dumps(config))
    assert run_ranks(_module_of_the_loss, 1, str(module.parent)) == ["mine"]


def _module_of_the_loss(folder: str) -> str:
    """As a worker finds it."""
    assert "mine" not in sys.modules
    sys.path.append(folder)
    config = pickle.loads((Path(folder) / "config").read_bytes())
    ActorRolloutRefWorker(config, "actor_rollout_ref")
    return get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode).__module__


def test_a_relative_file_is_the_same_in_every_folder(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(module.parent)
    assert load_config([f"{LIBRARY}=mine.py"]).actor_rollout_ref.model.external_lib == str(module)
    assert load_config([f"{LIBRARY}=[mine.py,json]"]).actor_rollout_ref.model.external_lib == [str(module), "json"]


def test_a_file_runs_once_however_it_is_named(module: Path) -> None:
    import_external_libs(str(module))
    import_external_libs([str(module), str(module)])
    first = load_extern_type(str(module), "Manager")
    assert load_extern_type(str(module), "Manager") is first


def test_what_fails_to_import_is_a_problem_of_the_config(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise NameError('oops')\n")
    assert "NameError: oops" in _problems(f"{LIBRARY}={broken}")[0]
    assert "NameError: oops" in _problems(f"{LIBRARY}={broken}")[0], "it is not taken for imported"
    assert "absent.py does not exist" in _problems(f"{LIBRARY}={tmp_path / 'absent.py'}")[0]
    assert "No module named 'no_such_module'" in _problems(f"{LIBRARY}=no_such_module")[0]
    assert "expected a module, a Python file or a list" in "\n".join(_problems(f"{LIBRARY}=3"))
