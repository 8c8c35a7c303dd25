"""Lines of figures and messages of ranks (upstream: ``verl.utils.logger.aggregate_logger``)."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


def concat_dict_to_str(dict: Mapping[str, Any], step: int) -> str:
    """``step:3 - loss:0.5 - kl:0.1``."""
    return " - ".join([f"step:{step}", *(f"{name}:{value}" for name, value in dict.items())])


class LocalLogger:
    """Prints every step's figures as one line, or nothing without ``print_to_console``."""

    def __init__(self, print_to_console: bool = True) -> None:
        self.print_to_console = print_to_console

    def flush(self) -> None:
        """Nothing is kept back."""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        if self.print_to_console:
            print(concat_dict_to_str(data, step=step), flush=True)


class DecoratorLoggerBase:
    """Base of decorators that log: by a logger at ``level``, or without one by printing.

    Args:
        role: a name at the head of each line.
        rank: this process's.
        log_only_rank_0: ranks but 0 are silent.
    """

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        rank: int = 0,
        log_only_rank_0: bool = True,
    ) -> None:
        self.role, self.logger, self.level, self.rank = role, logger, level, rank
        self.log_only_rank_0 = log_only_rank_0
        self.logging_function = self.log_by_print if logger is None else self.log_by_logging

    def log_by_print(self, log_str: str) -> None:
        if not self.log_only_rank_0 or self.rank == 0:
            print(f"{self.role} {log_str}", flush=True)

    def log_by_logging(self, log_str: str) -> None:
        """ValueError without a logger."""
        if self.logger is None:
            raise ValueError("there is no logger to log by; give one, or use log_by_print")
        if not self.log_only_rank_0 or self.rank == 0:
            self.logger.log(self.level, f"{self.role} {log_str}")


def print_rank_0(message: str) -> None:
    """On rank 0 of torch.distributed, and on a process without it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def print_with_rank(message: str, rank: int = 0, log_only_rank_0: bool = False) -> None:
    if not log_only_rank_0 or rank == 0:
        print(f"[Rank {rank}] {message}", flush=True)


def print_with_rank_and_timer(message: str, rank: int = 0, log_only_rank_0: bool = False) -> None:
    """The same after the time of the day."""
    if not log_only_rank_0 or rank == 0:
        print(f"[{datetime.datetime.now():%Y-%m-%d %H:%M:%S}] [Rank {rank}] {message}", flush=True)


def log_with_rank(
    message: str, rank: int, logger: logging.Logger, level: int = logging.INFO, log_only_rank_0: bool = False
) -> None:
    if not log_only_rank_0 or rank == 0:
        logger.log(level, f"[Rank {rank}] {message}")
