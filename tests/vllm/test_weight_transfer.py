"""Weights from a trainer in another process by handles of its memory: vLLM's requests over two real processes."""

from __future__ import annotations

import base64
import functools
import inspect
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from tests.parallel.preloaded import PRELOADED
from tests.vllm.fp8_tiny import WIDE, fp8_tensors, write_directory
from tests.vllm.test_lifecycle import build, tokens_of
from tests.vllm.tiny import TINY, random_weights, write_checkpoint
from vllm import LLM
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import ipc_engine
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerSendWeightsArgs,
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.digest import differences, digest
from vllm_ascend.platform import NPUPlatform

IPC = WeightTransferConfig(backend="ipc")
TIMEOUT_S = 120


def serve(connection: Connection, path: str, settings: dict[str, Any]) -> None:
    """The engine's process: it answers (method, argument) with the result or the text of the error."""
    torch.set_num_threads(1)
    llm = build(path, weight_transfer_config=IPC, **settings)
    while (call := connection.recv()) is not None:
        method, arguments = call
        try:
            result = shared_memory() if method == "shared_memory" else getattr(llm, method)(*arguments)
            connection.send((True, result))
        except (ValueError, RuntimeError) as error:
            connection.send((False, str(error)))
        del call, arguments  # the handles refer to the trainer's memory


def shared_memory() -> tuple[int, int]:
    """This process's maps of torch's shared memory, and its open files."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return maps.count("/torch_"), len(os.listdir("/proc/self/fd"))


@contextmanager
def engine(path: str, **settings: Any) -> Iterator[Callable[..., Any]]:
    """Calls a method of an LLM in another process."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, path, settings), daemon=True)
    process.start()
    there.close()

    def call(method: str, *arguments: Any) -> Any:
        here.send((method, arguments))
        assert here.poll(TIMEOUT_S), f"{method} did not return"
        is_well, result = here.recv()
        if not is_well:
            raise RuntimeError(result)
        return result

    try:
        yield call
        here.send(None)
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        here.close()


def send(call: Callable[..., Any], weights: dict[str, Tensor], *version: int) -> None:
    def request(info: IPCWeightTransferUpdateInfo) -> None:
        call("update_weights", {"update_info": info}, *version)

    IPCWeightTransferEngine.trainer_send_weights(weights.items(), IPCTrainerSendWeightsArgs(request))


@pytest.mark.parametrize("is_fp8", [False, True])
def test_an_engine_of_another_process_reads_the_trainers_memory_and_keeps_nothing(is_fp8: bool, tmp_path: Path) -> None:
    if is_fp8:
        path = write_directory(tmp_path, fp8_tensors(random_weights(WIDE)))
        versions = [fp8_tensors(random_weights(WIDE, seed=seed)) for seed in (1, 2)]
    else:
        path = write_checkpoint(tmp_path)
        versions = [random_weights(TINY, seed=seed) for seed in (1, 2)]
    trained = {name: tensor.clone().share_memory_() for name, tensor in versions[0].items()}
    expected = [{name: digest(name, tensor) for name, tensor in version.items()} for version in versions]
    with engine(path, dtype="float32") as call:
        call("init_weight_transfer_engine", WeightTransferInitRequest())
        before = call("shared_memory")
        send(call, trained, 7)
        for name, tensor in trained.items():
            tensor.view(torch.uint8).zero_()  # the engine has copies
            tensor.copy_(versions[1][name])
        assert not differences(expected[0], call("weights_digest"))
        assert call("shared_memory") == before and before[0] == 0
        call("start_weight_update")
        names = list(trained)
        for part in (names[:5], names[5:]):
            send(call, {name: trained[name] for name in part})
        call("finish_weight_update", 8)
        assert not differences(expected[1], call("weights_digest"))
        assert call("shared_memory") == before
        call("start_weight_update")
        with pytest.raises(RuntimeError, match="weights were not loaded"):
            call("finish_weight_update")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    made = build(write_checkpoint(tmp_path_factory.mktemp("model")), weight_transfer_config={"backend": "ipc"})
    yield made
    made.shutdown()


