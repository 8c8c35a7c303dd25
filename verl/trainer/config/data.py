"""Knobs of the prompt data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DataConfig:
    """Parquet files of prompts (one path or a list); lengths are tokens, batch sizes prompts.

    gen_batch_size: prompts of each generation under ``algorithm.filter_groups``; absent = train_batch_size.
    """

    train_files: Any = "~/data/rlhf/train.parquet"
    val_files: Any = "~/data/rlhf/test.parquet"
    prompt_key: str = "prompt"
    max_prompt_length: int = 512
    max_response_length: int = 512
    train_batch_size: int = 1024
    gen_batch_size: int | None = None
    val_batch_size: int | None = None
    train_max_samples: int = -1
    val_max_samples: int = -1
    shuffle: bool = True
    seed: int | None = None
    filter_overlong_prompts: bool = False
    truncation: str = "error"

    def problems(self, where: str) -> list[str]:
        """Every value that cannot work, one sentence each."""
        found = []
        if self.truncation != "error":
            found.append(
                f"{where}.truncation is {self.truncation!r}; only 'error' is supported "
                f"({where}.filter_overlong_prompts=True drops long prompts)"
            )
        sizes = ("max_prompt_length", "max_response_length", "train_batch_size", "gen_batch_size", "val_batch_size")
        for key in sizes:
            size = getattr(self, key)
            if size is not None and size < 1:
                found.append(f"{where}.{key} is {size}; it must be at least 1")
        for key in ("train_max_samples", "val_max_samples"):
            limit = getattr(self, key)
            if limit != -1 and limit < 1:
                found.append(f"{where}.{key} is {limit}; give a number of rows, or -1 for all")
        return found


def file_list(files: Any) -> list[str]:
    """One path or a list of them, as a list."""
    return [files] if isinstance(files, str) else [str(path) for path in files]
