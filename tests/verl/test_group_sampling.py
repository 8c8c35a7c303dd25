"""Groups that end one by one are graded and chosen in the order in which they end, whatever graders take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl.protocol import DataProto
from verl.protocol_storage import as_rows
from verl.row_refs import RowRefs
from verl.trainer.config import load_config, validate_config
from verl.trainer.ppo.filter_groups import SampleGroup, check_reward_nonzero_std
from verl.trainer.ppo.schedules.end_order import EndOrder
from verl.trainer.ppo.schedules.generation import prompt_rows
from verl.trainer.ppo.schedules.group_sampling import Grading, GroupBuffer, StepLedger
from verl.trainer.ppo.schedules.staleness import StalenessLedger
from verl.trainer.ppo.scores import add_scores
from verl.utils.reward_score.scoring_pool import ScoringJob, ScoringResult
from verl.workers.config import OverlongBufferConfig
from verl.workers.reward_manager.pooled import PendingScores
from verl.workers.rollout.rollout_messages import PROMPT, SAMPLE, VERSIONS

N, WIDTH = 2, 4
DEFAULTS = load_config()


@dataclass
class Graders:
    """Grading with answers that the test gives when it likes; a prompt's samples differ unless it is in ``same``."""

    same: Sequence[int]
    waiting: dict[int, list[Future[ScoringResult]]] = field(default_factory=dict)
    recorded: list[str] = field(default_factory=list)

    def start(self, batch: DataProto) -> PendingScores:
        number = int(batch.non_tensor_batch[PROMPT][0])
        self.waiting[number] = [Future() for _ in range(len(batch))]
        job = ScoringJob("", "", "", {})
        return PendingScores(self.waiting[number], batch.batch["response_mask"], [(str(number), "", job)] * len(batch))

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            for sample, future in enumerate(self.waiting.pop(number)):
                score = 0.0 if number in self.same else float(sample)
                future.set_result(ScoringResult({"score": score}, "ok"))

    def grading(self) -> Grading:
        def keeps(group: SampleGroup) -> bool:
            return check_reward_nonzero_std(DEFAULTS, group)

        return Grading(
            self.start,
            lambda batch, scores: add_scores(batch, scores, OverlongBufferConfig()),
            lambda samples: self.recorded.extend(sample.uid for sample in samples),
            keeps,
        )


def rows_of(number: int) -> DataProto:
    prompts = {"raw_prompt_ids": as_rows([[1, 2]])}
    rows = prompt_rows(prompts, [f"1-{number}"], N, np.arange(N).astype(object))
    rows.non_tensor_batch["response_limit"] = as_rows([0] * N)
    rows.non_tensor_batch[PROMPT], rows.non_tensor_batch[SAMPLE] = as_rows([number] * N), as_rows(list(range(N)))
    return rows


def ended(batch: int, *samples: tuple[int, int]) -> DataProto:
    """The result of a call in which these (prompt, sample) have ended, stored as generated batch ``batch``."""
    count = len(samples)
    columns: dict[str, Any] = {
        PROMPT: [prompt for prompt, _ in samples],
        SAMPLE: [sample for _, sample in samples],
        VERSIONS: [[[0, 1]]] * count,
    }
    tensors = {"responses": torch.ones(count, WIDTH).int(), "response_mask": torch.ones(count, WIDTH).bool()}
    rows = DataProto.from_dict(tensors, {name: as_rows(values) for name, values in columns.items()})
    rows.row_refs = RowRefs({"input_ids": np.array([[batch, 0, slot] for slot in range(count)], dtype=np.int32)})
    return rows


def both(*prompts: int) -> list[tuple[int, int]]:
    return [(prompt, sample) for prompt in prompts for sample in range(N)]


def buffer_of(ledger: Any, graders: Graders, **settings: Any) -> GroupBuffer:
    buffer = GroupBuffer(ledger, rows_of, 1, 99, graders.grading(), drops_unfinished=True, **settings)
    buffer.start_prompts()
    return buffer


