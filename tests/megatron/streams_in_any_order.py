"""Streams that do what a real device's streams may do and this machine's CPU never does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from megatron.core.optimizer.streams import STREAMS


class AnyOrder:
    """Work runs as late and in as odd an order as its declared dependencies allow."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.queues: dict[str, list[tuple[int, Callable[[], None], Sequence[int]]]] = {stream: [] for stream in STREAMS}
        self.done: set[int] = set()
        self.num_submitted = 0

    def submit(self, stream: str, work: Callable[[], None], after: Sequence[int] = ()) -> int:
        self.num_submitted += 1
        self.queues[stream].append((self.num_submitted, work, after))
        return self.num_submitted

    def finish(self) -> None:
        while any(self.queues.values()):
            heads = [queue for queue in self.queues.values() if queue and self.done.issuperset(queue[0][2])]
            name, work, _ = self.random.choice(heads).pop(0)
            work()
            self.done.add(name)
