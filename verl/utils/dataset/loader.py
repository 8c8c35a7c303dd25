"""Batches in a seeded order that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from verl.utils.dataset.rl_dataset import collate_fn


class ResumableLoader:
    """Endless batches; the order of an epoch depends on (seed, epoch) alone, a last incomplete batch is left out.

    The state is a few integers, so that a resumed run sees the batches an uninterrupted one would have seen.

    Args:
        sampler: a user's order in place of this one; its state is part of the state if it has one.
    """

    def __init__(self, dataset: Any, batch_size: int, *, shuffle: bool, seed: int, sampler: Any = None) -> None:
        self.num_prompts = len(dataset) if sampler is None else _epoch_length(sampler, len(dataset))
        if batch_size > self.num_prompts:
            raise ValueError(
                f"data.train_batch_size (or gen_batch_size) is {batch_size}, but only {self.num_prompts} prompts can "
                "be used; lower it"
            )
        self.sampler = sampler
        self._draws = None if sampler is None else _Draws(sampler, self.num_prompts)
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.batch_index = 0
        self._shuffled: tuple[int, list[int]] | None = None  # an epoch and its order

    def __len__(self) -> int:
        return self.num_prompts // self.batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            while self.batch_index < len(self):
                first = self.batch_index * self.batch_size
                self.batch_index += 1
                indices = [self._index(self.epoch, place) for place in range(first, first + self.batch_size)]
                yield collate_fn([self.dataset[i] for i in indices])
            self.epoch, self.batch_index = self.epoch + 1, 0

    def locate(self, number: int) -> tuple[int, int]:
        """The epoch of the prompt with this number, and its index there."""
        return divmod(number, len(self) * self.batch_size)

    def prompt(self, number: int) -> dict[str, Any]:
        """The prompt with this number, whatever has been iterated over."""
        epoch, index = self.locate(number)
        return self.dataset[self._index(epoch, index)]

    def _index(self, epoch: int, place: int) -> int:
        return self._order(epoch)[place] if self._draws is None else self._draws.index(epoch, place)

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        if self._shuffled is None or self._shuffled[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._shuffled = (epoch, torch.randperm(len(self.dataset), generator=generator).tolist())
        return self._shuffled[1]

    def state_dict(self) -> dict[str, Any]:
        state = {"epoch": self.epoch, "batch_index": self.batch_index, **self._identity()}
        return state | ({"sampler_state": self.sampler.state_dict()} if hasattr(self.sampler, "state_dict") else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the batch at which ``state_dict`` was taken; ValueError when the data is another."""
        for key, ours in self._identity().items():
            if state.get(key) != ours:
                raise ValueError(
                    f"the checkpoint's data had {key} {state.get(key)}, this run's has {ours}; resume with the same"
                )
        self.epoch, self.batch_index = state["epoch"], state["batch_index"]
        if self._draws is not None and "sampler_state" in state:
            self.sampler.load_state_dict(state["sampler_state"])
            self._draws = _Draws(self.sampler, self.num_prompts, self.epoch, self.batch_index * self.batch_size)

    def _identity(self) -> dict[str, Any]:
        """The settings that the meaning of ``batch_index`` depends on."""
        return {
            "num_rows": len(self.dataset),
            **({} if self.sampler is None else {"sampler": type(self.sampler).__name__}),
            "batch_size": self.batch_size,
            "shuffle": int(self.shuffle),
            "seed": self.seed,
        }


class _Draws:
    """The indices that a sampler yields, drawn when they are needed, since a curriculum decides them late.

    Args:
        epoch, place: of the first index that ``iter(sampler)`` will yield.
    """

    def __init__(self, sampler: Any, length: int, epoch: int = 0, place: int = 0) -> None:
        self._sampler, self._length = sampler, length
        self._epoch, self._first = epoch, place
        self._iterator: Iterator[int] = iter(sampler)
        self._drawn: list[int] = []

    def index(self, epoch: int, place: int) -> int:
        while epoch > self._epoch:
            self._draw(self._length)
            self._epoch, self._first, self._drawn, self._iterator = self._epoch + 1, 0, [], iter(self._sampler)
        if epoch < self._epoch or place < self._first:
            raise ValueError(f"index {place} of epoch {epoch} has gone: the sampler is at epoch {self._epoch}")
        self._draw(place + 1)
        return self._drawn[place - self._first]

    def _draw(self, end: int) -> None:
        """Draws until index ``end - 1`` of the epoch is there."""
        while self._first + len(self._drawn) < end:
            try:
                self._drawn.append(int(next(self._iterator)))
            except StopIteration:
                raise ValueError(
                    f"the sampler {type(self._sampler).__name__} ended after {self._first + len(self._drawn)} of the "
                    f"{self._length} indices of epoch {self._epoch}; give it a __len__ that it keeps"
                ) from None


def _epoch_length(sampler: Any, num_rows: int) -> int:
    """``len(sampler)``; torch's Sampler has none of its own."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return num_rows
