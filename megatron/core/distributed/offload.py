"""Flat tensors whose device storage can be freed and allocated again while all views of it stay valid."""

from __future__ import annotations

import torch
from torch import Tensor


class OffloadableTensor:
    """Owns the storage of ``tensor`` (flat, contiguous, not itself a view).

    While it is offloaded the storage has 0 bytes and no view may be read or written. ``onload`` gives the storage its
    size back, so views made before see the restored values.
    """

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dim() == 1 and tensor.untyped_storage().nbytes() == tensor.nbytes, "needs a storage of its own"
        self.tensor = tensor
        self._host: Tensor | None = None
        self._num_bytes = tensor.nbytes
        self.is_resident = True

    @property
    def current(self) -> Tensor:
        """The tensor that holds the values: the device tensor, or its host copy while offloaded."""
        if self.is_resident:
            return self.tensor
        assert self._host is not None, "the values were dropped, not copied"
        return self._host

    @property
    def device_bytes(self) -> int:
        """The bytes that it holds on the device now."""
        return self.tensor.untyped_storage().nbytes()

    @property
    def host_bytes(self) -> int:
        """The bytes that it holds on the host now, for an offload or cached after one."""
        return 0 if self._host is None else self._host.nbytes

    def offload(self, keep_values: bool = True) -> None:
        """Copy the values to the host, if they are still needed, and free the storage."""
        if not self.is_resident:
            return
        if keep_values:
            if self._host is None:
                # Pinned memory makes the copies fast, but it is slow to allocate, so it is kept for the next offload.
                on_accelerator = self.tensor.device.type != "cpu"
                self._host = torch.empty_like(self.tensor, device="cpu", pin_memory=on_accelerator)
            self._host.copy_(self.tensor)
        self.tensor.untyped_storage().resize_(0)
        self.is_resident = False

    def onload(self, keep_values: bool = True) -> None:
        """Allocate the storage again and restore the values, or fill it with zeros."""
        if self.is_resident:
            return
        self.tensor.untyped_storage().resize_(self._num_bytes)
        self.is_resident = True
        if not keep_values:
            self.tensor.zero_()
            return
        assert self._host is not None, "the values were dropped at offload"
        self.tensor.copy_(self._host)
        if not self._host.is_pinned():
            self._host = None


class HostTensor(OffloadableTensor):
    """Values that live on the host of a device; there is nothing to offload."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.is_resident = True

    @staticmethod
    def zeros(
        numel: int, device: torch.device, dtype: torch.dtype = torch.float32, is_pinned: bool = True
    ) -> HostTensor:
        """[numel] on the host of ``device``, pinned unless that is the host itself."""
        if device.type == "meta":  # the meta device: memory is only planned
            return HostTensor(torch.zeros(numel, dtype=dtype, device=device))
        return HostTensor(torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=is_pinned and device.type != "cpu"))

    @property
    def device_bytes(self) -> int:
        """Nothing."""
        return 0

    @property
    def host_bytes(self) -> int:
        return self.tensor.nbytes

    def offload(self, keep_values: bool = True) -> None:
        """Do nothing: there is no device storage."""

    def onload(self, keep_values: bool = True) -> None:
        """Do nothing: an update copies in what it needs."""


class SharedTensor(OffloadableTensor):
    """Elements of another flat tensor, which offloads and counts them."""

    def __init__(self, whole: OffloadableTensor, start: int, stop: int) -> None:
        self.tensor = whole.tensor[start:stop]
        self._whole, self._part = whole, slice(start, stop)

    @property
    def current(self) -> Tensor:
        """The elements, where the other tensor has them now."""
        return self._whole.current[self._part]

    @property
    def device_bytes(self) -> int:
        """Nothing of its own."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Nothing of its own."""
        return 0

    def offload(self, keep_values: bool = True) -> None:
        """Do nothing: the other tensor does it."""

    def onload(self, keep_values: bool = True) -> None:
        """Do nothing: the other tensor does it."""
