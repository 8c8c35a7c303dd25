"""Tasks over processes: a function of a task, called here or in workers that end with this process.

Beside ``concurrent.futures``: its pool waits for the work in hand when a task fails (ending its workers is public from
Python 3.14 on), does not say which task a worker died of, and a worker that is killed may keep the lock of a queue
that all share; here each has a pipe of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar, cast

from hf_formats.parent_death import end_with_parent

Result = TypeVar("Result")
Work = Callable[[str, Callable[[int], None]], Result]
_TERMINATE_S = 5


def run_tasks(
    work: Work[Result], tasks: Sequence[str], num_workers: int, on_bytes: Callable[[int], None]
) -> Generator[tuple[str, Result], None, None]:
    """(task, ``work(task, report)``) in the order in which they end; ``report(num_bytes)`` reaches ``on_bytes``.

    With one worker everything runs in this process, otherwise in ``num_workers`` new ones, to which ``work`` is
    pickled once. The first exception ends all of them and is raised here, as is the death of a worker.
    """
    if num_workers <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield task, work(task, on_bytes)
        return
    with _Pool(work, min(num_workers, len(tasks))) as pool:
        yield from pool.run(list(tasks), on_bytes)


class _Pool(Generic[Result]):
    def __init__(self, work: Work[Result], num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self._workers = {}
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(work, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            self._workers[ours] = process

    def __enter__(self) -> _Pool[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in self._workers.items():
            pipe.close()
            process.terminate()
        for process in self._workers.values():
            process.join(_TERMINATE_S)
            if process.is_alive():  # its file system does not answer, perhaps
                process.kill()
                process.join(_TERMINATE_S)

    def run(self, tasks: list[str], on_bytes: Callable[[int], None]) -> Iterator[tuple[str, Result]]:
        """Consumes messages of the workers; every worker has one task or none, so the loop ends when all are idle."""
        waiting = list(reversed(tasks))
        busy: dict[Connection, str] = {}
        for pipe in self._workers:
            busy[pipe] = waiting.pop()
            pipe.send(busy[pipe])
        while busy:
            for ready in wait(list(busy)):
                pipe = cast(Connection, ready)
                try:
                    message = pipe.recv()
                except EOFError:
                    raise OSError(
                        f"a worker process died while it had {busy[pipe]}; was it killed for memory?"
                    ) from None
                if isinstance(message, int):
                    on_bytes(message)
                    continue
                if isinstance(message, BaseException):
                    raise message
                done = busy.pop(pipe)
                if waiting:
                    busy[pipe] = waiting.pop()
                    pipe.send(busy[pipe])
                yield done, message[0]


def _serve(work: Work[Result], pipe: Connection, parent: int) -> None:
    """A worker's life: it waits for a task, unblocked by one or by the closed pipe; it dies with its parent."""
    end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and terminates us
    if torch := sys.modules.get("torch"):  # work that computes has imported it by now
        torch.set_num_threads(1)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((work(task, pipe.send),))
        except Exception as error:
            pipe.send(error)
