"""The schedules with rollout ranks of their own: these generate while the others train.

The rollout ranks are driven by calls of a few engine steps each, one at a time. Between two calls prompts are begun as
``StalenessLedger`` allows, and what has ended waits here until a step trains on it. Weights are synced before a step
that begins a version, between two calls: samples that have not ended go on under the new weights
(``partial_rollout``), or are waited for. While the training ranks are, ``look`` keeps the rollout ranks busy.

With ``fixed_order`` a call is only made while the next step's samples are not there. Then the calls, and all that
depends on them, follow from counts alone, however long anything takes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.protocol_storage import as_rows
from verl.row_refs import BATCH
from verl.single_controller.base import get_together
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.metric_utils import marked_timer
from verl.trainer.ppo.schedules.generation import REQUEST_KEYS, Tokens, add_num_tokens, generate, prompt_rows
from verl.trainer.ppo.schedules.staleness import StalenessLedger
from verl.trainer.ppo.seeds import sampling_seeds
from verl.utils.dataset import ResumableLoader, collate_fn
from verl.workers.rollout.orders import PROMPT, SAMPLE, VERSIONS, RolloutAnswer, RolloutOrder
from verl.workers.row_store import worker_batch
from vllm.v1.engine import request_codec

_SENT = (*REQUEST_KEYS, PROMPT, SAMPLE)
_DESCRIBED = (PROMPT, SAMPLE, VERSIONS, "finish_reason")  # columns of an ended sample that a checkpoint has as JSON
_COLUMN = "column:"  # before the name of a column in a checkpoint
_NO_WORDS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class EndedSample:
    """A row of an answer.

    Attributes:
        rows: of the answer.
        row: its place there.
        replica: that keeps what the row's references stand for.
        kept_in: number of the generated batch that they are of.
    """

    rows: DataProto
    row: int
    replica: int
    kept_in: int


@dataclass
class BegunPrompt:
    """A prompt that has been begun and not been trained on.

    Attributes:
        replica: that generates its samples.
        rows: its n rows as they were sent.
        ended: sample number -> what came back.
    """

    replica: int
    rows: DataProto
    ended: dict[int, EndedSample] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return len(self.ended) == len(self.rows)


class AsynchronousSource:
    """Samples of rollout ranks that run beside training.

    Args:
        training: the group of ranks that train, which rank in front of the others.
        rollout: the group of ranks that generate.
    """

    def __init__(
        self, config: PPOTrainerConfig, loader: ResumableLoader, tokens: Tokens, training: Any, rollout: Any
    ) -> None:
        self.config, self.loader, self.tokens = config, loader, tokens
        self.training, self.rollout, self.pace = training, rollout, config.pace
        self.replica_size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        self.num_replicas = config.rollout_replicas
        self.ledger = StalenessLedger(
            config.data.train_batch_size, self.pace.trigger_parameter_sync_step, self.pace.staleness_threshold
        )
        self.begun: dict[int, BegunPrompt] = {}
        self._in_training: list[EndedSample] = []  # what the step under way may fetch
        self._call: Any = None
        self._synced: int | None = None  # trained steps of the weights that the rollout ranks have
        self._generate_s = 0.0

    @property
    def epoch(self) -> int:
        """Of the prompts that come next."""
        return self.loader.place(self.ledger.next_prompt)[0]

    def next_batch(self, step: int, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """Samples for ``step`` and metrics of their age; the rollout ranks go on when this returns."""
        self.training.while_waiting = None
        with marked_timer("gen", timing):
            self._in_training = []
            version, place = divmod(step - 1, self.pace.trigger_parameter_sync_step)
            if place == 0 or self._synced is None:
                self._sync(step - 1, timing)
            if place == 0:
                self.ledger.begin_version(version)
            while (chosen := self.ledger.choice(self._finished())) is None:
                self._turn()
            batch, metrics = self._take(chosen)
        timing["generate_sequences"], self._generate_s = self._generate_s, 0.0
        self.training.while_waiting = self.look
        self.look()
        return batch, metrics

    def look(self) -> None:
        """Takes what a call has brought, if it is over, and makes the next one; never waits."""
        if self._call is not None and self._call.is_done():
            self._collect()
        if self._call is None and not (self.pace.fixed_order and self._is_next_step_ready()):
            self._start_call()

    def generate(self, step: int, prompts: DataProto) -> DataProto:
        """Validation's responses by the weights of now; ``step`` steps have been trained."""
        self.training.while_waiting = None
        self._sync(step, {})
        return generate(self.rollout, prompts, self.tokens, self.num_replicas, {}, validate=True)[0]

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What a checkpoint needs, as JSON and as arrays: the prompts that have been begun and all of their tokens.

        Nothing is generated from here to the next step, and what has not ended then begins with an empty cache, as it
        would in a run that goes on from the checkpoint.
        """
        self.training.while_waiting = None
        self._settle()
        unfinished: list[list[np.ndarray]] = self.rollout.take_unfinished()[:: self.replica_size]
        ended = [sample for _, prompt in sorted(self.begun.items()) for _, sample in sorted(prompt.ended.items())]
        epoch, place = self.loader.place(self.ledger.next_prompt)
        position = {"epoch": epoch, "batch_index": place // self.loader.batch_size}
        values: dict[str, Any] = {
            "loader": self.loader.state_dict() | position,
            "schedule": {
                "sizes": self._sizes(),
                "ledger": self.ledger.state(),
                "replicas": [[number, prompt.replica] for number, prompt in self.begun.items()],
                "ended": [],
            },
        }
        arrays = {"unfinished": np.concatenate([_NO_WORDS, *(words for of in unfinished for words in of)])}
        if ended:
            rows = _gathered(ended)
            described = [rows.non_tensor_batch[name].tolist() for name in _DESCRIBED]
            values["schedule"]["ended"] = list(zip(*described, strict=True))
            assert rows.row_refs is not None
            fetched = self.rollout.fetch_columns(worker_batch(rows), tuple(rows.row_refs.columns))
            arrays |= {_COLUMN + name: fetched.batch[name].numpy() for name in rows.row_refs.columns}
        return values, arrays

    def load_state(self, state: dict[str, Any], arrays: dict[str, np.ndarray], step: int) -> None:
        """Goes on where ``state`` was taken, after ``step``; with other replicas too."""
        self.loader.load_state_dict(state["loader"])
        if "schedule" not in state:  # of a synchronous run
            batches = self.loader.epoch * len(self.loader) + self.loader.batch_index
            self.ledger.next_prompt = batches * self.loader.batch_size
            self.ledger.begin_version(step // self.pace.trigger_parameter_sync_step)
            return
        schedule = state["schedule"]
        for key, ours in self._sizes().items():
            if schedule["sizes"][key] != ours:
                raise ValueError(
                    f"actor_rollout_ref.rollout.{key} is {ours} and was {schedule['sizes'][key]} when the checkpoint's "
                    "samples were begun; resume with the same"
                )
        self.ledger.load_state(schedule["ledger"])
        for number, replica in schedule["replicas"]:
            self.begun[number] = BegunPrompt(replica % self.num_replicas, self._rows_of(number))
        self._give_back(schedule["ended"], arrays)

    def _sizes(self) -> dict[str, int]:
        """What must not change for begun samples to be gone on with."""
        rollout = self.config.actor_rollout_ref.rollout
        return {"n": rollout.n, "prompt_length": rollout.prompt_length, "response_length": rollout.response_length}

    def _give_back(self, described: list[list[Any]], arrays: dict[str, np.ndarray]) -> None:
        """To every replica the samples that it had: the unfinished ones, and the rows of those that have ended."""
        unfinished: list[list[np.ndarray]] = [[] for _ in range(self.num_replicas)]
        for words in request_codec.split(arrays["unfinished"]):
            unfinished[self.begun[request_codec.home(words)[0]].replica].append(words)
        rows = _whole_rows(described, arrays, self.config.actor_rollout_ref.rollout.prompt_length)
        replica_of = [self.begun[number].replica for number, *_ in described]
        parts = [
            rows.select_idxs([row for row, of in enumerate(replica_of) if of == replica]) if described else rows
            for replica in range(self.num_replicas)
        ]
        meta_info = [self.tokens.meta_info()] * self.num_replicas
        kept = self.rollout.give_back(*(_each(values, self.replica_size) for values in (unfinished, parts, meta_info)))
        for replica, came in enumerate(kept[:: self.replica_size]):
            self._take_rows(replica, came)

    def _sync(self, trained_steps: int, timing: dict[str, float]) -> None:
        """The weights after ``trained_steps`` steps go to the rollout ranks, if these have not got them."""
        self._settle()
        if self._synced == trained_steps:
            return
        with marked_timer("update_weights", timing):
            get_together(*(group.start("update_weights", trained_steps) for group in (self.training, self.rollout)))
        self._synced = trained_steps

    def _settle(self) -> None:
        """No call is under way after this; what had to be generated before is."""
        if self._call is not None:
            self._collect()
        if self._synced is None:
            return
        while self.pace.fixed_order and not self._is_next_step_ready():
            self._turn()
        while not self.pace.partial_rollout and self._has_unfinished():
            self._turn(begins=False)

    def _is_next_step_ready(self) -> bool:
        return self.ledger.choice(self._finished()) is not None

    def _has_unfinished(self) -> bool:
        return any(not prompt.is_finished for prompt in self.begun.values())

    def _finished(self) -> list[int]:
        return [number for number, prompt in self.begun.items() if prompt.is_finished]

    def _turn(self, begins: bool = True) -> None:
        """One call, from its start to its end; or to the end of the one that is under way."""
        if self._call is None:
            self._start_call(begins)
        assert self._call is not None, "a step waits for samples, and none may be begun"
        self._collect()

    def _start_call(self, begins: bool = True) -> None:
        """The next call, of which new prompts are a part unless it only ends what is under way; none if all is done."""
        new = self._begin_prompts() if begins else [DataProto() for _ in range(self.num_replicas)]
        if not self._has_unfinished():
            return
        orders = [self._order(replica, prompts) for replica, prompts in enumerate(new)]
        self._call = self.rollout.start("run", _each(orders, self.replica_size))

    def _begin_prompts(self) -> list[DataProto]:
        """Begins the prompts that may be and that a replica has room for, each where the fewest samples are unfinished.

        A prompt that would only wait there is younger when it is begun later; so none is while a step's prompts are
        finished and wait.
        """
        room = self.config.actor_rollout_ref.rollout.max_num_seqs
        new: list[list[DataProto]] = [[DataProto()] for _ in range(self.num_replicas)]
        load = [0] * self.num_replicas
        for prompt in self.begun.values():
            load[prompt.replica] += len(prompt.rows) - len(prompt.ended)
        is_behind = len(self._finished()) < self.ledger.prompts_per_step
        while is_behind and self.ledger.num_allowed and min(load) < room:
            (number,) = self.ledger.begin(1)
            replica = load.index(min(load))
            self.begun[number] = BegunPrompt(replica, self._rows_of(number))
            load[replica] += len(self.begun[number].rows)
            new[replica].append(self.begun[number].rows.select(non_tensor_batch_keys=_SENT))
        return [DataProto.concat(parts) for parts in new]

    def _rows_of(self, number: int) -> DataProto:
        """The rows of a prompt, which follow from its number; as those of the synchronous schedule's steps."""
        rollout, per_step = self.config.actor_rollout_ref.rollout, self.config.data.train_batch_size
        step, place = divmod(number, per_step)
        seeds = sampling_seeds(rollout.seed, step + 1, place * rollout.n, rollout.n)
        prompts = collate_fn([self.loader.prompt(number)])
        rows = prompt_rows(prompts, [f"{step + 1}-{place}"], rollout.n, seeds)
        rows.non_tensor_batch[PROMPT] = as_rows([number] * rollout.n)
        rows.non_tensor_batch[SAMPLE] = as_rows(list(range(rollout.n)))
        return rows

    def _order(self, replica: int, prompts: DataProto) -> RolloutOrder:
        prompts.meta_info |= self.tokens.meta_info()
        return RolloutOrder(prompts, self.pace.steps_per_call, self._oldest_kept(replica))

    def _oldest_kept(self, replica: int) -> int:
        """The lowest number of a generated batch of ``replica`` with rows that will be, or are being, trained on."""
        waiting = [ended for prompt in self.begun.values() for ended in prompt.ended.values()]
        needed = [ended.kept_in for ended in [*waiting, *self._in_training] if ended.replica == replica]
        return min(needed, default=sys.maxsize)

    def _collect(self) -> None:
        """Waits for the call that is under way, and takes what it brought."""
        call, self._call = self._call, None
        answers: list[RolloutAnswer] = call.get()[:: self.replica_size]
        self._generate_s += sum(answer.seconds for answer in answers) / len(answers)
        for replica, answer in enumerate(answers):
            self._take_rows(replica, answer.rows)

    def _take_rows(self, replica: int, rows: DataProto) -> None:
        kept_in = next(iter(rows.row_refs.columns.values()))[0, BATCH] if rows.row_refs is not None else 0
        for row in range(len(rows)):
            number, sample = int(rows.non_tensor_batch[PROMPT][row]), int(rows.non_tensor_batch[SAMPLE][row])
            prompt = self.begun[number]
            assert sample not in prompt.ended, f"sample {sample} of prompt {number} came twice"
            prompt.ended[sample] = EndedSample(rows, row, replica, int(kept_in))

    def _take(self, chosen: list[int]) -> tuple[DataProto, dict[str, float]]:
        """The rows of the chosen prompts, which are trained on now, and metrics of their age."""
        self.ledger.take(chosen)
        prompts = [self.begun.pop(number) for number in chosen]
        self._in_training = [prompt.ended[sample] for prompt in prompts for sample in range(len(prompt.rows))]
        sent = DataProto.concat([prompt.rows for prompt in prompts])
        came = _gathered(self._in_training)
        add_num_tokens(came, sent.non_tensor_batch["raw_prompt_ids"])
        sent.pop(non_tensor_batch_keys=REQUEST_KEYS)
        batch = sent.union(came)
        per_version = self.pace.trigger_parameter_sync_step
        versions = batch.non_tensor_batch[VERSIONS]
        ages = np.array([self.ledger.version - spans[0][0] // per_version for spans in versions])
        assert ages.max() <= self.ledger.max_staleness, f"{ages.max()} versions old, over {self.ledger.max_staleness}"
        return batch, {
            "schedule/staleness/mean": float(ages.mean()),
            "schedule/staleness/max": float(ages.max()),
            "schedule/stale_samples": float((ages > 0).mean()),
            "schedule/partial_samples": float(np.mean([len(spans) > 1 for spans in versions])),
            "schedule/waiting_prompts": float(len(self._finished())),
            "schedule/unfinished_prompts": float(len(self.begun) - len(self._finished())),
        }


def _whole_rows(described: list[list[Any]], arrays: dict[str, np.ndarray], prompt_length: int) -> DataProto:
    """Rows of ended samples as a replica's engine gave them."""
    columns = {
        name.removeprefix(_COLUMN): torch.from_numpy(values)
        for name, values in arrays.items()
        if name.startswith(_COLUMN)
    }
    if not columns:
        return DataProto()
    columns["responses"] = columns["input_ids"][:, prompt_length:]
    texts = dict(zip(_DESCRIBED, zip(*described, strict=True), strict=True))
    return DataProto.from_dict(columns, {name: list(values) for name, values in texts.items()})


def _each(values: list[Any], times: int) -> list[Any]:
    """Every value as often as a replica has ranks."""
    return [value for value in values for _ in range(times)]


def _gathered(samples: Sequence[EndedSample]) -> DataProto:
    """Their rows in this order."""
    answers = {id(sample.rows): sample.rows for sample in samples}
    starts = dict(zip(answers, np.cumsum([0, *map(len, answers.values())]).tolist(), strict=False))
    places = [starts[id(sample.rows)] + sample.row for sample in samples]
    return DataProto.concat(list(answers.values())).select_idxs(places)