@pytest.fixture
def info() -> IPCWeightTransferUpdateInfo:
    """All weights of another seed, as a trainer announces them."""
    sent: list[IPCWeightTransferUpdateInfo] = []
    IPCWeightTransferEngine.trainer_send_weights(
        random_weights(TINY, seed=1).items(), IPCTrainerSendWeightsArgs(sent.append)
    )
    return sent[0]


def test_handles_that_are_not_as_announced_change_nothing(llm: LLM, info: IPCWeightTransferUpdateInfo) -> None:
    before = tokens_of(llm)
    assert info.ipc_handles is not None
    (handle,), others = info.ipc_handles[0].values(), list(info.ipc_handles[1:])
    foreign: Any = (os.system, ("true",))
    name, shape = info.names[0], tuple(info.shapes[0])
    wrong = {
        "names, dtype_names, shapes and ipc_handles have": replace(info, names=info.names[1:]),
        rf"{name}: the handle is of \({shape[0]}, .*, announced is \(3, 3\)": replace(
            info, shapes=[(3, 3), *info.shapes[1:]]
        ),
        "announced is .* float16": replace(info, dtype_names=["float16", *info.dtype_names[1:]]),
        f"{name}: handles of the devices GPU-1, and this engine is on cpu": replace(
            info, ipc_handles=[{"GPU-1": handle}, *others]
        ),
        f"{name}: the handle is not one of": replace(info, ipc_handles=[{"cpu": foreign}, *others]),
        "give ipc_handles or": replace(info, ipc_handles=None),
        "not opened, since a pickle can run any code": replace(info, ipc_handles=None, ipc_handles_pickled="gA=="),
    }
    for message, update in wrong.items():
        with pytest.raises(ValueError, match=message):
            llm.update_weights(WeightTransferUpdateRequest(update))
    with pytest.raises(ValueError, match=r"update_info: .*ranks"):
        llm.update_weights({"update_info": vars(info) | {"ranks": 1}})
    with pytest.raises(RuntimeError, match="without start_weight_update"):
        llm.finish_weight_update()
    with pytest.raises(ValueError, match="is_checkpoint_format=False"):
        llm.start_weight_update(is_checkpoint_format=False)
    assert tokens_of(llm) == before and llm.policy_version == 0


def test_pickled_handles_are_opened_where_the_switch_says_so(
    llm: LLM, info: IPCWeightTransferUpdateInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = base64.b64encode(pickle.dumps(info.ipc_handles)).decode()
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    llm.update_weights({"update_info": vars(info) | {"ipc_handles": None, "ipc_handles_pickled": pickled}}, 3)
    expected = {name: digest(name, tensor) for name, tensor in random_weights(TINY, seed=1).items()}
    assert not differences(expected, llm.weights_digest()) and llm.policy_version == 3


def test_a_gpu_has_the_engines_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process's first GPU may be another one's third: the handle has the trainer's number."""
    given: list[Any] = []

    @functools.wraps(rebuild_cuda_tensor)
    def rebuild(*values: Any) -> Tensor:
        given.extend(values)
        return torch.zeros(2, 3)

    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", rebuild)
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    values = tuple(2 if name == "storage_device" else name for name in names)
    assert ipc_engine._rebuilt("a", (rebuild, values), torch.device("cuda", 0)).shape == (2, 3)
    assert given == [0 if name == "storage_device" else name for name in names] and 0 in given


def test_what_there_is_no_transfer_for_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="backend='nccl' is not supported, expected 'ipc'"):
        build(path, weight_transfer_config=WeightTransferConfig())
    with pytest.raises(ValueError, match="build the LLM with weight_transfer_config="):
        build(path).init_weight_transfer_engine()
    with pytest.raises(ValueError, match="send_mode='http' is not supported: give a function"):
        IPCTrainerSendWeightsArgs("http")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="processes cannot share memory of npu; use update_weights"):
        IPCWeightTransferEngine(NPUPlatform(), torch.device("cpu"))
