"""The whole job of recipes/r1_dynamic_sampling, small: sets by name, two updates, two FP8 engines, a user's own files.

The filter comes from a file, the advantage estimator and the loss from another one, which the controller and every
worker import.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pages import undocumented
from tests.system.command import read_metrics
from tests.system.in_process import run_stages_here
from tests.system.jobs import prepare_r1_dynamic_sampling
from verl.trainer.config.override_text import override
from verl.trainer.ppo.algos import ESTIMATORS
from verl.trainer.ppo.policy_losses import LOSSES

STEPS = 2
LIBRARY = """
import os
from pathlib import Path

from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn, register_adv_est, register_policy_loss
from verl.trainer.config.override_text import override


def note(what):
    Path(__file__).with_name(f"{what}-{os.getpid()}").touch()


@register_adv_est("mine")
def estimate(token_level_rewards, response_mask, index, **_unused):
    note("estimator")
    return get_adv_estimator_fn("grpo")(token_level_rewards, response_mask, index)


@register_policy_loss("mine")
def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    note("loss")
    vanilla = get_policy_loss_fn("vanilla")
    return vanilla(old_log_prob, log_prob, 2 * advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
"""


def test_from_json_lines_to_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (ESTIMATORS, LOSSES):
        monkeypatch.setattr(registry, "entries", dict(registry.entries))  # the user's own names end with this test
    library = tmp_path / "mine.py"
    library.write_text(LIBRARY)
    overrides = (
        override("actor_rollout_ref.model.external_lib", library),
        "algorithm.adv_estimator=mine",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mine",
    )
    run = tmp_path / "run"
    run_stages_here(prepare_r1_dynamic_sampling(tmp_path), run, STEPS, *overrides)
    steps = read_metrics(run)
    assert undocumented(name for step in steps for name in step) == []
    assert [step["step"] for step in steps] == [*range(STEPS + 1)]
    for step in steps[1:]:
        assert step["train/num_gen_batches"] == 1 and step["train/aborted_groups"] > 0
        assert step["actor/grad_norm"] >= 0
    assert any(step["actor/grad_norm"] > 0 for step in steps[1:])
    assert {"val/score", "val/sums/score", "val/comparisons/response_length"} <= steps[0].keys()
    assert (run / "report.html").is_file()
    assert [path.name for path in tmp_path.glob("estimator-*")] == [f"estimator-{os.getpid()}"], "the controller"
    workers = {path.name.removeprefix("loss-") for path in tmp_path.glob("loss-*")}
    assert len(workers) == 2 and str(os.getpid()) not in workers
