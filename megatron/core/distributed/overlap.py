"""Overlaps the collectives of data parallelism: buckets are reduced during backward and gathered during forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer


class GradSync:
    """Starts the reduction of each bucket when the last backward of a step has filled it.

    Buckets start strictly in the order in which a backward pass fills them (the reverse of the parameters'), and a full
    one waits for those before it. So all ranks launch their collectives in the same order, whatever the order of their
    gradients, and also when a parameter gets no gradient on one of them.
    """

    def __init__(self, buffers: Sequence[ParamAndGradBuffer], start: Callable[[ParamAndGradBuffer], None]) -> None:
        self._order = sorted(buffers, key=lambda buffer: buffer.first_param, reverse=True)
        self._start = start
        self.reset()

    def reset(self) -> None:
        """Start a new step: no bucket is full, and no reduction of an aborted step is in flight."""
        for buffer in self._order:
            buffer.wait_for_grads()
        self._missing = {buffer.name: set(buffer.param_ranges) for buffer in self._order}
        self._waiting = list(self._order)

    def arrived(self, buffer: ParamAndGradBuffer, name: str) -> None:
        """The gradient of parameter ``name`` is complete, all micro-batches included."""
        self._missing[buffer.name].discard(name)
        while self._waiting and not self._missing[self._waiting[0].name]:
            self._start(self._waiting.pop(0))

    def finish(self) -> None:
        """Start the reductions that no gradient has started, and wait for all."""
        while self._waiting:
            self._start(self._waiting.pop(0))
        for buffer in self._order:
            buffer.wait_for_grads()

    def has_started(self, buffer: ParamAndGradBuffer) -> bool:
        """Whether the gradients of ``buffer`` must not be written any more."""
        return buffer not in self._waiting


def wait_before_use(module: nn.Module, buffers: Sequence[ParamAndGradBuffer]) -> None:
    """Make every submodule of ``module`` wait, before its forward, for the buckets that hold its own parameters.

    A module that reads a parameter of one of its submodules names it in ``parameters_read_here``. Reading or loading a
    state dict waits for all buckets. Frozen parameters are in no bucket.
    """
    buffer_of = {name: buffer for buffer in buffers for name in buffer.param_ranges}
    for prefix, part in module.named_modules():
        read = [name for name, _ in part.named_parameters(recurse=False)]
        read.extend(getattr(part, "parameters_read_here", ()))
        names = [f"{prefix}.{name}" if prefix else name for name in read]
        own = list({id(buffer_of[name]): buffer_of[name] for name in names if name in buffer_of}.values())
        if own:
            part.register_forward_pre_hook(partial(_wait, own))
    module.register_state_dict_pre_hook(partial(_wait, buffers))
    module.register_load_state_dict_pre_hook(partial(_wait, buffers))


def _wait(buffers: Sequence[ParamAndGradBuffer], *_: Any) -> None:
    """A hook of any kind that waits for ``buffers`` and changes nothing."""
    for buffer in buffers:
        buffer.wait_for_params()
