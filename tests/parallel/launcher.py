"""Runs one function on N processes (gloo, or hccl on the simulator), and ends them all whatever happens.

The processes are forked from one server that has torch and both engines imported: importing them takes a process five
seconds. The server starts with the first call and ends with the process that started it.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.parallel.preloaded import PRELOADED


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120, device: str = "cpu"
) -> list[Any]:
    """Call ``fn(*args)`` on every rank of a world and return the results in rank order.

    ``device`` "npu" gives each rank a device of its own and hccl, "cpu" gloo.

    ``fn`` is a module's top-level function; inside it torch.distributed is initialised. Results travel through files
    (pickled), so they may hold tensors. Failing ranks are raised as ``RuntimeError`` with their tracebacks;
    ranks that still run ``timeout_s`` after the start are killed and reported as ``TimeoutError``.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # The server keeps the environment in which it was started; what has been set since goes with each rank.
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="ranks-") as tmp:
        ranks = [
            context.Process(
                target=_run_rank, args=(fn, rank, world_size, tmp, timeout_s, device, environment, args), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, Path(tmp), time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join(10)
        return [pickle.loads((Path(tmp) / f"result-{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _wait(ranks: list[Any], tmp: Path, deadline: float) -> None:
    """Wait until all ranks have ended; unblocked by their exit, by the first failure or by the deadline."""
    while True:
        failed = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)}
        if failed:
            reports = sorted(tmp.glob("error-*.txt"), key=lambda path: path.stat().st_mtime)
            told = "\n".join(f"--- {path.stem}\n{path.read_text()}" for path in reports)
            raise RuntimeError(f"ranks failed with exit codes {failed}, first failure first:\n{told}")
        alive = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        if not alive:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {alive} of {len(ranks)} did not end in time")
        ranks[alive[0]].join(0.05)


def _run_rank(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    tmp: str,
    timeout_s: float,
    device: str,
    environment: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        if device == "npu":
            torch.npu.set_device(rank)
        dist.init_process_group(
            "hccl" if device == "npu" else "gloo",
            init_method=f"file://{tmp}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        if torch.__version__ < "2.6":
            _keep_groups()
        result = fn(*args)
        (Path(tmp) / f"result-{rank}.pickle").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (Path(tmp) / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _keep_groups() -> None:
    """Let no group be freed before this process ends.

    Gloo of torch 2.5 waits for ever when a group is freed while its thread frees a tensor of the last collective: the
    one holds Python's lock and wants the group's, the other has them the other way round.
    """
    new_group, groups = dist.new_group, []

    def kept(*args: Any, **kwargs: Any) -> Any:
        groups.append(new_group(*args, **kwargs))
        return groups[-1]

    dist.new_group = kept


def _end_with_parent() -> None:
    """Wait until the caller of ``run_ranks`` is gone, killed included; the server would wait for this rank for ever."""
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
