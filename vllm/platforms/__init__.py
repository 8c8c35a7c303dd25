"""Kinds of devices, chosen by name or by a dotted "module:Class" provider."""

from __future__ import annotations

import pkgutil

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
    try:
        platform = pkgutil.resolve_name(provider)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        known = ", ".join(BUILTIN_PLATFORMS)
        raise ValueError(
            f"device={device!r} cannot be loaded: {error}; expected one of {known} or 'module:Class'"
        ) from error
    if not isinstance(platform, Platform):
        raise ValueError(f"device={device!r}: {provider} is not a vllm.platforms.Platform")
    return platform


__all__ = ["BUILTIN_PLATFORMS", "DeviceMemory", "GraphPool", "Platform", "CapturedGraph", "resolve_platform"]
