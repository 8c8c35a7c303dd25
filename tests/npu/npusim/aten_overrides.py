"""Kernels of the npu backend that have no CPU kernel of the same name, written with ops that have one."""

import torch

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


def install() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("matmul_backward", matmul_backward, "PrivateUse1", allow_override=True)
    _registrations.append(library)
