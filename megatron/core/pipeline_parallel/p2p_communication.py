"""Sends activations to the next pipeline stage and their gradients back; shapes are known to both sides beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.parallel_state import ProcessGroups

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PipelineLink:
    """The neighbours of one stage and what travels between them.

    prev_rank, next_rank: global ranks, None at the ends of the pipeline · dtype, device: of every tensor sent or
    received. All functions below return None, and send nothing, where there is no neighbour.
    """

    group: dist.ProcessGroup
    prev_rank: int | None
    next_rank: int | None
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(groups: ProcessGroups, dtype: torch.dtype, device: torch.device) -> PipelineLink:
        """The link of this rank's stage."""
        stage = groups.coords.pp
        prev_rank = None if groups.is_first_stage else dist.get_global_rank(groups.pp, stage - 1)
        next_rank = None if groups.is_last_stage else dist.get_global_rank(groups.pp, stage + 1)
        return PipelineLink(groups.pp, prev_rank, next_rank, dtype, device)


def recv_forward(tensor_shape: Shape, link: PipelineLink) -> torch.Tensor | None:
    """Input of this stage, ``tensor_shape``, made by the previous one; a leaf that collects its gradient."""
    return _exchange(link, recv_prev=tensor_shape)


def send_forward(output_tensor: torch.Tensor | None, link: PipelineLink) -> None:
    """Hand this stage's output to the next stage."""
    _exchange(link, send_next=output_tensor)


def recv_backward(tensor_shape: Shape, link: PipelineLink) -> torch.Tensor | None:
    """Gradient of this stage's output, ``tensor_shape``, made by the next stage."""
    return _exchange(link, recv_next=tensor_shape)


def send_backward(input_tensor_grad: torch.Tensor | None, link: PipelineLink) -> None:
    """Hand the gradient of this stage's input to the previous stage."""
    _exchange(link, send_prev=input_tensor_grad)


def send_forward_recv_backward(
    output_tensor: torch.Tensor | None, tensor_shape: Shape, link: PipelineLink
) -> torch.Tensor | None:
    """Exchange with the next stage: an output for the gradient (``tensor_shape``) of an earlier output."""
    return _exchange(link, send_next=output_tensor, recv_next=tensor_shape)


def send_backward_recv_forward(
    input_tensor_grad: torch.Tensor | None, tensor_shape: Shape, link: PipelineLink
) -> torch.Tensor | None:
    """Exchange with the previous stage: an input's gradient for a later input (``tensor_shape``)."""
    return _exchange(link, send_prev=input_tensor_grad, recv_prev=tensor_shape)


def _exchange(
    link: PipelineLink,
    *,
    send_prev: torch.Tensor | None = None,
    recv_prev: Shape | None = None,
    send_next: torch.Tensor | None = None,
    recv_next: Shape | None = None,
) -> torch.Tensor | None:
    """Post every transfer at once, then wait for all: two neighbours that both send cannot block one another."""
    ops: list[dist.P2POp] = []
    received: torch.Tensor | None = None
    for peer, send, shape in ((link.prev_rank, send_prev, recv_prev), (link.next_rank, send_next, recv_next)):
        if peer is None:
            continue
        if send is not None:
            assert send.dtype == link.dtype, f"stage output is {send.dtype}, the pipeline carries {link.dtype}"
            ops.append(dist.P2POp(dist.isend, send.detach().contiguous(), peer, link.group))
        if shape is not None:
            received = torch.empty(shape, dtype=link.dtype, device=link.device, requires_grad=shape is recv_prev)
            ops.append(dist.P2POp(dist.irecv, received.detach(), peer, link.group))
    if ops:
        for request in dist.batch_isend_irecv(ops):
            request.wait()
    return received
