"""Activation recompute: keep only a function's inputs, and run it again when its gradient is needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint


def checkpoint(
    function: Callable[..., Tensor],
    *args: object,
    recompute_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Tensor:
    """Return ``function(*args)`` without saved activations; the second run happens inside ``recompute_context()``.

    The function must draw no random numbers (their state is not restored: the layers have no dropout). It may run
    collectives; every rank then runs them again in its backward pass.
    """
    output: Tensor = torch_checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), recompute_context()),
    )
    return output


class CheckpointWithoutOutput:
    """Keeps only a function's inputs for one forward and its backward, neither its activations nor its outputs.

    ``checkpoint(function, *args)`` gives the outputs; when all operations that read them have run in forward,
    ``discard_output_and_register_recompute(hook_tensor)`` frees their storage. When the gradient of ``hook_tensor``
    is known (a tensor that comes after all these operations) the function runs again: the outputs get their values
    back, at the same address or another, and its own backward what it would have saved. Inactive, or without
    gradients, it does nothing. The function must be deterministic and have no other effect; it may run collectives.

    An output that is a view keeps the whole of its storage; one that shares storage with an argument is not freed.
    It cannot run inside another recompute, whose second run would free the outputs again.
    """

    def __init__(self, is_active: bool = True) -> None:
        self.is_active = is_active and torch.is_grad_enabled()
        self._slots: list[weakref.ref[_Slot]] = []
        self._again: Callable[[], Any] | None = None
        # (which output, the output without its graph, bytes of its storage). The graph holds this object: a reference
        # back would keep both alive for ever.
        self._discarded: list[tuple[int, Tensor, int]] = []

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, which returns a tensor or a tuple of tensors."""
        if not self.is_active:
            return function(*args)
        with saved_tensors_hooks(self._put_off, self._fetch):
            outputs = function(*args)

        def again() -> Any:
            inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args]
            return function(*inputs)

        self._again = again
        needed = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        self._discarded = [
            (place, x.data, x.untyped_storage().nbytes())
            for place, x in enumerate(_tensors(outputs))
            if x.untyped_storage().data_ptr() not in needed
        ]
        return outputs

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the outputs until the gradient of ``hook_tensor`` is known."""
        if not self.is_active:
            return
        if not hook_tensor.requires_grad:
            self._again, self._discarded = None, []  # no backward will come
            return
        for _, x, _ in self._discarded:
            x.untyped_storage().resize_(0)
        hook_tensor.register_hook(self._recompute)

    def _put_off(self, x: Tensor) -> _Slot:
        slot = _Slot()
        self._slots.append(weakref.ref(slot))
        return slot

    def _fetch(self, slot: _Slot) -> Tensor:
        if slot.tensor is None:  # the outputs were never discarded
            self._recompute()
        assert slot.tensor is not None, "the second run saved fewer tensors than the first"
        return slot.tensor

    def _recompute(self, grad: Tensor | None = None) -> None:
        """Fill the slots and the outputs; this happens once, so that a retained graph can be used again."""
        if self._again is None:
            return
        again, self._again = self._again, None
        slots = iter(self._slots)

        def fill(x: Tensor) -> None:
            slot = next(slots)()
            if slot is not None:
                slot.tensor = x.detach()

        with torch.enable_grad(), saved_tensors_hooks(fill, _never):
            outputs = _tensors(again())
        with torch.no_grad():
            for place, x, num_bytes in self._discarded:
                x.untyped_storage().resize_(num_bytes)
                x.copy_(outputs[place])
        self._discarded = []


class _Slot:
    """The place of a tensor that the first run did not save and the second run fills; freed with its autograd node."""

    tensor: Tensor | None = None


def _tensors(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def _never(packed: Any) -> Tensor:
    raise AssertionError("the second run is not differentiated itself")
