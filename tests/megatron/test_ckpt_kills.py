"""Whatever is killed at whatever moment of a save, a checkpoint that is chosen afterwards is whole, and loads."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import random
import signal
import time
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
from tests.parallel.launcher import PRELOADED
from verl.trainer.ppo import checkpointing

_SMALL = {"num_layers": 1, "moe_layer_freq": (1,)}


def _digest(job: TrainingJob, *, with_optimizer: bool) -> str:
    """Of all weights, and of this rank's part of the optimizer's state, bit for bit."""
    digest = hashlib.sha256()
    for tensor in job.model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    for shard in job.optimizer.param_shards() if with_optimizer else ():
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
    """Resume, then a step and a save in the background, again and again; writes down what it is at which step."""
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
            (root / f"digest-{checkpoint.step}").write_text(_digest(job, with_optimizer=world_size == 1))
            checkpoint.write_state({})
        saver.save(
            checkpoint.actor,
            *job.state,
            {},
            async_save=True,
            latest=(str(checkpointing.latest_path(str(root))), str(checkpoint.step)),
        )
        assert saver.running is not None
        with pids.open("a") as out:
            out.write(f"{saver.running.pid}\n")


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _wait_for(root: Path, pattern: str, timeout_s: float) -> None:
    """Until there is one more file of that pattern than now, or the time is over."""
    deadline, before = time.monotonic() + timeout_s, len(list(root.glob(pattern)))
    while len(list(root.glob(pattern))) <= before and time.monotonic() < deadline:
        time.sleep(0.002)


def _check(root: Path, round_: int, world_size: int) -> int:
    """What is there loads, and is what the run was at that step; 0 when nothing was saved yet."""
    newest = _newest(root)
    for checkpoint in checkpointing.complete_checkpoints(str(root)):
        damage = file_problems(checkpoint.actor, read_manifest(checkpoint.actor), verify_digests=True)
        assert not damage, f"round {round_}: a damaged checkpoint looks complete: {damage}"
    latest = checkpointing.latest_path(str(root))
    if latest.exists():
        assert newest is not None and newest.step >= int(latest.read_text()), f"round {round_}: latest is ahead"
    if newest is None:
        return 0
    with one_process_groups() as groups:
        job = TrainingJob(groups, seed=8, **_SMALL)
        load_checkpoint(newest.actor, *job.state, groups, verify_digests=True)
        assert job.optimizer.num_steps == newest.step
        want = (root / f"digest-{newest.step}").read_text()
        assert _digest(job, with_optimizer=world_size == 1) == want, f"round {round_}: step {newest.step}"
    return newest.step


def _rounds(root: Path, num_rounds: int, world_size: int, longest_s: float = 10) -> tuple[int, int]:
    """Start, kill at a random moment, look; the step that the run has come to, and how many saves were cut off.

    Every other moment is within 0.2 s of the beginning of a file, the others are anywhere in the first saves; the first
    kill comes after the first save.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    draws, step = random.Random(world_size), 0
    cut: set[Path] = set()
    for round_ in range(num_rounds):
        for left in root.glob("pids-*"):
            left.unlink()
        ranks: list[BaseProcess] = [
            context.Process(target=_train_until_killed, args=(root, rank, world_size, str(root / f"store-{round_}")))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            while not all((root / f"pids-{rank}").exists() for rank in range(world_size)):
                assert all(process.is_alive() for process in ranks), f"round {round_} did not come up"
                time.sleep(0.05)
            if round_ == 0:
                _wait_for(root, checkpointing.LATEST, timeout_s=120)
            elif round_ % 2:
                _wait_for(root, "global_step_*/.actor.*.partial/__*", timeout_s=30)
                time.sleep(draws.uniform(0, 0.2))
            else:
                time.sleep(draws.uniform(0, longest_s))
            who = draws.choice(["all", "trainers", "writers", "one writer"])
            pids = _pids(root)
            trainers = [process.pid for process in ranks if process.pid is not None]
            writers = [pid for pid in pids if pid not in trainers]
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
        if who != "trainers":
            cut.update(root.glob("global_step_*/.actor.*.partial"))
        now = _check(root, round_, world_size)  # while an orphaned writer may still be at work
        assert now >= step, f"round {round_}: from step {step} back to {now}"
        step = now
    return step, len(cut)


def _end_writers(root: Path) -> None:
    _kill(_pids(root)[1:])


def test_a_few_kills(tmp_path: Path) -> None:
    try:
        assert _rounds(tmp_path, 3, 1, longest_s=3)[0] > 0
    finally:
        _end_writers(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [1, 2])
def test_fifty_kills(tmp_path: Path, world_size: int) -> None:
    try:
        step, num_cut = _rounds(tmp_path, 50, world_size)
        print(f"{world_size} ranks, 50 kills: {num_cut} saves were cut off, the run came to step {step}")
        assert step >= 10 and num_cut >= 10
    finally:
        _end_writers(tmp_path)