@pytest.mark.parametrize("answers", [(1, 3, 0, 4), (4, 0, 3, 1)])
def test_the_first_groups_that_end_and_differ_are_kept_whatever_the_graders_order(answers: Sequence[int]) -> None:
    """Six prompts for a step of two; 3 is rejected, 2 and 5 do not end. Prompt 1 ends in two calls."""
    graders = Graders(same=[3])
    ledger = StepLedger(2, num_submitted=6)
    buffer = buffer_of(ledger, graders)
    assert sorted(buffer.prompts) == list(range(6)) and ledger.num_allowed == 0
    buffer.add(0, ended(1, *both(3), (1, 0), (2, 0)))
    assert not buffer.is_settled and buffer.choice() is None
    buffer.add(0, ended(2, (1, 1), *both(4)))
    buffer.add(0, ended(3, *both(0)))
    graders.answer(*answers)
    assert buffer.is_settled and buffer.settle() and not buffer.settle()
    assert buffer.finished == [1, 4, 0] and 3 not in buffer.prompts
    chosen = buffer.choice()
    assert chosen == [1, 4]
    assert buffer.first_needed_batch(0) == 1
    batch = buffer.take(chosen)
    assert batch.non_tensor_batch["uid"].tolist() == ["1-1", "1-1", "1-4", "1-4"]
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [0.0, 1.0, 0.0, 1.0]
    assert batch.row_refs is not None
    assert batch.row_refs.columns["input_ids"].tolist() == [[1, 0, 2], [2, 0, 0], [2, 0, 1], [2, 0, 2]]
    buffer.drop_overdue()
    assert graders.recorded == ["3", "3", "1", "1", "4", "4", "0", "0"]  # each grade once: rejected, trained on, left
    assert buffer.take_counts().metrics() == {
        "train/kept_groups_ratio": 0.75,
        "train/reward_before_filter": 3 / 8,
        "train/aborted_groups": 0.0,
    }


class Lengths:
    """Samples that end after so many tokens, in an engine that gives each running one 1 to ``pace`` tokens a step."""

    def __init__(self, lengths: Sequence[tuple[int, ...]], num_at_once: int, pace: int, seed: int) -> None:
        self.lengths, self.num_at_once, self.pace, self.random = lengths, num_at_once, pace, random.Random(seed)
        self.running: dict[tuple[int, int], int] = {}
        self.num_calls = 0

    def run(self, buffer: GroupBuffer, graders: Graders, num_steps: int) -> None:
        for rows in buffer.start_prompts():
            for number in buffer.numbers_in(rows):
                self.running |= dict.fromkeys(both(number), 0)
        done = dict[tuple[int, int], int]()
        for _ in range(num_steps):
            for sample in list(self.running)[: self.num_at_once]:
                length = self.lengths[sample[0]][sample[1]]
                self.running[sample] = min(self.running[sample] + self.random.randint(1, self.pace), length)
                if self.running[sample] == length:
                    done[sample] = self.running.pop(sample)
        self.num_calls += 1
        buffer.settle()
        buffer.note(self.running | done)
        if done:
            buffer.add(0, ended(self.num_calls, *sorted(done)))
        graders.answer(*list(graders.waiting))


def first_groups(engine: Lengths, same: Sequence[int], slots: int, wanted: int, num_steps: int) -> list[Any]:
    """What a step of ``wanted`` groups decides when it submits twice as many prompts at a time."""
    graders, order, ledger = Graders(same), EndOrder(slots, N), StepLedger(wanted)
    settings: dict[str, Any] = {"drops_unfinished": True, "order": order}
    buffer = GroupBuffer(ledger, rows_of, 1, 99, graders.grading(), **settings)
    while (chosen := buffer.choice()) is None:
        if buffer.lacks_prompts:
            ledger.num_submitted += 2 * wanted
            order.submit(2 * wanted)
        engine.run(buffer, graders, num_steps)
    buffer.take(chosen)
    return [chosen, ledger.num_submitted, graders.recorded, vars(buffer.take_counts())]


