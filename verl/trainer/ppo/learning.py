"""The observer that names the signs of not learning: the numbers of a step, its line, its metrics, the last line."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.observers import Step, StepObserver
from verl.trainer.ppo.scores import reward_parts
from verl.trainer.ppo.signs import SIGNS, STEPS, Signs, StepNumbers, one_line
from verl.utils.masks import row_rewards

logger = logging.getLogger(__name__)

_FORMAT_PARTS = ("format", "boxed", "answered")  # the first that a reward has says whether there was an answer to judge
_COMPARES_ALL = ("gae", "reinforce_plus_plus", "remax")  # estimators for which the groups of prompts are nothing
_KLS = ("actor/kl_loss", "actor/ppo_kl", "actor/reward_kl_penalty", "rollout_corr/k3_kl")
_NUM_SHOWN, _MAX_CHARS = 3, 64


class Seen(NamedTuple):
    """A graded sample: the uid of its prompt, its reward and format score (NaN: none), and its text in short."""

    uid: str
    reward: float
    format: float
    is_cut: bool
    text: str
    truth: str


class LearningObserver(StepObserver):
    """Collects graded samples until their step ends, and judges the step.

    Args:
        decode: turns tokens into text.
        num_tokens: of the vocabulary.
    """

    def __init__(self, config: PPOTrainerConfig, decode: Callable[[list[int]], str], num_tokens: int) -> None:
        n = config.actor_rollout_ref.rollout.n
        self._compares_all = n == 1 or config.algorithm.adv_estimator in _COMPARES_ALL
        self._patience = self._look_at = STEPS * config.data.train_batch_size * n
        self._decode, self._signs, self._seen = decode, Signs(), list[Seen]()
        self._most_entropy = math.log(num_tokens)
        self._ended: list[Seen] | None = None  # the samples of the step, when no more can come
        self._step, self._has_printed = 0, False

    def before_step(self, number: int) -> None:
        self._step, self._has_printed, self._look_at = number, False, self._patience

    def after_rewards(self, step: Step) -> None:
        if self._ended is None:
            self._seen = self._seen or self._samples(step.batch)  # saved rollouts are not added
            self.end_step()

    def add(self, batch: DataProto) -> None:
        """Takes scored samples, before a filter; says so when a step finds no group to train on for very long."""
        self._seen += self._samples(batch)
        if len(self._seen) >= self._look_at:
            self._look_at *= 2
            if not self._numbers(self._seen, {}).has_gradient:
                self._print("no_gradient", self._seen)

    def end_step(self) -> None:
        """What has been added is what the step is judged by; later samples are the next step's."""
        self._ended, self._seen = self._seen, []

    def before_log(self, number: int, metrics: dict[str, float]) -> dict[str, float]:
        self._signs.add_metrics(number, metrics)
        ended, self._ended = self._ended, None
        if not ended:
            return {}
        was_solved, found = self._signs.is_solved, self._signs.take(self._numbers(ended, metrics))
        if found and self._signs.is_due(found[0]):
            self._print(found[0], ended)
        elif self._signs.is_solved and not was_solved:
            logger.info("step %d: solved: all samples have the best reward, so there is nothing left to learn", number)
        return {f"signs/{name}": 1.0 for name in found}

    def after_run(self) -> None:
        logger.info("%s", self._signs.verdict())

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, as JSON."""
        return {"signs": vars(self._signs), "seen": self._seen}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from ``state``; a checkpoint without it begins anew."""
        self._signs = Signs(**state.get("signs", {}))
        self._seen = [Seen(*values) for values in state.get("seen", ())]

    def _samples(self, batch: DataProto) -> list[Seen]:
        tensors, columns, parts = batch.batch, batch.non_tensor_batch, reward_parts(batch)
        mask, reasons = tensors["response_mask"].bool(), columns.get("finish_reason", [None] * len(batch))
        rewards = row_rewards(tensors["token_level_scores"], tensors["response_mask"]).tolist()
        formats = next((parts[name] for name in _FORMAT_PARTS if name in parts), np.full(len(batch), np.nan))
        truths = [str(of["ground_truth"])[:_MAX_CHARS] for of in columns["reward_model"]]
        texts = [self._text(row[is_response]) for row, is_response in zip(tensors["responses"], mask, strict=True)]
        are_cut = [reason == "length" for reason in reasons]
        rows = zip(map(str, columns["uid"]), rewards, formats.tolist(), are_cut, texts, truths, strict=True)
        return [Seen(*row) for row in rows]

    def _text(self, tokens: Tensor) -> str:
        """The beginning and the end of an answer."""
        first, rest = tokens[:_MAX_CHARS].tolist(), tokens[_MAX_CHARS:]
        return one_line(self._decode(first + rest[-_MAX_CHARS:].tolist()), _MAX_CHARS)

    def _numbers(self, seen: list[Seen], metrics: dict[str, float]) -> StepNumbers:
        groups = dict[str, list[float]]()
        for sample in seen:
            groups.setdefault("" if self._compares_all else sample.uid, []).append(sample.reward)
        same = max(Counter(sample.text for sample in seen).values()) / len(seen)
        return StepNumbers(
            list(groups.values()),
            max((sample.format for sample in seen if not math.isnan(sample.format)), default=math.nan),
            sum(sample.is_cut for sample in seen) / len(seen),
            same if len({sample.truth for sample in seen}) > 1 else 0.0,
            metrics.get("actor/entropy", math.nan),
            self._most_entropy,
            max((metrics[name] for name in _KLS if name in metrics), default=math.nan),
            metrics.get("training/rollout_probs_diff_mean", math.nan),
            metrics.get("schedule/staleness/max", 0.0) > 0,
            metrics.get("actor/skipped_steps", 0.0),
        )

    def _print(self, name: str, seen: list[Seen]) -> None:
        """One line, with samples of different prompts that show the sign, and their rewards; once a step."""
        if not self._has_printed:
            shown = {sample.uid: sample for sample in seen if sample.is_cut or name != "answers_cut"}
            texts = [f"'{sample.text}' ({sample.reward:.3g})" for sample in list(shown.values())[:_NUM_SHOWN]]
            line = "step %d has a sign of not learning, %s: %s. Samples: %s"
            logger.warning(line, self._step, name, SIGNS[name].advice, " | ".join(texts))
        self._has_printed = True
