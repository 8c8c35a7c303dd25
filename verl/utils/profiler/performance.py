"""Timers, and how much memory of the device is taken (upstream: ``verl.utils.profiler.performance``)."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

from verl.utils.device import resolve_device
from verl.utils.timeline import now_s

Function = TypeVar("Function", bound=Callable[..., Any])
_GB = 1024**3


def memory_usage() -> tuple[float, float, float, float] | None:
    """(allocated, reserved, used, total) GiB of this process's device, used by everyone; None on a CPU."""
    device = resolve_device("auto")
    module = getattr(torch, device, None)
    if device == "cpu" or module is None or not module.is_available():
        return None
    free, total = module.mem_get_info()
    figures = (module.memory_allocated(), module.memory_reserved(), total - free, total)
    allocated, reserved, used, all_of_it = (figure / _GB for figure in figures)
    return allocated, reserved, used, all_of_it


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int = 0
) -> None:
    """A line with ``head`` and the device's memory, on rank ``rank`` (on every process without torch.distributed).

    Without a logger it is printed. On a CPU there is nothing to say.
    """
    if dist.is_initialized() and rank not in (None, dist.get_rank()):
        return
    figures = memory_usage()
    if figures is None:
        return
    allocated, reserved, used, total = figures
    message = (
        f"{head}, memory allocated (GB): {allocated:.2f}, memory reserved (GB): {reserved:.2f}, device memory "
        f"used/total (GB): {used:.2f}/{total:.2f}"
    )
    if logger is None:
        print(message)
    else:
        logger.log(level, message)


class GPUMemoryLogger:
    """Decorator that logs the device's memory before and after a function.

    Args:
        role: the name at the head of the line.
        logger, level: where to; without a logger the lines are printed.
        log_only_rank_0: on rank 0 alone.
    """

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        log_only_rank_0: bool = True,
    ) -> None:
        self.role, self.logger, self.level = role, logger, level
        self.log_only_rank_0 = log_only_rank_0

    def __call__(self, decorated_function: Function) -> Function:
        @functools.wraps(decorated_function)
        def with_log(*args: Any, **kwargs: Any) -> Any:
            return self.log(decorated_function, *args, **kwargs)

        return with_log  # type: ignore[return-value]

    def log(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``func`` between the two lines."""
        rank = 0 if self.log_only_rank_0 or not dist.is_initialized() else dist.get_rank()
        log_gpu_memory_usage(f"{self.role} before {func.__name__}", self.logger, self.level, rank)
        result = func(*args, **kwargs)
        log_gpu_memory_usage(f"{self.role} after {func.__name__}", self.logger, self.level, rank)
        return result


def log_print(ctn: Any) -> None:
    """Prints ``ctn`` after the file, the line and the function of the caller."""
    caller = sys._getframe(1)
    print(f"[{caller.f_code.co_filename}:{caller.f_lineno} {caller.f_code.co_name}] {ctn}")


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Adds the seconds spent inside to ``timing_raw[name]``, also when it raises."""
    start_s = now_s()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + now_s() - start_s


@contextmanager
def marked_timer(
    name: str,
    timing_raw: dict[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Iterator[None]:
    """``simple_timer`` that torch's profiler shows as a range; the other arguments are marks of other profilers."""
    with record_function(name), simple_timer(name, timing_raw):
        yield


def mark_start_range(
    message: str | None = None, color: str | None = None, domain: str | None = None, category: str | None = None
) -> Any:
    """Begins a range of torch's profiler, for ``mark_end_range``; the other arguments are marks of other profilers."""
    mark = record_function(message or "range")
    mark.__enter__()
    return mark


def mark_end_range(range_id: Any) -> None:
    range_id.__exit__(None, None, None)


def mark_annotate(
    message: str | None = None, color: str | None = None, domain: str | None = None, category: str | None = None
) -> Callable[[Function], Function]:
    """Decorator that makes each call a range called ``message``, or as the function is."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            with record_function(message or function.__name__):
                return function(*args, **kwargs)

        return annotated  # type: ignore[return-value]

    return decorate


def reduce_timing(timing_raw: dict[str, float], reduce_op: Any = dist.ReduceOp.AVG) -> dict[str, float]:
    """Every figure over all ranks, by name; as they are without torch.distributed. Collective.

    All ranks have the same names. gloo has no average: it is the sum over the number of ranks.
    """
    if not dist.is_initialized():
        return timing_raw
    names = sorted(timing_raw)
    device = torch.device(resolve_device("auto") if dist.get_backend() != "gloo" else "cpu")
    values = torch.tensor([timing_raw[name] for name in names], dtype=torch.float32, device=device)
    is_average = reduce_op == dist.ReduceOp.AVG
    dist.all_reduce(values, op=dist.ReduceOp.SUM if is_average else reduce_op)
    if is_average:
        values /= dist.get_world_size()
    return dict(zip(names, values.tolist(), strict=True))


def topk_reduce_ratio_min_max(timing: float, k: int = 10) -> tuple[float, float, float]:
    """(share of ranks in the tail, fastest, slowest) of a figure of each rank; -1 each without torch.distributed.

    The tail is what lies above the (100 - k)th percentile, linearly interpolated. Collective.
    """
    if not dist.is_initialized():
        return -1.0, -1.0, -1.0
    device = torch.device(resolve_device("auto") if dist.get_backend() != "gloo" else "cpu")
    parts = [torch.zeros(1, dtype=torch.float32, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.tensor([timing], dtype=torch.float32, device=device))
    values = torch.cat(parts).cpu()
    share = (values > torch.quantile(values, 1 - k / 100)).float().mean()
    return float(share), float(values.min()), float(values.max())
