"""Kinds of devices, chosen by name or by a dotted "module:Class" provider."""

from __future__ import annotations

import importlib

import torch

from vllm.platforms.interface import CapturedGraph, DeviceMemory, GraphPool, Platform

BUILTIN_PLATFORMS = {
    "cpu": "vllm.platforms.cpu:CpuPlatform",
    "cuda": "vllm.platforms.cuda:CudaPlatform",
    "npu": "vllm_ascend.platform:NPUPlatform",
}


def resolve_platform(device: str | None) -> Platform:
    """The platform called `device` ("cpu", "cuda", "npu" or "module:Class").

    None takes cuda when there is one, else cpu.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    provider = BUILTIN_PLATFORMS.get(device, device)
    module_name, _, class_name = provider.partition(":")
    if not class_name:
        raise ValueError(f"device={device!r}: expected one of {', '.join(BUILTIN_PLATFORMS)} or 'module:Class'")
    try:
        platform = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"device={device!r}: {provider} cannot be loaded: {error}") from error
    if not isinstance(platform, Platform):
        raise ValueError(f"device={device!r}: {provider} is not a vllm.platforms.Platform")
    return platform


__all__ = ["BUILTIN_PLATFORMS", "DeviceMemory", "GraphPool", "Platform", "CapturedGraph", "resolve_platform"]
