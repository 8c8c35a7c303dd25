"""A policy update over two devices with native ops: context parallelism, all losses, replay equal one CPU process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.parallel_layout import ParallelLayout
from mindspeed.ops import train_ops
from tests.parallel.launcher import run_ranks
from tests.verl.updates import Update, Updated, update, updates
from verl.trainer.config.algorithm import RolloutCorrectionSection
from verl.workers.config import RouterReplayConfig
from verl.workers.config.actor import PolicyLossConfig

CASE = Update(
    model={
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.01,
        "mtp_loss_scaling_factor": 0.3,
    },
    actor={"router_replay": RouterReplayConfig("R2"), "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 100},
    num_rows=8,
    num_mtp=1,
    gate_noise=0.2,
)
GSPO = replace(
    CASE,
    actor=CASE.actor | {"policy_loss": PolicyLossConfig("gspo"), "loss_agg_mode": "seq-mean-token-mean"},
    correction=RolloutCorrectionSection("sequence", 1.1, "geometric", 1.03, rollout_is_batch_normalize=True),
)


def _on_devices(case: Update) -> Updated | None:
    return update(case, "npu", train_ops())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", [CASE, GSPO], ids=["ppo", "gspo, corrected"])
def test_an_update_over_two_devices_equals_one_cpu_process(case: Update) -> None:
    expected = run_ranks(updates, 1, {"cpu": case})[0]["cpu"]
    layout = ParallelLayout(world_size=2, context_parallel_size=2, expert_model_parallel_size=2)
    ours = run_ranks(_on_devices, 2, replace(case, layout=layout), device="npu")[0]
    torch.testing.assert_close(ours.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)
    for name, value in expected.metrics.items():
        assert ours.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for name, gradient in expected.gradients.items():
        assert float((ours.gradients[name] - gradient).norm() / gradient.norm()) < 1e-3, name
    for layer, bias in expected.biases.items():
        assert torch.equal(ours.biases[layer], bias), layer
