"""What the parts of one rank are built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import ParallelState
from vllm.ops.contract import RolloutOps
from vllm.platforms import Platform


@dataclass(frozen=True)
class RankContext:
    """One rank of an engine: its configuration, its groups, and the device with the ops that run there."""

    config: VllmConfig
    parallel: ParallelState
    platform: Platform
    ops: RolloutOps
    device: torch.device

    @property
    def keeps_address(self) -> bool:
        """Whether what sleeps shall come back where it was, which captured graphs refer to."""
        return not self.config.compilation.enforce_eager and self.platform.keeps_graphs_over_sleep
