"""Validation with sampled and with greedy answers: passes over the sets, and which of them the totals are of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.trainer.config import load_config
from verl.trainer.config.override_text import override
from verl.trainer.ppo.reward_ledger import RewardLedger
from verl.trainer.ppo.schedules.generation import validation_meta
from verl.trainer.ppo.ungraded import UngradedLimit
from verl.trainer.ppo.validation import Validator
from verl.workers.reward_manager import Scores

ROLLOUT = "actor_rollout_ref.rollout"


@dataclass
class Answers:
    """Generates the answer of the right length and scores it by whether it was greedy."""

    asked: list[tuple[int, bool]] = field(default_factory=list)

    def generate(self, step: int, prompts: DataProto, is_greedy: bool) -> DataProto:
        self.asked.append((len(prompts), is_greedy))
        mask = torch.ones(len(prompts), 4 if is_greedy else 2, dtype=torch.int64)
        return DataProto.from_dict(tensors={"response_mask": mask})

    def start(self, batch: DataProto, is_validation: bool) -> Any:
        score = float(batch.batch["response_mask"].shape[1] == 4)
        parts = {"score": np.full(len(batch), score)}
        return SimpleNamespace(result=lambda: Scores(torch.zeros(len(batch), 1), parts, []))


def validator(tmp_path: Path, *overrides: str) -> tuple[Validator, Answers]:
    config = load_config([override("trainer.report_dir", tmp_path), "trainer.log_val_generations=0", *overrides])
    rows = [{"data_source": "gsm8k", "index": i, "raw_prompt_ids": [1]} for i in range(3)]
    answers = Answers()
    ledger = RewardLedger(config.trainer.report_dir, "off")
    sets: Any = {"": rows}
    limit = UngradedLimit(config.reward_model.max_ungraded_ratio, 1)
    shown: Any = lambda rows, step: None  # noqa: E731
    return Validator(config, sets, answers.generate, answers, ledger, limit, shown), answers  # type: ignore[arg-type]


def test_greedy_answers_are_a_set_of_their_own(tmp_path: Path) -> None:
    sampled = (f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.n=2")
    plain, answers = validator(tmp_path, *sampled)
    assert plain.run(1, {})["val/score"] == 0 and answers.asked == [(6, False)]
    both, answers = validator(tmp_path, *sampled, f"{ROLLOUT}.val_kwargs.also_greedy=True")
    metrics = both.run(1, {})
    assert answers.asked == [(6, False), (3, True)]
    assert (metrics["val/score"], metrics["val/greedy/score"]) == (0, 1)
    assert (metrics["val/response_length"], metrics["val/greedy/response_length"]) == (2, 4)
    assert metrics["val-core/gsm8k/reward/mean@2"] == 0
    assert validation_meta(True) == {"validate": True, "do_sample": False}
