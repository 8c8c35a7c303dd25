"""An estimator and a loss from a user's own file train the tiny model, in the controller and in every worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray

from tests.system.command import read_metrics
from tests.system.in_process import in_process_config
from tests.system.jobs import Prepared
from tests.verl.bandit import run_trainer
from verl.trainer.main_ppo import worker_classes
from verl.trainer.ppo.algos import ESTIMATORS
from verl.trainer.ppo.policy_losses import LOSSES

pytestmark = pytest.mark.timeout(600)

MODULE = """
import os
from pathlib import Path

from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn, register_adv_est, register_policy_loss


def note(what):
    Path(__file__).with_name(f"{{what}}-{{os.getpid()}}").touch()


@register_adv_est("mine_{name}")
def estimate(token_level_rewards, response_mask, index, **_unused):
    note("estimator")
    return get_adv_estimator_fn("grpo")(token_level_rewards, response_mask, index)


@register_policy_loss("mine_{name}")
def loss(old_log_prob, log_prob, advantages, config, sequence_mean):
    note("loss")
    return get_policy_loss_fn("vanilla")(old_log_prob, log_prob, 2 * advantages, config, sequence_mean)
"""


def test_a_users_estimator_and_loss_train(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (ESTIMATORS, LOSSES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    module = tmp_path / "mine.py"
    module.write_text(MODULE.format(name="system"))
    given = (
        f"actor_rollout_ref.model.external_lib={module}",
        "algorithm.adv_estimator=mine_system",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mine_system",
        "trainer.val_before_train=False",
        "trainer.test_last=False",
        "trainer.export_hf=False",
    )
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        config = in_process_config(prepared, tmp_path / "run", 2, 1, *given)
        run_trainer(config, *worker_classes(config))
    finally:
        ray.shutdown()
    assert [path.name for path in tmp_path.glob("estimator-*")] == [f"estimator-{os.getpid()}"]
    workers = {path.name for path in tmp_path.glob("loss-*")}
    assert len(workers) == 2 and f"loss-{os.getpid()}" not in workers
    [row] = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert row["actor/grad_norm"] > 0
