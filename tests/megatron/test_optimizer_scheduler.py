"""Learning-rate schedules and the checks of optimizer hyper-parameters."""

from __future__ import annotations

import pytest

from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class _Groups:
    def __init__(self) -> None:
        self.param_groups = [{"lr": -1.0, "weight_decay": 0.1}, {"lr": -1.0, "weight_decay": 0.0}]


def _rates(num_steps: int, **schedule: float | str) -> list[float]:
    holder = _Groups()
    scheduler = OptimizerParamScheduler(holder, **schedule)  # type: ignore[arg-type]
    rates = []
    for _ in range(num_steps):
        assert holder.param_groups[0]["lr"] == holder.param_groups[1]["lr"]
        rates.append(holder.param_groups[0]["lr"])
        scheduler.step()
    return rates


def test_rates_follow_the_formula() -> None:
    assert _rates(4, max_lr=2.0) == [2.0] * 4
    assert _rates(4, max_lr=2.0, lr_warmup_steps=2) == [0.0, 1.0, 2.0, 2.0]
    linear = _rates(6, max_lr=1.0, min_lr=0.2, lr_warmup_steps=1, lr_decay_steps=5, lr_decay_style="linear")
    assert linear == pytest.approx([0.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    cosine = _rates(7, max_lr=1.0, lr_decay_steps=4, lr_decay_style="cosine")
    assert cosine == pytest.approx([1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0.0, 0.0, 0.0])


def test_position_survives_a_reload() -> None:
    schedule = {"max_lr": 1.0, "lr_decay_steps": 10, "lr_decay_style": "cosine"}
    first, second = _Groups(), _Groups()
    scheduler = OptimizerParamScheduler(first, **schedule)  # type: ignore[arg-type]
    scheduler.step(4)
    resumed = OptimizerParamScheduler(second, **schedule)  # type: ignore[arg-type]
    resumed.load_state_dict(scheduler.state_dict())
    assert first.param_groups == second.param_groups


def test_every_bad_value_is_told() -> None:
    with pytest.raises(ValueError, match=r"lr_decay_style is 'step'.*min_lr 2.0.*lr_warmup_steps is -1"):
        OptimizerParamScheduler(_Groups(), max_lr=1.0, min_lr=2.0, lr_warmup_steps=-1, lr_decay_style="step")
    with pytest.raises(ValueError, match="lr_decay_steps is None"):
        OptimizerParamScheduler(_Groups(), max_lr=1.0, lr_decay_style="linear")
    with pytest.raises(ValueError, match=r"weight_decay is -1.*adam_beta2 is 1.0.*adam_eps is 0"):
        OptimizerConfig(weight_decay=-1, adam_beta2=1.0, adam_eps=0)
