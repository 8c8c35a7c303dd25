"""Sends activations to the next pipeline stage and their gradients back; shapes are known to both sides beforehand.

There are two ways: ``PipelineLink``, which returns when everything has arrived (1F1B), and ``RingTransfers``, which
overlap with computing and also connect the last stage to the first (interleaved).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import ProcessGroups

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PipelineLink:
    """The neighbours of one stage and what travels between them.

    prev_rank, next_rank: global ranks, None at the ends of the pipeline · dtype, device: of every tensor sent or
    received. Nothing is sent or received where there is no neighbour.
    """

    group: dist.ProcessGroup
    prev_rank: int | None
    next_rank: int | None
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(groups: ProcessGroups, dtype: torch.dtype, device: torch.device) -> PipelineLink:
        """Return the link of this rank's stage."""
        stage = groups.coords.pp
        prev_rank = None if groups.is_first_stage else dist.get_global_rank(groups.pp, stage - 1)
        next_rank = None if groups.is_last_stage else dist.get_global_rank(groups.pp, stage + 1)
        return PipelineLink(groups.pp, prev_rank, next_rank, dtype, device)

    def exchange(
        self,
        *,
        send_prev: Tensor | None = None,
        recv_prev: Shape | None = None,
        send_next: Tensor | None = None,
        recv_next: Shape | None = None,
    ) -> Tensor | None:
        """Send to the neighbours and receive, from one of them, a tensor of the given shape, which is returned.

        To the next stage go outputs, to the previous one gradients of inputs; what comes from the previous stage is a
        leaf that collects its gradient. Every transfer is posted at once: two neighbours that both send cannot block
        one another.
        """
        ops: list[dist.P2POp] = []
        received: Tensor | None = None
        for peer, send, shape in ((self.prev_rank, send_prev, recv_prev), (self.next_rank, send_next, recv_next)):
            if peer is None:
                continue
            if send is not None:
                assert send.dtype == self.dtype, f"stage output is {send.dtype}, the pipeline carries {self.dtype}"
                ops.append(dist.P2POp(dist.isend, send.detach().contiguous(), peer, self.group))
            if shape is not None:
                received = torch.empty(shape, dtype=self.dtype, device=self.device, requires_grad=shape is recv_prev)
                ops.append(dist.P2POp(dist.irecv, received.detach(), peer, self.group))
        if ops:
            Receiving(dist.batch_isend_irecv(ops), f"{len(ops)} transfers with ranks {[op.peer for op in ops]}").wait()
        return received


@dataclass(frozen=True)
class Receiving:
    """Transfers in flight; ``waits_for`` names them in a hang report."""

    requests: Sequence[dist.Work]
    waits_for: str
    tensor: Tensor | None = None

    def wait(self) -> Tensor | None:
        """Return the received tensor; blocks until the peer has posted its side of the transfer."""
        for request in self.requests:
            request.wait()
        return self.tensor


class RingTransfers:
    """Transfers between the stages as a ring: forwards go to the next stage and from the last to the first.

    Every call posts its transfers and returns; a rank may have one send of each direction in flight. All ranks make
    their calls in one common order (``schedule_table.timetable``), so no rank waits for ever.
    """

    def __init__(self, groups: ProcessGroups, dtype: torch.dtype, device: torch.device) -> None:
        stage, num_stages = groups.coords.pp, groups.layout.pipeline_model_parallel_size
        self._group, self._dtype, self._device = groups.pp, dtype, device
        self._next_rank = dist.get_global_rank(groups.pp, (stage + 1) % num_stages)
        self._prev_rank = dist.get_global_rank(groups.pp, (stage - 1) % num_stages)
        self._sent: dict[bool, Receiving] = {}

    def exchange(self, is_backward: bool, output: Tensor | None, receives: Shape | None, name: str) -> Receiving | None:
        """Send ``output`` onwards (backward: a gradient back) and receive a tensor of shape ``receives``.

        Either may be None. The tensor received in the forward direction is a leaf that collects its gradient.
        """
        target, source = (self._next_rank, self._prev_rank) if not is_backward else (self._prev_rank, self._next_rank)
        ops: list[dist.P2POp] = []
        received: Tensor | None = None
        if receives is not None:
            received = torch.empty(receives, dtype=self._dtype, device=self._device, requires_grad=not is_backward)
            ops.append(dist.P2POp(dist.irecv, received.detach(), source, self._group))
        sent: Tensor | None = None
        if output is not None:
            assert output.dtype == self._dtype, f"stage output is {output.dtype}, the pipeline carries {self._dtype}"
            if is_backward in self._sent:
                self._sent.pop(is_backward).wait()
            sent = output.detach().contiguous()
            ops.append(dist.P2POp(dist.isend, sent, target, self._group))
        if not ops:
            return None
        requests = dist.batch_isend_irecv(ops)
        # The backend returns one request for each transfer, or one for the batch; the receive is the first.
        if sent is not None:
            self._sent[is_backward] = Receiving(requests[-1:], f"rank {target} to take what was sent to it", sent)
        what = "gradient of the output" if is_backward else "input"
        return (
            Receiving(requests[:1], f"{what} of {name} from rank {source}", received) if received is not None else None
        )

    def finish(self) -> None:
        for sending in self._sent.values():
            sending.wait()
        self._sent.clear()
