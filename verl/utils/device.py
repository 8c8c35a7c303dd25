"""The device of a run, its torch module, backend and op tables; only what the device needs is imported."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from types import ModuleType

import torch

from megatron.core.parallel_state import GroupBackend
from verl.trainer.config import TrainerConfig
from verl.utils.import_utils import load_provider

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_TRAIN_OPS = {
    "cpu": "megatron.core.ops.cpu:cpu_ops",
    "cuda": "megatron.core.ops.cuda:cuda_ops",
    "npu": "mindspeed.ops:train_ops",
}
_ROLLOUT_OPS = {
    "cpu": "vllm.ops.cpu:default_ops",
    "cuda": "vllm.ops.cuda:rollout_ops",
    "npu": "vllm_ascend.ops:rollout_ops",
}
_GROUP_BACKENDS = {"npu": "mindspeed.core.hccl_buffer:HcclGroups"}
EXACT_OPS = ("verl.exact_mode.training_ops:exact_ops", "verl.exact_mode.rollout_ops:rollout_ops")


def resolve_device(name: str) -> str:
    """``auto`` to the accelerator this machine has (npu, then cuda, then cpu); other names as they are."""
    if name != "auto":
        return name
    has_npu = any(entry.startswith("davinci") and entry[7:].isdigit() for entry in os.listdir("/dev"))
    if has_npu and importlib.util.find_spec("torch_npu") is not None:
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def dist_backend(device: str) -> str:
    return _BACKENDS[device]


def device_module(device: str) -> ModuleType | None:
    """``torch.cuda`` or ``torch.npu``; None on the CPU, which has no memory of its own to ask about.

    Raises:
        ValueError: this torch has no such device.
    """
    if device == "cpu":
        return None
    module: ModuleType | None = getattr(torch, device, None)
    if module is None:
        raise ValueError(
            f"trainer.device={device}, but torch {torch.__version__} has no torch.{device}; install torch_npu beside "
            "it (requirements/npu.txt) and leave TORCH_DEVICE_BACKEND_AUTOLOAD unset: torch loads the plug-in itself"
        )
    return module


def ops_providers(trainer: TrainerConfig, device: str) -> tuple[str, str]:
    """``module:function`` providers of the training and the rollout op tables for ``device``."""
    if trainer.exact_log_probs:
        if device != "cpu":
            raise ValueError(
                f"trainer.exact_log_probs=True on {device}: only a CPU has exact ops; set trainer.device=cpu"
            )
        return EXACT_OPS
    return (trainer.train_ops or _TRAIN_OPS[device], trainer.rollout_ops or _ROLLOUT_OPS[device])


def group_backend(device: str) -> GroupBackend:
    """What the training groups ask of the device's backend."""
    provider = _GROUP_BACKENDS.get(device)
    backend: GroupBackend = GroupBackend() if provider is None else load_provider(provider)()
    return backend


def init_device(device_type: str) -> torch.device:
    """Claims this process's device: the launcher shows each process all devices of its node, LOCAL_RANK picks one."""
    accelerator = device_module(device_type)
    if accelerator is None:
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    accelerator.set_device(local_rank)
    return torch.device(device_type, local_rank)


def op_tables_text(tables: Mapping[str, Mapping[str, str]]) -> str:
    """One line per entry under the name of its engine; ``tables`` is engine -> entry -> native, reference or parts."""
    width = max((len(name) for names in tables.values() for name in names), default=0)
    lines = []
    for engine, names in tables.items():
        lines.append(f"{engine} ops:")
        lines += [f"  {name:<{width}}  {kind}" for name, kind in sorted(names.items())]
    return "\n".join(lines)
