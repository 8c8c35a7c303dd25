"""Validation: responses to the problems of every evaluation set, their scores, and transcripts of some."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_formats.files import write_text
from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.metric_utils import compute_set_metrics, compute_validation_metrics, marked_timer
from verl.trainer.ppo.reward_ledger import RewardLedger
from verl.trainer.ppo.reward_process import RegisteredRewardManager
from verl.trainer.ppo.schedules.generation import add_seeds, sampling_seeds
from verl.trainer.ppo.ungraded import UngradedLimit
from verl.utils.dataset import PromptItems, collate_fn
from verl.utils.masks import response_lengths
from verl.workers.reward_manager import PooledRewardManager, Scores

_STREAM = -1  # sampling stream of validation: the same noise at every step, so that scores compare


@dataclass(frozen=True)
class Validator:
    """Validates the policy on all evaluation sets.

    Attributes:
        datasets: name of the set ("" for a set without a name) -> its problems.
        generate: (step, prompts, is_greedy) -> responses by the weights after that step.
        show: gets the transcripts, each (prompt, response, score), and the step.
    """

    config: PPOTrainerConfig
    datasets: Mapping[str, PromptItems]
    generate: Callable[[int, DataProto, bool], DataProto]
    reward_fn: PooledRewardManager | RegisteredRewardManager
    ledger: RewardLedger
    ungraded_limit: UngradedLimit
    show: Callable[[Sequence[Sequence[Any]], int], None]

    def run(self, step: int, timing: dict[str, float]) -> dict[str, float]:
        """Mean scores over the problems of all sets and of each set that has a name.

        Greedy answers beside sampled ones are sets of their own, which the scores of all sets leave out.
        Transcripts are written to ``val_generations/step_N.jsonl``.
        """
        n = self.config.actor_rollout_ref.rollout.val_kwargs.n
        outputs, pending, passes = [], [], self._passes()
        with marked_timer("testing", timing):
            for name, dataset, is_greedy in passes:
                for batch in self._batches(step, dataset, n, is_greedy):
                    batch.non_tensor_batch["val_set"] = np.array([name] * len(batch), dtype=object)
                    outputs.append(batch)
                    pending.append(self.reward_fn.start(batch, is_validation=True))
            scores = [item.result() for item in pending]
        samples = [sample for item in scores for sample in item.samples]
        self.ledger.write_validation(step, samples)
        self.ungraded_limit.check(samples, "a validation")
        parts = _joined_parts(scores)
        self._write_transcripts(step, outputs, [text for item in scores for text in item.responses], parts)
        sources, sets = (
            np.concatenate([batch.non_tensor_batch[key] for batch in outputs]) for key in ("data_source", "val_set")
        )
        lengths = torch.cat([response_lengths(batch.batch["response_mask"]) for batch in outputs])
        own = ~np.isin(sets, [name for name, _, is_greedy in passes if is_greedy])
        own_parts = {name: values[own] for name, values in parts.items()}
        metrics = compute_validation_metrics(sources[own], own_parts, lengths[torch.from_numpy(own)], n)
        metrics |= compute_set_metrics(sets, parts, lengths)
        return metrics | {"timing_s/testing": timing["testing"]}

    def _passes(self) -> list[tuple[str, PromptItems, bool]]:
        """(name of the set, its problems, whether the likeliest tokens answer them) in order."""
        passes = [(name, dataset, False) for name, dataset in self.datasets.items()]
        if self.config.actor_rollout_ref.rollout.val_kwargs.also_greedy:
            passes += [(f"{name}_greedy" if name else "greedy", dataset, True) for name, dataset, _ in passes]
        return passes

    def _batches(self, step: int, dataset: PromptItems, n: int, is_greedy: bool) -> Iterator[DataProto]:
        """Every problem of a set with n responses or a greedy one; a set's noise does not depend on the other sets."""
        n = 1 if is_greedy else n
        seed, size = self.config.actor_rollout_ref.rollout.seed, self.config.data.val_batch_size or len(dataset)
        for first in range(0, len(dataset), size):
            rows = range(first, min(first + size, len(dataset)))
            prompts = DataProto.from_single_dict(collate_fn([dataset[i] for i in rows])).repeat(n, interleave=True)
            add_seeds(prompts, n, sampling_seeds(seed, _STREAM, first * n, len(prompts)))
            yield prompts.union(self.generate(step, prompts, is_greedy))

    def _write_transcripts(
        self, step: int, outputs: list[DataProto], responses: list[str], parts: dict[str, np.ndarray]
    ) -> None:
        limit = self.config.trainer.log_val_generations
        if not limit:
            return
        prompts = [text for batch in outputs for text in batch.non_tensor_batch["prompt_text"]]
        truths = [str(m["ground_truth"]) for batch in outputs for m in batch.non_tensor_batch["reward_model"]]
        sets = [name for batch in outputs for name in batch.non_tensor_batch["val_set"]]
        lines, rows = [], _first_of_each(sets, limit)
        for row in rows:
            record = {
                "step": step,
                **({"set": sets[row]} if sets[row] else {}),
                "prompt": prompts[row],
                "response": responses[row],
                "ground_truth": truths[row],
                **{name: float(values[row]) for name, values in parts.items() if not np.isnan(values[row])},
            }
            lines.append(json.dumps(record, ensure_ascii=False))
        directory = Path(self.config.trainer.report_dir) / "val_generations"
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / f"step_{step}.jsonl", "\n".join(lines) + "\n")
        self.show([(prompts[row], responses[row], float(parts["score"][row])) for row in rows], step)


def _first_of_each(names: list[str], limit: int) -> list[int]:
    return [
        row for name in dict.fromkeys(names) for row in [i for i, other in enumerate(names) if other == name][:limit]
    ]


def _joined_parts(scores: list[Scores]) -> dict[str, np.ndarray]:
    """Every part over all batches; NaN in a batch whose reward functions do not give it."""
    names = sorted({name for item in scores for name in item.parts})
    return {
        name: np.concatenate([item.parts.get(name, np.full(len(item.samples), np.nan)) for item in scores])
        for name in names
    }
