"""The memory that an allocator keeps of its device (upstream: ``verl.utils.memory_utils``)."""

from __future__ import annotations

import gc
import logging

from verl.utils.device import device_module, get_device_name

logger = logging.getLogger(__name__)

_ENOUGH_BYTES = 1 << 30


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Collects garbage and gives cached memory back to the device, again while that frees more than 1 GiB.

    ``force_sync`` waits for the device first, so that what its queued work holds is free. On a CPU it only collects.
    """
    accelerator = device_module(get_device_name())
    for attempt in range(max_retries):
        gc.collect()
        if accelerator is None:
            return
        reserved = accelerator.memory_reserved()
        if force_sync:
            accelerator.synchronize()
        accelerator.empty_cache()
        freed = reserved - accelerator.memory_reserved()
        logger.info("emptied the cache (%d of %d): %.2f GiB freed", attempt + 1, max_retries, freed / 2**30)
        if freed < _ENOUGH_BYTES:
            return
