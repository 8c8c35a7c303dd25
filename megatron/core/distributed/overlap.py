"""Collectives of data parallelism beside computing: buckets reduced during backward, gathered during forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer


class GradSync:
    """Starts the reduction of each bucket when the last backward of a step has filled it.

    Buckets are started strictly in the order in which a backward pass fills them (the reverse of the parameters'), a
    full one waiting for those before it: the ranks' collectives meet in the same order, whatever order their gradients
    come in, and also when a parameter takes no part on one of them.
    """

    def __init__(self, buffers: Sequence[ParamAndGradBuffer], start: Callable[[ParamAndGradBuffer], None]) -> None:
        self._order = sorted(buffers, key=lambda buffer: buffer.first_param, reverse=True)
        self._start = start
        self.reset()

    def reset(self) -> None:
        """Begin a new step: no bucket is full, and none of a step that was given up is still on its way."""
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
        """Start what no gradient has started and wait for all."""
        while self._waiting:
            self._start(self._waiting.pop(0))
        for buffer in self._order:
            buffer.wait_for_grads()

    def has_started(self, buffer: ParamAndGradBuffer) -> bool:
        """Whether the gradients of ``buffer`` must not be written any more."""
        return buffer not in self._waiting


def wait_before_use(module: nn.Module, buffers: Sequence[ParamAndGradBuffer]) -> None:
    """Make every part of ``module``, before its forward, wait for the buckets that hold its own parameters.

    A part that reads a parameter of a part inside it says so in ``parameters_read_here`` (their names within it).
    Reading or loading a state dict waits for all buckets. Frozen parameters are in no bucket.
    """
    buffer_of = {name: buffer for buffer in buffers for name in buffer.param_ranges}
    for prefix, part in module.named_modules():
        read = [name for name, _ in part.named_parameters(recurse=False)]
        read.extend(getattr(part, "parameters_read_here", ()))
        names = [f"{prefix}.{name}" if prefix else name for name in read]
        own = list({id(buffer_of[name]): buffer_of[name] for name in names if name in buffer_of}.values())
        if own:
            part.register_forward_pre_hook(_Wait(own))
    module.register_state_dict_pre_hook(_Wait(buffers))
    module.register_load_state_dict_pre_hook(_Wait(buffers))


class _Wait:
    """A hook of any kind that waits for buckets and changes nothing."""

    def __init__(self, buffers: Sequence[ParamAndGradBuffer]) -> None:
        self._buffers = buffers

    def __call__(self, *_: Any) -> None:
        for buffer in self._buffers:
            buffer.wait_for_params()
