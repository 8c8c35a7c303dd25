"""Records of the samples of some steps with both log-probs of every token; ``python -m tools.viewer`` shows them.

A file is ``samples/step_N.jsonl``, one line per sample: ``step``, ``uid`` (of the prompt's group), ``data_source``,
``prompt``, ``ground_truth``, ``tokens`` (texts, which joined are the response), ``rollout_log_probs`` (the rollout
engine's when it sampled) and ``log_probs`` (the training engine's, before the update), both per token and null where
there is none, ``versions`` ([policy version, tokens sampled with it] in order; version v is the policy after step v),
``reward``, ``parts`` of it, ``advantage`` (mean over the tokens), ``length`` in tokens and ``finish_reason``.
Tokens that the model was given between turns have no log-probs.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import marked_timer
from verl.trainer.ppo.observers import Step, StepFiles
from verl.trainer.ppo.scores import REWARD_PARTS
from verl.utils.masks import response_lengths, row_rewards
from verl.workers.rollout.rollout_messages import TURNS, VERSIONS
from verl.workers.row_store import worker_batch
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = "samples"
ROLLOUT, TRAINING = "rollout_log_probs", "old_log_probs"  # columns of the batch
_DIGITS = 7  # decimals of a log-prob: float32 has no more


class SampleRecords(StepFiles):
    """Writes the steps that ``trainer.log_samples_freq`` divides.

    Args:
        report_dir: where the run writes.
        freq: a file every so many steps; -1 is none.
        max_rows: rows of a file at most; whole groups as far as they fit.
        workers: compute and return the log-probs that the batch does not have.
    """

    def __init__(
        self, report_dir: str, freq: int, max_rows: int, tokenizer: PreTrainedTokenizerBase, workers: Any = None
    ) -> None:
        super().__init__(Path(report_dir) / FOLDER, "step_*.jsonl")
        self._freq = freq
        self._max_rows = max_rows
        self._tokenizer = tokenizer
        self._workers = workers

    def wants(self, step: int) -> bool:
        return self._freq > 0 and step % self._freq == 0

    def chosen(self, batch: DataProto) -> DataProto:
        return batch.select_idxs(chosen_rows(batch.non_tensor_batch["uid"], self._max_rows))

    def write(self, step: int, batch: DataProto) -> None:
        """Writes the file of ``step`` with all rows of ``batch``, whose log-probs are columns where there are any."""
        lines = (json.dumps(self._record(step, batch, row)) + "\n" for row in range(len(batch)))
        self.write_file(f"step_{step}.jsonl", "".join(lines))

    def before_update(self, step: Step) -> None:
        """See ``StepObserver``; the log-probs of training are computed where the step has none."""
        if not self.wants(step.number):
            return
        with marked_timer("log_samples", step.timing):
            batch = step.batch
            if batch.row_refs is not None and TRAINING not in batch.row_refs:
                computed = self._workers.compute_log_prob(worker_batch(batch))
                batch = batch.select().union(computed)  # a new batch: the update must not see them
            rows = self.chosen(batch)
            if rows.row_refs is not None:
                fetched = self._workers.fetch_columns(worker_batch(rows), (ROLLOUT, TRAINING))
                rows.batch.update(fetched.batch)
            self.write(step.number, rows)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _record(self, step: int, batch: DataProto, row: int) -> dict[str, Any]:
        tensors, texts = batch.batch, batch.non_tensor_batch
        is_sampled_R = tensors["response_mask"][row].bool()
        length = int(response_lengths(is_sampled_R[None]))
        token_ids, is_sampled = tensors["responses"][row][:length].tolist(), is_sampled_R[:length].tolist()
        log_probs = {
            name: [
                _finite(value) if own else None
                for value, own in zip(tensors[name][row][:length].tolist(), is_sampled, strict=True)
            ]
            if name in tensors
            else None
            for name in (ROLLOUT, TRAINING)
        }
        reasons, parts = texts.get("finish_reason"), dict(texts[REWARD_PARTS][row])
        versions = texts[VERSIONS][row] if VERSIONS in texts else [[step - 1, sum(is_sampled)]]
        turns: dict[str, Any] = {}
        if TURNS in texts:
            record = texts[TURNS][row]
            versions = _over_given(versions, is_sampled)
            parts |= {"num_turns": record["num_turns"], **record["info"]}
            turns = {"turns": _turns(record), "seconds": record["seconds"]}
        return {
            "step": step,
            "uid": str(texts["uid"][row]),
            "data_source": str(texts["data_source"][row]),
            "prompt": str(texts["prompt_text"][row]),
            "ground_truth": str(texts["reward_model"][row]["ground_truth"]),
            "tokens": token_texts(self._decode, token_ids),
            "rollout_log_probs": log_probs[ROLLOUT],
            "log_probs": log_probs[TRAINING],
            "versions": versions,
            "reward": _finite(float(row_rewards(tensors["token_level_scores"][row], is_sampled_R))),
            "parts": {name: _finite(value) for name, value in parts.items()},
            "advantage": _finite(float(tensors["advantages"][row][is_sampled_R].mean())),
            "length": len(token_ids),
            "finish_reason": None if reasons is None else reasons[row],
            **turns,
        }


def _over_given(versions: list[list[int]], is_sampled: list[bool]) -> list[list[int]]:
    """Runs of versions over all tokens: what the model was given counts to what it wrote before."""
    of_sampled = [version for version, count in versions for _ in range(count)]
    places = itertools.accumulate(map(int, is_sampled))
    runs = itertools.groupby(of_sampled[max(place - 1, 0)] for place in places)
    return [[version, len(list(tokens))] for version, tokens in runs] or versions


def _turns(record: dict[str, Any]) -> list[list[float]]:
    """The turns of the model: (first token, token behind the last, its environment's reward)."""
    rewards = dict(record["rewards"])
    return [[begin, end, rewards.get(end - 1, 0.0)] for begin, end in record["spans"]]


def chosen_rows(uids: np.ndarray, max_rows: int) -> list[int]:
    """Rows of the first groups that fit into ``max_rows`` together; the first group is cut to ``max_rows``."""
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        groups.setdefault(str(uid), []).append(row)
    chosen: list[int] = []
    for uid in sorted(groups, key=lambda uid: (len(uid), uid)):  # "7-10" comes after "7-9"
        if chosen and len(chosen) + len(groups[uid]) > max_rows:
            break
        chosen += groups[uid]
    return chosen[:max_rows]


def token_texts(decode: Callable[[list[int]], str], token_ids: list[int]) -> list[str]:
    """Returns the text that each token adds; "" where a character waits for the next token's bytes."""
    growing = IncrementalDetokenizer(decode)
    pieces = [growing.append([token]) for token in token_ids]
    if pieces:
        pieces[-1] += growing.append([], is_finished=True)
    return pieces


def _finite(value: float) -> float | None:
    """Rounds the value; None for NaN and infinities, which JSON does not have."""
    return round(value, _DIGITS) if math.isfinite(value) else None
