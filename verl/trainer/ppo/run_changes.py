"""What a run learns from, kept with each checkpoint; a run that resumes with something else says so.

``changes.jsonl`` has a line per resume that changed anything: ``step`` is the first step with the new settings, and
``changes`` is a list of ``key``, ``was`` and ``now``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_formats.cores import THREADS
from hf_formats.files import write_text
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.data import file_list

logger = logging.getLogger(__name__)

RECORD = "changes.jsonl"
_READ_BYTES = 64 << 20  # a larger file is known by its size and its beginning
_OPEN = ("custom_reward_function", "reward_model.reward_kwargs")  # sections whose keys a user makes
_ACTOR_KEYS = (
    "ppo_mini_batch_size",
    "ppo_epochs",
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "policy_loss",
    "loss_agg_mode",
    "entropy_coeff",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
)


def learning_settings(config: PPOTrainerConfig) -> dict[str, Any]:
    """The reward, the data and the algorithm by their keys, as JSON values; files by name and digest of their bytes."""
    reward, functions = config.reward_model, config.custom_reward_function
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    named = {"": functions.default} | {f".by_data_source.{source}": spec for source, spec in functions.sources.items()}
    found: dict[str, Any] = {
        f"custom_reward_function{source}": None if spec is None else [_file(spec.path), spec.name, spec.kwargs]
        for source, spec in named.items()
    }
    found |= {
        "reward_model.reward_manager": reward.reward_manager,
        "reward_model.manager_path": (spec := reward.manager_spec) and [_file(spec.path), spec.name],
        "reward_model.reward_kwargs": reward.reward_kwargs,
        "reward_model.overlong_buffer": asdict(reward.overlong_buffer),
        "data.train_files": [_file(path) for path in file_list(config.data.train_files)],
        "actor_rollout_ref.rollout.n": rollout.n,
        "actor_rollout_ref.rollout.temperature": rollout.temperature,
    }
    settings = asdict(actor)
    found |= {f"actor_rollout_ref.actor.{key}": settings[key] for key in _ACTOR_KEYS}
    found["algorithm"] = asdict(config.algorithm)
    values: dict[str, Any] = json.loads(json.dumps(_flat(found), default=str))  # as a checkpoint gives them back
    return values


def record_changes(report_dir: str, step: int, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Writes down what differs between a checkpoint's settings and this run's, which goes on after ``step``.

    Lines of steps that will be run again are removed. A key that the checkpoint has not is one of a newer version and
    no change, but for the keys that a user makes. Another number of threads rounds sums in another order.
    """
    path = Path(report_dir).expanduser() / RECORD
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    changes = [
        {"key": key, "was": was.get(key), "now": now.get(key)}
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key) and (key in was or key.startswith(_OPEN))
    ]
    if changes and was:
        listed = {change["key"]: f"{change['key']} was {change['was']}, is {change['now']}" for change in changes}
        if threads := listed.pop(THREADS, None):
            threads += f"; set {THREADS}={was[THREADS]} to keep them"
            logger.warning("from step %d on the last bits differ from those of one run: %s", step + 1, threads)
        if listed:
            text = "; ".join(listed.values())
            logger.warning("from step %d on this run learns from something else: %s", step + 1, text)
        kept.append(json.dumps({"step": step + 1, "changes": changes}))
    if kept != lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(line + "\n" for line in kept))


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _file(path: str) -> str:
    """The name of a file, with the first digits of a digest where it can be read here."""
    file = Path(path).expanduser()
    if not file.is_file():
        return file.name
    digest = hashlib.sha256(str(file.stat().st_size).encode())
    with file.open("rb") as opened:
        digest.update(opened.read(_READ_BYTES))
    return f"{file.name} ({digest.hexdigest()[:12]})"
