"""Kernels of the npu backend that no CPU kernel can stand for, and storages that grow without values."""

import os
from typing import Any

import torch

from npusim.reference import reference

_registrations: list[torch.library.Library] = []


def matmul_backward(
    grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of torch.matmul for any pair of ranks that it takes."""
    left_2d = left.unsqueeze(0) if left.dim() == 1 else left
    right_2d = right.unsqueeze(1) if right.dim() == 1 else right
    if left.dim() == 1:
        grad = grad.unsqueeze(-2) if right.dim() > 1 else grad.reshape(1, 1)
    if right.dim() == 1 and left.dim() > 1:
        grad = grad.unsqueeze(-1)
    grad_left = torch.matmul(grad, right_2d.mT).sum_to_size(left_2d.shape).reshape(left.shape) if mask[0] else None
    grad_right = torch.matmul(left_2d.mT, grad).sum_to_size(right_2d.shape).reshape(right.shape) if mask[1] else None
    return grad_left, grad_right


def dtype_cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch_npu's own cast, which its collectives use for types that HCCL does not reduce."""
    return tensor.to(dtype)


def install() -> None:
    reference("_npu_dtype_cast")(dtype_cast)
    library = torch.library.Library("aten", "IMPL")
    library.impl("matmul_backward", matmul_backward, "PrivateUse1", allow_override=True)
    _registrations.append(library)
    if os.environ.get("FAKE_NPU_POISON", "0") != "0":
        poison_grown_storages()


def poison_grown_storages() -> None:
    """Lets `storage.resize_` show the use of what it did not write, as `torch.empty` does on the simulator.

    The allocator often gives the same block back, so without this a storage that was freed and made again would still
    hold its values. This replaces a method of torch; no dispatcher op is called there that could be replaced instead.
    """
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        result = original(self, size)
        if self.device.type == "npu" and self.nbytes() > before:
            grown = torch.empty(0, dtype=torch.uint8, device=self.device)
            grown.set_(self, before, (self.nbytes() - before,))
            torch.ops.npusim.as_cpu(grown).fill_(0xFF)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
