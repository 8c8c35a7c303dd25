"""Weights by handles of another process's memory on the same device: on a GPU, CUDA IPC."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp

from tools.workshop.gpu_day.engines import new_llm
from tools.workshop.gpu_day.rows import Rows
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerSendWeightsArgs,
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.checkpoint_reader import iterate_dummy
from vllm.model_executor.model_loader.digest import differences, digest

TIMEOUT_S = 60
_REFERENCE = "vllm.ops.reference:rollout_ops"


def weights_of_another_process(raw: dict[str, Any], device: str, rows: Rows) -> None:
    """An engine has a trainer's weights, and keeps them when the trainer changes its own."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    trainer = context.Process(target=_train, args=(raw, device, there), daemon=True)
    trainer.start()
    there.close()
    llm = new_llm(raw, device, _REFERENCE, "float32", weight_transfer_config={"backend": "ipc"})
    problems = [f"the trainer's process sent nothing in {TIMEOUT_S} s"]
    try:
        if here.poll(TIMEOUT_S):
            llm.update_weights({"update_info": here.recv()})
            here.send("received")
            problems = differences(here.recv(), llm.weights_digest())
    except (EOFError, RuntimeError, ValueError) as error:  # the trainer ended, or its memory cannot be opened
        problems = [f"{type(error).__name__}: {error}"]
    trainer.kill()
    trainer.join()
    llm.shutdown()
    rows.holds("weights of another process by its handles", not problems, "; ".join(problems[:3]))


def _train(raw: dict[str, Any], device: str, connection: Connection) -> None:
    llm = new_llm(raw, device, _REFERENCE, "float32")
    weights = {name: value.to(device) for name, value in iterate_dummy(llm.core.worker.model.weight_views, seed=1)}
    wanted = {name: digest(name, value) for name, value in weights.items()}

    def send(info: IPCWeightTransferUpdateInfo) -> None:
        connection.send(info)
        connection.recv()

    IPCWeightTransferEngine.trainer_send_weights(weights.items(), IPCTrainerSendWeightsArgs(send))
    for value in weights.values():
        value.zero_()
    llm.core.platform.synchronize()
    connection.send(wanted)
    connection.poll(TIMEOUT_S)  # the engine may still compare
