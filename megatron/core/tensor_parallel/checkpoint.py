"""Activation recompute: keep a function's inputs only, and run it again when its gradient is due."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint


def checkpoint(
    function: Callable[..., torch.Tensor],
    *args: object,
    recompute_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> torch.Tensor:
    """``function(*args)`` with nothing saved inside; the second run happens inside ``recompute_context()``.

    The function must draw no random numbers (their state is not restored: the layers have no dropout), and may run
    collectives, which every rank then meets again in its backward pass.
    """
    output: torch.Tensor = torch_checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), recompute_context()),
    )
    return output