# The second sample of prompt 13 holds the slot that 14 waits for; an engine without slots is done with 14 before it.
@example([(1, 1)] * 12 + [(1, 4), (5, 4)] + [(1, 1)] * 26, set(range(11)), (4, 1, 0, 3, 4, 1, 0, 4), 2)
@settings(max_examples=100)
@given(
    st.lists(st.tuples(*[st.integers(1, 20)] * N), min_size=40, max_size=40),
    st.sets(st.integers(0, 15)),
    st.tuples(*[st.integers(4, 40), st.integers(1, 6), st.integers(0, 99), st.integers(3, 9)] * 2),
    st.integers(1, 40),
)
def test_which_groups_are_first_follows_from_their_lengths_alone(
    lengths: list[tuple[int, ...]], same: set[int], engines: tuple[int, ...], slots: int
) -> None:
    """Two engines with other batches and paces, as drafts, replicas and a full cache give them, are cut alike."""
    wanted = 3
    first, second = (
        first_groups(Lengths(lengths, at_once, pace, seed), list(same), slots, wanted, num_steps)
        for at_once, pace, seed, num_steps in (engines[:4], engines[4:])
    )
    assert first == second
    if slots >= 2 * wanted * N and first[1] == 2 * wanted:
        differ = [number for number in range(2 * wanted) if number not in same]
        assert first[0] == sorted(sorted(differ, key=lambda number: (max(lengths[number]), number))[:wanted])


def test_before_a_sync_unfinished_prompts_and_what_would_get_too_old_are_dropped() -> None:
    """One step of two prompts a version, one version ahead, three more prompts than can be trained on."""
    graders = Graders(same=[])
    ledger = StalenessLedger(2, 1, 1.0, surplus=3)
    buffer = buffer_of(ledger, graders)
    assert len(buffer.prompts) == 2 + 2 + 3
    buffer.add(0, ended(1, *both(0, 5, 2, 6, 3), (1, 0)))
    graders.answer(0, 2, 3, 5, 6)
    buffer.settle()
    buffer.take(buffer.choice() or [])
    assert buffer.is_next_step_ready and buffer.drop_unneeded()
    assert buffer.finished == [3, 5] and sorted(ledger.in_flight) == [3, 5]
    assert buffer.counts.num_aborted == 2 and graders.recorded[-2:] == ["6", "6"]
    assert not buffer.drop_unneeded()
    ledger.begin_version(1)
    assert ledger.take(buffer.choice() or []) == [1, 1]


def test_a_checkpoint_keeps_the_order_of_kept_groups_and_too_few_are_an_error() -> None:
    graders = Graders(same=[1])
    buffer = buffer_of(StalenessLedger(2, 1, 1.0), graders)
    for call, number in enumerate((2, 1, 0), start=1):
        buffer.add(0, ended(call, *both(number)))
    graders.answer(0, 1, 2)
    buffer.settle()
    state, in_flight = buffer.state(), buffer.ledger
    assert state["kept"] == [2, 0] and state["counts"]["num_graded"] == 3
    again = GroupBuffer(in_flight, rows_of, 1, 99, graders.grading(), drops_unfinished=True, max_groups=4)
    for number in (0, 2, 3):
        again.restart(number, 0)
    again.add(0, ended(1, *both(0, 2)))
    graders.answer(0, 2)
    again.load_state(state)
    assert again.state() == state
    graders.same = [3]
    assert isinstance(in_flight, StalenessLedger)
    again.take([0, 2])
    again.add(0, ended(2, *both(3)))
    graders.answer(3)
    with pytest.raises(ValueError, match=r"4 prompts gave 0 of the 2 prompts .* \(4 tried\).*max_num_gen_batches"):
        again.settle()


FILTER = "algorithm.filter_groups={enable:True,metric:score,stop_early:True}"
SEPARATE = ("actor_rollout_ref.hybrid_engine=False", "rollout.nnodes=1", "rollout.n_gpus_per_node=2")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("algorithm.filter_groups.stop_early=True",), "stop_early is True and algorithm.filter_groups.enable False"),
        ((FILTER, "actor_rollout_ref.rollout.rebalance_interval=8"), "with algorithm.filter_groups.stop_early prompts"),
        ((FILTER, *SEPARATE, "trainer.schedule=fully_async"), "unfinished samples continue after a weight sync"),
        (
            (
                FILTER.replace("stop_early:True", "stop_early:False"),
                *SEPARATE,
                "trainer.schedule=fully_async",
                "data.gen_batch_size=12",
            ),
            "data.gen_batch_size is 12; with trainer.schedule=fully_async prompts are started one by one",
        ),
    ],
)
def test_what_cannot_be_stopped_early_is_told(overrides: Sequence[str], told: str) -> None:
    sizes = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.n_gpus_per_node=2")
    assert told in "\n".join(validate_config(load_config([*sizes, "actor_rollout_ref.rollout.n=2", *overrides])))
