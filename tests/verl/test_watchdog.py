"""A rank that hangs yields one file: it, those that wait for it and where, with stacks, metrics and config."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_model_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from tests.parallel.launcher import run_ranks
from tests.parallel.toy import HIDDEN, toy_batches, toy_config, toy_forward_step, toy_stage
from verl.utils.hang_report import Answer, describe_group, own_answer, report, waits_for
from verl.utils.hang_watchdog import HangWatchdog, group_list

TIMEOUT_S = 1.0


def _watchdog(directory: str, groups: ProcessGroups, timeout_s: float = TIMEOUT_S) -> HangWatchdog:
    return HangWatchdog(
        directory, groups.rank, groups.world.size(), timeout_s, config="lr: 1e-6", groups=group_list(groups)
    )


def _wait_for_report(directory: str) -> None:
    deadline = time.monotonic() + 30
    while not any(name.endswith(".txt") for name in os.listdir(directory)):  # without a call in Python
        assert time.monotonic() < deadline, "no report"
        time.sleep(0.05)


def _one_rank_does_not_come(directory: str) -> None:
    groups = initialize_model_parallel()
    watchdog = _watchdog(directory, groups)
    watchdog.note_metrics({"actor/pg_loss": 0.25})
    x = torch.ones(3, 4)
    with watchdog.phase("update_actor"):
        dist.all_reduce(x, group=groups.dp)
        with watchdog.phase("optimizer"):
            if groups.rank == 2:
                _wait_for_report(directory)
            dist.all_reduce(x, group=groups.dp)
    time.sleep(3 * TIMEOUT_S / 2)  # outside of a phase nothing is watched, and a hang is reported once
    watchdog.close()


def test_the_rank_that_did_not_come_to_a_collective_is_named(tmp_path: Path) -> None:
    run_ranks(_one_rank_does_not_come, 3, str(tmp_path), timeout_s=60)
    files = list(tmp_path.glob("hang-*.txt"))
    assert len(files) == 1
    text = files[0].read_text()
    head, stacks = text.split("Stacks, innermost call last:")
    assert "phase 'update_actor/optimizer' hangs: nothing has moved on rank" in head and "3 of 3 ranks answered" in head
    waiting, others = head.split("the likely culprits:")
    assert "ranks 0-1: all_reduce(float32 [3, 4]) over dp [0-2], at" in waiting
    assert "test_watchdog.py" in waiting and "dist.all_reduce(x, group=groups.dp)" in waiting
    assert re.search(r"rank 2: at .*:\d+ in _wait_for_report: (time\.sleep|while not any|assert time)", others), others
    assert "dp [0-2]: rank 2 has launched 1, others 2" in others
    assert "ranks 0-2: actor/pg_loss 0.25" in others and "lr: 1e-6" in others
    assert stacks.count("thread MainThread (in the phase):") == 2 and "in _one_rank_does_not_come" in stacks
    assert not (tmp_path / "alarm.json").exists() and not list(tmp_path.glob("answers-*"))


def _a_stopped_process(directory: str) -> None:
    groups = initialize_model_parallel()
    watchdog = _watchdog(directory, groups)
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    with watchdog.phase("generate_sequences"):
        if groups.rank == 0:
            while not (Path(directory) / "alive" / "rank-1.json").exists():
                watchdog.progress()
            os.kill(pids[1], signal.SIGSTOP)
            _wait_for_report(directory)
            os.kill(pids[1], signal.SIGCONT)
        while not list(Path(directory).glob("hang-*.txt")):
            watchdog.progress()
            time.sleep(0.01)
    watchdog.close()


def test_a_process_that_cannot_answer_is_named_with_its_last_sign_of_life(tmp_path: Path) -> None:
    run_ranks(_a_stopped_process, 2, str(tmp_path), timeout_s=60)
    text = next(tmp_path.glob("hang-*.txt")).read_text()
    assert "(1 of 2 ranks answered)" in text
    assert "rank 1: no answer, last sign of life" in text and "s ago in " in text


def _a_stage_hangs(directory: str, num_chunks: int) -> None:
    groups = initialize_model_parallel(1, 2, num_chunks)
    watchdog = _watchdog(directory, groups)

    def forward_step(batches: Iterator, model: nn.Module) -> tuple[torch.Tensor, object]:
        if not groups.is_first_stage:
            _wait_for_report(directory)
        return toy_forward_step(batches, model)

    with watchdog.phase("update_actor"):
        get_forward_backward_func(groups)(
            forward_step_func=forward_step,
            data_iterator=iter(toy_batches([3])),
            model=toy_stage(groups, toy_config(), 4),
            tensor_shapes=[(3, HIDDEN)],
        )
    watchdog.close()


def test_a_stage_that_waits_for_another_says_for_what(tmp_path: Path) -> None:
    for num_chunks, wanted in (
        (1, "rank 0: 1 transfers with ranks [1], at"),
        (2, "rank 0: input of micro-batch 0, chunk 1 from rank 1, at"),
    ):
        run_ranks(_a_stage_hangs, 2, str(tmp_path / str(num_chunks)), num_chunks, timeout_s=60)
        text = next((tmp_path / str(num_chunks)).glob("hang-*.txt")).read_text()
        assert wanted in text, text
        assert "rank 1: at" in text and "in _wait_for_report" in text


def _moves_slowly(directory: str) -> None:
    groups = initialize_model_parallel()
    timeout_s = 2.0
    watchdog = _watchdog(directory, groups, timeout_s)
    x = torch.ones(3)
    with watchdog.phase("update_actor"):
        for _ in range(5):
            if groups.rank == 1:
                time.sleep(timeout_s / 4)
            dist.all_reduce(x, group=groups.dp)
        for _ in range(5):
            time.sleep(timeout_s / 4)
            watchdog.progress()
    watchdog.close()
    assert watchdog.last_report is None


def test_a_long_phase_in_which_something_moves_is_no_hang(tmp_path: Path) -> None:
    run_ranks(_moves_slowly, 2, str(tmp_path), timeout_s=60)
    assert not list(tmp_path.glob("hang-*"))


@pytest.fixture
def one_rank() -> Iterator[ProcessGroups]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield initialize_model_parallel()
    destroy_model_parallel()
    dist.destroy_process_group()


def test_waiting_for_work_that_was_started_before(one_rank: ProcessGroups) -> None:
    class Work:
        def wait(self) -> str:
            return waits_for([sys._getframe(1)])

    assert Work().wait() == "work that was started before"

    class Tensor:
        def item(self) -> str:
            return waits_for([sys._getframe(1)])

    assert Tensor().item() == "the device, in whose queue a collective may wait"
    assert waits_for([sys._getframe()]) == ""
    assert describe_group(None) == "world [0]" and describe_group(one_rank.tp) == "tp [0]"


def test_a_stack_is_whole_although_its_thread_runs_on(tmp_path: Path) -> None:
    ends = threading.Event()

    def looks_for_a_file() -> None:
        while not ends.is_set():
            list(tmp_path.glob("*"))  # in generators, whose frames lose their callers at each yield

    thread = threading.Thread(target=looks_for_a_file)
    thread.start()
    try:
        answers = [own_answer(0, "update_actor", 1.0, thread.ident, [], {}) for _ in range(50)]
    finally:
        ends.set()
        thread.join()
    for answer in answers:
        assert "in looks_for_a_file" in answer.stacks[f"{thread.name} (in the phase)"]
        assert "in looks_for_a_file: " in answer.at, "the line of the phase, not pathlib's"


def test_equal_ranks_share_a_line() -> None:
    def answer(rank: int) -> Answer:
        late = rank == 5
        where = "" if late else "barrier() over world [0-255]"
        return Answer(rank, "host", 1, "save", 7.0, where, "a.py:1 in f: g()", {"dp": 3 - late}, {"main": "f\n"}, {})

    text = report([answer(rank) for rank in range(255)], 256, {}, 0, "", "now")
    assert len(text.splitlines()) < 25
    assert "ranks 0-4, 6-254: barrier() over world [0-255]" in text
    assert "rank 255: no answer, never seen" in text and "dp: rank 5 has launched 2, others 3" in text
