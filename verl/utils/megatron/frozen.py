"""A frozen model that lives on the host and visits the device to be read."""

from __future__ import annotations

import torch
from torch import nn


class HostResidentModel:
    """Keeps the weights of a frozen module on the host; on the device only between ``onload`` and ``offload``.

    Args:
        module: parameters and buffers are final; their device storage is freed at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval().requires_grad_(False)
        self._tensors = [*module.parameters(), *module.buffers()]
        pin = any(tensor.device.type != "cpu" for tensor in self._tensors)
        self._host = [_host_copy(tensor, pin) for tensor in self._tensors]
        self.is_onloaded = True
        self.offload()

    @property
    def host_bytes(self) -> int:
        return sum(host.nbytes for host in self._host)

    @torch.no_grad()
    def onload(self) -> None:
        if self.is_onloaded:
            return
        for tensor, host in zip(self._tensors, self._host, strict=True):
            tensor.untyped_storage().resize_(host.numel() * host.element_size())
            tensor.copy_(host, non_blocking=True)
        self.is_onloaded = True

    def offload(self) -> None:
        """Frees the device storage; nothing is copied, the host has the weights."""
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self.is_onloaded = False


def _host_copy(tensor: torch.Tensor, pin: bool) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
    return host.copy_(tensor.detach())
