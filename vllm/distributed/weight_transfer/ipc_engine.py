"""Weights by reference to a trainer's memory on the same device: CUDA IPC, or shared memory on a CPU."""

from __future__ import annotations

import base64
import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, rebuild_tensor, reduce_tensor

from vllm.platforms import Platform, resolve_platform

PICKLES_SWITCH = "VLLM_ALLOW_INSECURE_SERIALIZATION"


@dataclass(frozen=True)
class IPCWeightTransferUpdateInfo:
    """N weights, whole and under their Hugging Face names.

    Attributes:
        names, dtype_names, shapes: of each; dtypes as in torch, "bfloat16".
        ipc_handles: of each, by the device's UUID: what ``torch.multiprocessing.reductions.reduce_tensor`` returns.
        ipc_handles_pickled: the same in base64; opened only with VLLM_ALLOW_INSECURE_SERIALIZATION=1, since a pickle
            runs what its sender wrote.
    """

    names: Sequence[str]
    dtype_names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    ipc_handles: Sequence[Mapping[str, tuple[Callable[..., Tensor], tuple[Any, ...]]]] | None = None
    ipc_handles_pickled: str | None = None


@dataclass(frozen=True)
class IPCTrainerSendWeightsArgs:
    """How a trainer's weights reach an engine.

    send_mode: called with each `IPCWeightTransferUpdateInfo`; it returns when `LLM.update_weights` has, in the engine's
        process, by whatever transport the two have.
    """

    send_mode: Callable[[IPCWeightTransferUpdateInfo], object]

    def __post_init__(self) -> None:
        if not callable(self.send_mode):
            raise ValueError(
                f"send_mode={self.send_mode!r} is not supported: give a function that passes the update info on to "
                "LLM.update_weights, such as lambda info: ray.get(llm.update_weights.remote({'update_info': info}))"
            )


class IPCWeightTransferEngine:
    """The engine's side: tensors over the memory that a trainer's handles refer to."""

    def __init__(self, platform: Platform, device: torch.device) -> None:
        self._device = device
        self._uuid = _uuid(platform, device)
        self.is_updating = False  # between start_weight_update and finish_weight_update

    @staticmethod
    def trainer_send_weights(iterator: Iterable[tuple[str, Tensor]], trainer_args: IPCTrainerSendWeightsArgs) -> None:
        """Send (hf_name, tensor) pairs of this process's device; they may change when it returns.

        All of them stay in memory until then: several calls between `LLM.start_weight_update` and
        `finish_weight_update` bound that.
        """
        weights = [(name, tensor.detach()) for name, tensor in iterator]
        handles = [{_uuid(resolve_platform(t.device.type), t.device): reduce_tensor(t)} for _, t in weights]
        names, dtypes = [name for name, _ in weights], [str(t.dtype).removeprefix("torch.") for _, t in weights]
        shapes = [tuple(tensor.shape) for _, tensor in weights]
        trainer_args.send_mode(IPCWeightTransferUpdateInfo(names, dtypes, shapes, handles))

    def tensors(self, update_info: IPCWeightTransferUpdateInfo | Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """(hf_name, tensor) pairs over the trainer's memory, all checked; keep them until their copies have run.

        ValueError for a count, a shape, a dtype, a device or a handle that is not as announced.
        """
        info = update_info if isinstance(update_info, IPCWeightTransferUpdateInfo) else _read(update_info)
        handles = _unpickled(info)
        counts = [len(info.names), len(info.dtype_names), len(info.shapes), len(handles)]
        if len(set(counts)) != 1:
            raise ValueError(
                f"update_info: names, dtype_names, shapes and ipc_handles have {counts} items, not as many"
            )
        named = zip(info.names, info.dtype_names, info.shapes, handles, strict=True)
        return [(name, self._tensor(name, dtype, tuple(shape), by_uuid)) for name, dtype, shape, by_uuid in named]

    def _tensor(self, name: str, dtype_name: str, shape: tuple[int, ...], by_uuid: Mapping[str, Any]) -> Tensor:
        handle = {uuid.removeprefix("GPU-"): handle for uuid, handle in by_uuid.items()}.get(self._uuid)
        if handle is None:
            raise ValueError(
                f"{name}: handles of the devices {', '.join(by_uuid) or 'none'}, and this engine is on {self._uuid}: "
                "trainer and engine share a device"
            )
        tensor = _rebuilt(name, handle, self._device)
        if tensor.shape != shape or str(tensor.dtype) != f"torch.{dtype_name}":
            found = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            raise ValueError(f"{name}: the handle is of {found}, announced is {shape} {dtype_name}")
        return tensor


def _uuid(platform: Platform, device: torch.device) -> str:
    uuid = platform.device_uuid(device)
    if uuid is None:
        raise ValueError(
            f"weight_transfer_config: processes cannot share memory of {platform.name}; use update_weights"
        )
    return uuid


def _read(update_info: Mapping[str, Any]) -> IPCWeightTransferUpdateInfo:
    try:
        return IPCWeightTransferUpdateInfo(**update_info)
    except TypeError as error:  # a field that is missing or unknown
        raise ValueError(f"update_info: {error}") from None


def _unpickled(info: IPCWeightTransferUpdateInfo) -> Sequence[Mapping[str, Any]]:
    if (info.ipc_handles is None) == (info.ipc_handles_pickled is None):
        raise ValueError("update_info: give ipc_handles or ipc_handles_pickled")
    if info.ipc_handles_pickled is None:
        return info.ipc_handles or []
    if os.environ.get(PICKLES_SWITCH) != "1":
        raise ValueError(
            "update_info: ipc_handles_pickled is not opened, since a pickle can run any code: pass ipc_handles, or set "
            f"{PICKLES_SWITCH}=1 where nobody else can reach the engine"
        )
    handles: Sequence[Mapping[str, Any]] = pickle.loads(base64.b64decode(info.ipc_handles_pickled))
    return handles


def _rebuilt(name: str, handle: tuple[Callable[..., Tensor], tuple[Any, ...]], device: torch.device) -> Tensor:
    """The tensor of a handle; ``device`` has another number in the trainer's process."""
    rebuild, values = handle
    if rebuild not in (rebuild_cuda_tensor, rebuild_tensor):
        raise ValueError(f"{name}: the handle is not one of torch.multiprocessing.reductions.reduce_tensor")
    bound = inspect.signature(rebuild).bind(*values)
    if rebuild is rebuild_cuda_tensor:
        bound.arguments["storage_device"] = device.index
    tensor: Tensor = rebuild(*bound.args)
    return tensor.detach()
