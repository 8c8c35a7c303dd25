"""The identity of a training (seed, data, base model): results of another one in OUTPUT_DIR are archived."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from recipes.common.atomic_files import write_text_atomically
from recipes.common.data_scripts import digest_of
from recipes.common.launcher.run_logs import next_folder

RUN_FILE = "run.json"
EARLIER = "earlier_runs"
OUTPUTS = (
    "checkpoints metrics.jsonl restarts.jsonl tensorboard val_generations reward_ledger samples rollouts samples.html "
    "timeline export_hf trained_hf report.html rewards.png response_len.png val_score.png"
)


def training_identity(seed: int, train_files: Iterable[Path], model_dir: Path) -> str:
    """A digest of what a training starts from; paths and settings that may change on a resume do not count.

    Only the sizes of the weights are read (hundreds of GB); a model that the recipe made itself has a stamp of its
    sources.
    """
    shards = {path.name: path.stat().st_size for path in sorted(model_dir.glob("*.safetensors"))}
    made_from = model_dir.parent / "base_model_fp8" / ".stamp.json"
    described = [path for path in (model_dir / "config.json", made_from) if path.is_file()]
    return digest_of({"seed": seed, "shards": shards}, [*train_files, *described])


def archive_other_training(output_dir: Path, identity: str) -> Path | None:
    """Move the results of another training into ``earlier_runs/N`` and note this one; None when nothing was moved."""
    run_file = output_dir / RUN_FILE
    known = json.loads(run_file.read_text(encoding="utf-8"))["identity"] if run_file.is_file() else identity
    present = [output_dir / name for name in OUTPUTS.split() if (output_dir / name).exists()]
    target = None
    if known != identity and present:
        target = next_folder(output_dir / EARLIER)
        for path in present:
            os.replace(path, target / path.name)
    write_text_atomically(run_file, json.dumps({"identity": identity}) + "\n")
    return target
