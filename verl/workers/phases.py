"""The phases of a worker: its watchdog, and what changes on the device between generation and training."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.core.parallel_state import ProcessGroups
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.load import to_yaml
from verl.utils.hang_watchdog import HangWatchdog, group_list

Method = TypeVar("Method", bound=Callable[..., Any])


def make_watchdog(config: PPOTrainerConfig, groups: ProcessGroups | None) -> HangWatchdog | None:
    """Returns the watchdog of ``trainer.hang_timeout_s``; collective over all ranks of torch.distributed.

    The collectives of ``groups`` are counted (None on a rank that does not train). The files are in
    ``hang/<time of the start>`` under ``trainer.report_dir``, which all hosts must see.
    """
    timeout_s = config.trainer.hang_timeout_s
    if timeout_s is None:
        timeout_s = config.actor_rollout_ref.nccl_timeout / 2
    if timeout_s == 0:
        return None
    starts = [""] * dist.get_world_size()
    dist.all_gather_object(starts, time.strftime("%Y%m%d-%H%M%S"))
    return HangWatchdog(
        Path(config.trainer.report_dir) / "hang" / starts[0],
        dist.get_rank(),
        dist.get_world_size(),
        timeout_s,
        config=to_yaml(config),
        groups=[] if groups is None else group_list(groups),
    )


def worker_phase(method: Method) -> Method:
    """Makes a worker's method a phase of its ``watchdog`` and ``memory``, if any, and a span of its ``timeline``."""

    @functools.wraps(method)
    def in_phase(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = method.__name__.lstrip("_")
        phase = nullcontext() if self.watchdog is None else self.watchdog.phase(name)
        memory = getattr(self, "memory", None)  # from init_model on, on ranks that train
        with phase, nullcontext() if memory is None else memory.phase(name), self.timeline.span(name):
            return method(self, *args, **kwargs)

    return in_phase  # type: ignore[return-value]


@contextmanager
def training_phase() -> Iterator[None]:
    """Runs everything inside eagerly; the earlier setting is restored, also after an error."""
    with ExitStack() as phase:
        # NPU-ADAPTATION(graphs-in-rollout-only): compiled and captured graphs are for decoding, whose shapes repeat;
        # packed training batches change shape with every step, and each shape would be compiled anew;
        # drop when training is compiled for packed batches too.
        phase.enter_context(eager_stance())
        # NPU-ADAPTATION END
        yield


def eager_stance() -> AbstractContextManager:
    """Runs compiled functions eagerly; torch < 2.6 has no such switch, and we compile nothing there."""
    return torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()
