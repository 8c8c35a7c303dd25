"""A trainer's whole step on real ranks: the controller here, a gloo process for each rank, and what each rank calls."""

from __future__ import annotations

import os
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple, cast

from tests.parallel.launcher import run_ranks
from tools.plan.collectives import Collective, CollectiveLog
from verl.single_controller.base import Worker, WorkerGroup
from verl.single_controller.base.worker_group import PendingCall
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.main_ppo import worker_classes
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.reward_process import make_reward_fn
from verl.utils.tokenizer import hf_tokenizer

TIMEOUT_S = 120


class RankStep(NamedTuple):
    """calls: of one rank in a step, in order · spans: names of its phases, in the order of their ends."""

    calls: list[Collective]
    spans: list[str]


class SocketGroup(WorkerGroup):
    """Ranks that were started by somebody else and have called here; each takes one call at a time, in order."""

    def __init__(self, worker_class: type[Worker], files: list[BinaryIO]) -> None:
        super().__init__("ranks", worker_class, len(files))
        self._files = files

    def run(
        self,
        method: str,
        per_rank: list[tuple[tuple, dict[str, Any]]],
        *,
        ranks: list[int],
        keep: list[bool],
        timeout_s: float | None,
    ) -> PendingCall:
        for rank, (args, kwargs) in zip(ranks, per_rank, strict=True):
            _send(self._files[rank], (method, args, kwargs))

        def wait() -> list[Any]:
            answers = [pickle.load(self._files[rank]) for rank in ranks]
            return [answer if is_kept else None for answer, is_kept in zip(answers, keep, strict=True)]

        return PendingCall(wait, is_done=lambda: True)  # so that whoever looks waits

    def shutdown(self) -> None:
        """No further call comes."""
        for file in self._files:
            file.close()


def meet(server: socket.socket, world_size: int) -> list[BinaryIO]:
    """The ranks' connections in order, when every rank has called."""
    files: dict[int, BinaryIO] = {}
    while len(files) < world_size:
        connection, _ = server.accept()
        connection.settimeout(TIMEOUT_S)
        file = cast(BinaryIO, connection.makefile("rwb"))
        connection.close()  # the file goes on
        files[pickle.load(file)] = file
    return [files[rank] for rank in range(world_size)]


def train_a_step(config: PPOTrainerConfig) -> list[RankStep]:
    """What ``RayPPOTrainer.fit`` makes the ranks do in a run of one step, by rank."""
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    reward_fn = make_reward_fn(config, tokenizer)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(TIMEOUT_S)
        address = server.getsockname()
        ranks = pool.submit(run_ranks, serve, config.num_devices, address, config, timeout_s=TIMEOUT_S)
        training, generating = worker_classes(config)
        trainer = RayPPOTrainer(config, tokenizer, training, reward_fn)
        try:
            files, first = meet(server, config.num_devices), config.trainer.world_size
            trainer.workers = SocketGroup(training, files[:first])
            if generating is not None:
                trainer.rollout_workers = SocketGroup(generating, files[first:])
            trainer.use_workers()
            trainer.fit()
        except (EOFError, OSError):
            ranks.result()  # a rank has failed, and says why
            raise
        finally:
            trainer.shutdown()
            reward_fn.close()
        return ranks.result()


def serve(address: tuple[str, int], config: PPOTrainerConfig) -> RankStep:
    """Runs in every rank: makes the calls that come, and notes the collectives of all of them together."""
    training, generating = worker_classes(config)
    has_engine_alone = int(os.environ["RANK"]) >= config.trainer.world_size
    chosen = (generating, "rollout") if generating is not None and has_engine_alone else (training, "actor_rollout_ref")
    worker = chosen[0](config, chosen[1])
    log = CollectiveLog()
    with socket.create_connection(address, TIMEOUT_S) as connection, connection.makefile("rwb") as stream:
        controller = cast(BinaryIO, stream)
        _send(controller, worker.rank)
        worker.init_model()
        worker.begin_timeline()
        with log:
            while (call := _next(controller)) is not None:
                method, args, kwargs = call
                _send(controller, getattr(worker, method)(*args, **kwargs))
        spans = [span.name for span in worker.take_timeline().spans]
    worker.row_store.close()
    return RankStep(log.calls, spans)


def _send(file: BinaryIO, message: Any) -> None:
    pickle.dump(message, file)
    file.flush()


def _next(file: BinaryIO) -> Any:
    """None when the other side has closed."""
    try:
        return pickle.load(file)
    except EOFError:
        return None
