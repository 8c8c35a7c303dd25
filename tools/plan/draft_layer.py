"""The prediction layer that drafts, in the memory and the calls of a planned engine: one more decoder layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hf_formats.config import read_config_dict
from tools.plan.timing.drafts import MTP
from verl.workers.config import RolloutConfig
from vllm.config import VllmConfig

STAND_IN = "ngram"  # its drafts are verified in the same way, and nothing on the device makes them


@contextmanager
def planned_engine_model(config: RolloutConfig, model_path: str) -> Iterator[tuple[RolloutConfig, str]]:
    """The config and the model folder of the engine to plan; without such a layer those that are given.

    The layer runs once over all rows of a step, as every decoder layer does. Its projection and its further passes are
    left out.
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
