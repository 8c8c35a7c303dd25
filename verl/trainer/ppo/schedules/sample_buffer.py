"""The sample buffer: prompts in flight and their finished samples, until a step trains on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from verl.protocol import DataProto
from verl.row_refs import BATCH
from verl.trainer.ppo.schedules.generation import add_num_tokens, request_keys
from verl.workers.rollout.rollout_messages import PROMPT, SAMPLE


@dataclass(frozen=True)
class FinishedSample:
    """One row of a result.

    Attributes:
        rows: the result's rows.
        row: the index of this one.
        replica: the replica that stores the row's remote columns.
        stored_batch: the number of the generated batch that they are part of.
    """

    rows: DataProto
    row: int
    replica: int
    stored_batch: int


@dataclass
class InFlightPrompt:
    """A prompt that has been started and not been trained on.

    Attributes:
        replica: the replica that generates its samples.
        rows: its n rows as they were sent.
        finished: sample number -> the finished sample.
    """

    replica: int
    rows: DataProto
    finished: dict[int, FinishedSample] = field(default_factory=dict)

    @property
    def num_unfinished(self) -> int:
        return len(self.rows) - len(self.finished)


class Ledger(Protocol):
    """Which prompts may be started, and which finished ones a step takes (``StalenessLedger``, ``StepLedger``)."""

    prompts_per_step: int

    @property
    def num_allowed(self) -> int: ...

    def start(self, count: int) -> list[int]: ...

    def choice(self, finished: Sequence[int]) -> list[int] | None: ...

    def take(self, chosen: Sequence[int]) -> list[int]: ...

    def drop(self, numbers: Sequence[int]) -> None: ...

    def overdue(self, numbers: Sequence[int]) -> list[int]: ...


class SampleBuffer:
    """Starts prompts as a ledger allows, and holds their samples until a step takes them.

    Args:
        rows_of: number of a prompt -> its n rows.
        max_num_seqs: samples that a replica runs at once.

    Attributes:
        prompts: the prompts in flight by number.
        drops_unfinished: a weight sync that has the next step's prompts drops the others.
    """

    def __init__(
        self, ledger: Ledger, rows_of: Callable[[int], DataProto], num_replicas: int, max_num_seqs: int
    ) -> None:
        self.ledger, self.num_replicas, self.drops_unfinished = ledger, num_replicas, False
        self.prompts: dict[int, InFlightPrompt] = {}
        self._rows_of, self._max_num_seqs = rows_of, max_num_seqs
        self._in_training: list[FinishedSample] = []

    @property
    def finished(self) -> list[int]:
        """Numbers of the prompts whose samples have all finished."""
        return [number for number, prompt in self.prompts.items() if not prompt.num_unfinished]

    @property
    def has_unfinished(self) -> bool:
        return any(prompt.num_unfinished for prompt in self.prompts.values())

    @property
    def is_next_step_ready(self) -> bool:
        return self.choice() is not None

    @property
    def is_settled(self) -> bool:
        """Whether ``settle`` would not wait."""
        return True

    @property
    def can_go_on(self) -> bool:
        """Whether more prompts can be finished without a weight sync or a step."""
        return self.has_unfinished or self.ledger.num_allowed > 0

    def settle(self) -> bool:
        """Decides about groups that had ended before the last call; whether there were any."""
        return False

    def drop_unneeded(self) -> bool:
        """Drops what the next steps need not wait for; whether the engines must abort samples."""
        return False

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the prompts in flight and their samples."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores ``state`` when the samples of the checkpoint have been added."""

    def choice(self) -> list[int] | None:
        """Numbers of the prompts that the next step trains on; None when it must wait for more."""
        return self.ledger.choice(self.finished)

    def start_prompts(self) -> list[DataProto]:
        """Starts the prompts that are allowed and that a replica has room for; returns the new rows of each replica.

        Each goes to the replica with the fewest unfinished samples. None is started while a step's prompts are finished
        and wait, because a prompt that is started later is trained on at a lower age.
        """
        new: list[list[DataProto]] = [[DataProto()] for _ in range(self.num_replicas)]
        load = [0] * self.num_replicas
        for prompt in self.prompts.values():
            load[prompt.replica] += prompt.num_unfinished
        is_behind = len(self.finished) < self.ledger.prompts_per_step
        while is_behind and self.ledger.num_allowed and min(load) < self._max_num_seqs:
            (number,) = self.ledger.start(1)
            replica = load.index(min(load))
            rows = self.restart(number, replica).rows
            load[replica] += len(rows)
            new[replica].append(rows.select(non_tensor_batch_keys=[*request_keys(rows), PROMPT, SAMPLE]))
        return [DataProto.concat(parts) for parts in new]

    def restart(self, number: int, replica: int) -> InFlightPrompt:
        """Puts a prompt that the ledger has started in flight on ``replica``."""
        self.prompts[number] = InFlightPrompt(replica, self._rows_of(number))
        return self.prompts[number]

    def note(self, num_tokens: Mapping[tuple[int, int], int]) -> None:
        """Learns ``RolloutResult.num_tokens``."""

    def add(self, replica: int, rows: DataProto) -> None:
        if rows.row_refs is None:
            return
        stored_batch = int(next(iter(rows.row_refs.columns.values()))[0, BATCH])
        for row in range(len(rows)):
            number, sample = int(rows.non_tensor_batch[PROMPT][row]), int(rows.non_tensor_batch[SAMPLE][row])
            finished = self.prompts[number].finished
            assert sample not in finished, f"sample {sample} of prompt {number} came twice"
            finished[sample] = FinishedSample(rows, row, replica, stored_batch)

    @staticmethod
    def numbers_in(rows: DataProto) -> list[int]:
        """The numbers of the prompts that ``rows`` have samples of, in ascending order."""
        return sorted({int(number) for number in rows.non_tensor_batch.get(PROMPT, ())})

    def first_needed_batch(self, replica: int) -> int:
        """The lowest number of a generated batch of ``replica`` with rows that are, or will be, trained on."""
        waiting = [sample for prompt in self.prompts.values() for sample in prompt.finished.values()]
        needed = [sample.stored_batch for sample in [*waiting, *self._in_training] if sample.replica == replica]
        return min(needed, default=sys.maxsize)

    def take(self, chosen: list[int]) -> DataProto:
        """The rows of the chosen prompts, which leave the buffer and may be fetched until ``release``."""
        self.ledger.take(chosen)
        prompts = [self.prompts.pop(number) for number in chosen]
        self.hold(prompts)
        return self.gather(prompts)

    def hold(self, prompts: Sequence[InFlightPrompt]) -> None:
        """The rows of these prompts stay where they are until ``release``."""
        self._in_training = [sample for prompt in prompts for sample in prompt.finished.values()]

    @staticmethod
    def gather(prompts: Sequence[InFlightPrompt]) -> DataProto:
        """All rows of finished prompts, with the columns of the prompt and of the result."""
        sent = DataProto.concat([prompt.rows for prompt in prompts])
        results = gather_rows([prompt.finished[sample] for prompt in prompts for sample in range(len(prompt.rows))])
        add_num_tokens(results, sent.non_tensor_batch["raw_prompt_ids"])
        sent.pop(non_tensor_batch_keys=request_keys(sent))
        return sent.union(results)

    def release(self) -> None:
        """The step has been trained: the rows of the last ``take`` are no longer needed."""
        self._in_training = []


def gather_rows(samples: Sequence[FinishedSample]) -> DataProto:
    results = {id(sample.rows): sample.rows for sample in samples}
    starts = dict(zip(results, np.cumsum([0, *map(len, results.values())]).tolist(), strict=False))
    rows = [starts[id(sample.rows)] + sample.row for sample in samples]
    return DataProto.concat(list(results.values())).select_idxs(rows)
