"""What changes on a device when a worker goes from generation to training and back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType

import torch


@contextmanager
def training_phase() -> Iterator[None]:
    """Everything inside runs eagerly; what was in force before comes back, also after an error."""
    with ExitStack() as phase:
        # NPU-ADAPTATION(graphs-in-rollout-only): compiled and recorded graphs are for decoding, whose shapes repeat;
        # packed training batches change shape with every step, and each shape would be compiled anew;
        # drop when training is compiled for packed batches too.
        phase.enter_context(eager_stance())
        # NPU-ADAPTATION END
        yield


def eager_stance() -> AbstractContextManager:
    """Compiled functions run as they were written. torch < 2.6 has no such switch; nothing of ours compiles there."""
    return torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()


def release_cached_memory(accelerator: ModuleType | None) -> None:
    """Takes the allocator's unused memory apart, so that the next phase need not fit into the holes of the last.

    It waits for the device: only for the borders of a phase, between what one side has freed and the other allocates.

    Args:
        accelerator: ``torch.npu`` or ``torch.cuda``; None on the CPU.
    """
    if accelerator is None:
        return
    # NPU-ADAPTATION(virtual-address-cache): with expandable segments, empty_cache hands tens of GB to the driver for
    # the next phase to take them back, 4 s each time on a die; unmapping is enough: the allocator keeps the physical
    # memory and maps it where the next phase needs it; drop when empty_cache does that.
    if hasattr(accelerator, "empty_virt_addr_cache") and _has_expandable_segments():
        accelerator.empty_virt_addr_cache()
        return
    # NPU-ADAPTATION END
    accelerator.empty_cache()


def _has_expandable_segments() -> bool:
    """torch_npu refuses ``empty_virt_addr_cache`` without them, and has no other way to ask."""
    return "expandable_segments:true" in os.environ.get("PYTORCH_NPU_ALLOC_CONF", "").lower()
