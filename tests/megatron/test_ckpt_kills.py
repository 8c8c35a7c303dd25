"""Whatever is killed at whatever moment of a save, a checkpoint that is chosen afterwards is whole, and loads."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import CheckpointSaver, load_checkpoint
from megatron.core.dist_checkpointing.manifest import file_problems, read_manifest
from megatron.core.parallel_state import initialize_model_parallel
from tests.megatron.ckpt_job import TrainingJob
from tests.megatron.model_helpers import one_process_groups
from verl.trainer.ppo import checkpointing

logger = logging.getLogger(__name__)

_SMALL = {"num_layers": 1, "moe_layer_freq": (1,)}


def _digest(job: TrainingJob, world_size: int) -> str:
    """Of all weights, and in one process of the optimizer's state, bit for bit."""
    digest = hashlib.sha256()
    for tensor in job.model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    for shard in job.optimizer.param_shards() if world_size == 1 else ():
        for tensor in shard.tensors.values():
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _pids(root: Path) -> list[int]:
    """The training processes and every writer of the round; a writer may have ended."""
    return [int(line) for path in root.glob("pids-*") for line in path.read_text().split()]


def _newest(root: Path) -> checkpointing.Checkpoint | None:
    return checkpointing.find_latest_ckpt_path(
        str(root), lambda each: file_problems(each.actor, read_manifest(each.actor), verify_digests=True)
    )


def _train_until_killed(root: Path, rank: int, world_size: int, store: str) -> None:
    """Resume, then a step and a save in the background, again and again; what is saved says what it must be."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    groups = initialize_model_parallel()
    job, saver = TrainingJob(groups, **_SMALL), CheckpointSaver(groups, stall_timeout_s=10)
    pids = root / f"pids-{rank}"
    pids.write_text(f"{os.getpid()}\n")
    found = [_newest(root) if rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    if found[0] is not None:
        load_checkpoint(found[0].actor, *job.state, groups, verify_digests=True)
        assert job.optimizer.num_steps == found[0].step
    while True:
        job.train(1)
        saver.check()
        checkpoint = checkpointing.checkpoint_at(str(root), job.optimizer.num_steps)
        if rank == 0:
            checkpoint.write_state({})
        content = {"world_size": world_size, "digest": _digest(job, world_size)}
        latest = (str(checkpointing.latest_path(str(root))), str(checkpoint.step))
        saver.save(checkpoint.actor, *job.state, content, async_save=True, latest=latest)
        assert saver.running is not None
        with pids.open("a") as out:
            out.write(f"{saver.running.pid}\n")


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# What to wait for before the kill, and how many seconds after it may come; the writing itself takes 0.1 s.
_MOMENTS: tuple[tuple[Callable[[Path], object], float], ...] = (
    (lambda root: None, 8.0),
    (lambda root: set(root.glob("global_step_*/.actor.*.partial")), 5.0),
    (lambda root: set(root.glob("global_step_*/.actor.*.partial/__*")), 0.2),
    (lambda root: set(root.glob("global_step_*/.actor.*.partial/*.done")), 0.1),
    (lambda root: set(root.glob("global_step_*/actor")), 0.02),
    (lambda root: {path.read_text() for path in root.glob(checkpointing.LATEST)}, 0.5),
)


def _wait_for(root: Path, seen: Callable[[Path], object], timeout_s: float) -> None:
    """Until ``seen`` changes or the time is over."""
    deadline, before = time.monotonic() + timeout_s, seen(root)
    while before is not None and seen(root) == before and time.monotonic() < deadline:
        time.sleep(0.002)


def _check(root: Path, what: str) -> int:
    """What is there loads, and is what the run was at that step; 0 when nothing was saved yet."""
    latest = checkpointing.latest_path(str(root))
    named = int(latest.read_text()) if latest.exists() else 0  # first: an orphaned writer may yet name a newer one
    newest = _newest(root)
    for checkpoint in checkpointing.complete_checkpoints(str(root)):
        damage = file_problems(checkpoint.actor, read_manifest(checkpoint.actor), verify_digests=True)
        assert not damage, f"{what}: a damaged checkpoint looks complete: {damage}"
    if newest is None:
        assert named == 0, f"{what}: latest names step {named}, and there is none"
        return 0
    assert newest.step >= named, f"{what}: latest is ahead"
    with one_process_groups() as groups:
        job = TrainingJob(groups, seed=8, **_SMALL)
        content = load_checkpoint(newest.actor, *job.state, groups, verify_digests=True)
        assert job.optimizer.num_steps == newest.step
        assert _digest(job, content["world_size"]) == content["digest"], f"{what}: step {newest.step}"
    return newest.step


def _round(root: Path, world_size: int, draws: random.Random, store: Path, pace: float) -> str:
    """Start a run and kill some of its processes, the training ones in the end; says which first.

    ``pace`` shortens the time until the kill.
    """
    for left in root.glob("pids-*"):
        left.unlink()
    context = multiprocessing.get_context("forkserver")
    ranks: list[BaseProcess] = [
        context.Process(target=_train_until_killed, args=(root, rank, world_size, str(store)))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        while not all((root / f"pids-{rank}").exists() for rank in range(world_size)):
            assert all(process.is_alive() for process in ranks), "the run did not come up"
            time.sleep(0.05)
        seen, longest_s = draws.choice(_MOMENTS)
        _wait_for(root, seen, timeout_s=60)
        time.sleep(draws.uniform(0, longest_s) * pace)
        trainers = [process.pid for process in ranks if process.pid is not None]
        writers = [pid for pid in _pids(root) if pid not in trainers]
        who = draws.choice(["all", "trainers", "writers", "one writer"])
        if who in ("writers", "one writer"):
            _kill(writers[-1:] if who == "one writer" else writers)
            time.sleep(draws.uniform(0, 0.3))
        _kill(trainers)
        if who == "all":
            _kill(writers)
    finally:
        for process in ranks:
            process.kill()
            process.join(20)
    return who


def _rounds(root: Path, num_rounds: int, largest_world: int, pace: float = 1.0) -> tuple[int, int]:
    """Run and kill, in changing world sizes; the step that the run has come to, and how many saves were cut off."""
    draws, step = random.Random(largest_world), 0
    cut: set[Path] = set()
    for number in range(num_rounds):
        world_size = draws.randint(1, largest_world)
        who = _round(root, world_size, draws, root / f"store-{number}", pace)
        if who != "trainers":
            cut.update(root.glob("global_step_*/.actor.*.partial"))
        now = _check(root, f"round {number}")  # while an orphaned writer may still be at work
        logger.info("round %d: killed %s of %d ranks, step %d", number, who, world_size, now)
        assert now >= step, f"round {number}: from step {step} back to {now}"
        step = now
    return step, len(cut)


def test_a_few_kills(tmp_path: Path) -> None:
    try:
        _rounds(tmp_path, 2, 1, pace=0.3)
    finally:
        _kill(_pids(tmp_path)[1:])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills(tmp_path: Path) -> None:
    try:
        step, num_cut = _rounds(tmp_path, 50, 2)
    finally:
        _kill(_pids(tmp_path)[1:])
    logger.info("50 kills: %d saves were cut off, the run came to step %d", num_cut, step)
    assert step >= 5 and num_cut >= 10
