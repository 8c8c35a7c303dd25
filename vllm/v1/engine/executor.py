"""The path on which clients load weights: LLM.llm_engine.model_executor.driver_worker.model_runner.model.

The engine has no executor; these four names lead to its weights, and the load is what `LLM.load_weights` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from vllm.v1.engine.core import EngineCore


@dataclass(frozen=True)
class Model:
    core: EngineCore

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """See `LLM.load_weights`."""
        return self.core.idle_worker("load_weights").weights.load(weights)


@dataclass(frozen=True)
class ModelRunner:
    model: Model


@dataclass(frozen=True)
class DriverWorker:
    model_runner: ModelRunner


@dataclass(frozen=True)
class ModelExecutor:
    driver_worker: DriverWorker


def model_executor(core: EngineCore) -> ModelExecutor:
    return ModelExecutor(DriverWorker(ModelRunner(Model(core))))
