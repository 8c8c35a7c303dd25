"""The prediction layer that drafts, in the memory and the calls of a planned engine: one more decoder layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from hf_formats.config import read_config_dict
from tools.plan.timing.drafts import MTP
from verl.workers.config import RolloutConfig
from vllm.config import VllmConfig
from vllm.entrypoints.llm import LLM

STAND_IN = "ngram"  # its drafts are verified in the same way, and nothing on the device makes them


@contextmanager
def planned_engine_model(config: RolloutConfig, model_path: str) -> Iterator[tuple[RolloutConfig, str]]:
    """The config and the model folder of the engine to plan; without such a layer those that are given.

    The layer runs once over all rows of a step, as every decoder layer does; its further passes are left out. Its
    projection comes with ``add_projection``.
    """
    if not has_draft_layer(config):
        yield config, model_path
        return
    model = read_config_dict(model_path)
    model["num_hidden_layers"] += 1
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model), encoding="utf-8")
        yield replace(config, speculative_config=config.speculative_config | {"method": STAND_IN}), folder


def has_draft_layer(config: RolloutConfig) -> bool:
    """Whether the model's prediction layer drafts."""
    return config.speculative_config.get("method") == MTP


def without_draft_layer(config: VllmConfig) -> VllmConfig:
    """The engine's config with the model's own layers, which are those that a weight sync brings."""
    hf = config.model.hf
    return replace(config, model=replace(config.model, hf=replace(hf, num_hidden_layers=hf.num_hidden_layers - 1)))


def add_projection(llm: LLM) -> None:
    """Let the weights of a sleeping engine contain the layer's projection of two states to one, whole on each rank."""
    worker = llm.core.worker
    hidden, dtype = worker.config.model.hf.hidden_size, getattr(torch, worker.config.model.dtype)
    llm.wake_up(tags=["weights"])
    projection = torch.empty(hidden, 2 * hidden, dtype=dtype, device=worker.device)
    worker.model.register_parameter("draft_projection", torch.nn.Parameter(projection, requires_grad=False))
    llm.sleep(level=2)
