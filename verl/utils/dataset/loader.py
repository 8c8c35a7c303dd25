"""Batches in a seeded order that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn


class ResumableLoader:
    """Endless batches; the order of an epoch depends on (seed, epoch) alone, a last incomplete batch is left out.

    The state is a few integers, so that a resumed run sees the batches an uninterrupted one would have seen.
    """

    def __init__(self, dataset: RLHFDataset, batch_size: int, *, shuffle: bool, seed: int) -> None:
        if batch_size > len(dataset):
            raise ValueError(
                f"data.train_batch_size (or gen_batch_size) is {batch_size}, but only {len(dataset)} prompts can be "
                "used; lower it"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.batch_index = 0
        self._shuffled: tuple[int, list[int]] | None = None  # an epoch and its order

    def __len__(self) -> int:
        return len(self.dataset) // self.batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            order = self._order(self.epoch)
            while self.batch_index < len(self):
                first = self.batch_index * self.batch_size
                self.batch_index += 1
                yield collate_fn([self.dataset[i] for i in order[first : first + self.batch_size]])
            self.epoch, self.batch_index = self.epoch + 1, 0

    def locate(self, number: int) -> tuple[int, int]:
        """The epoch of the prompt with this number, and its index there."""
        return divmod(number, len(self) * self.batch_size)

    def prompt(self, number: int) -> dict[str, Any]:
        """The prompt with this number, whatever has been iterated over."""
        epoch, index = self.locate(number)
        return self.dataset[self._order(epoch)[index]]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        if self._shuffled is None or self._shuffled[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._shuffled = (epoch, torch.randperm(len(self.dataset), generator=generator).tolist())
        return self._shuffled[1]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch_index": self.batch_index, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after the batch at which ``state_dict`` was taken; ValueError when the data is another."""
        for key, ours in self._identity().items():
            if state[key] != ours:
                raise ValueError(
                    f"the checkpoint's data had {key} {state[key]}, this run's has {ours}; resume with the same"
                )
        self.epoch, self.batch_index = state["epoch"], state["batch_index"]

    def _identity(self) -> dict[str, int]:
        """The settings that the meaning of ``batch_index`` depends on."""
        return {
            "num_rows": len(self.dataset),
            "batch_size": self.batch_size,
            "shuffle": int(self.shuffle),
            "seed": self.seed,
        }
