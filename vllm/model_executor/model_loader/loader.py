"""(hf_name, tensor) pairs from a checkpoint directory, or made up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm.model_executor.model_loader.weight_target import WeightTarget

INDEX_NAME = "model.safetensors.index.json"
DUMMY_STD = 0.02


def checkpoint_files(model_dir: str) -> list[Path]:
    """The safetensors files of a checkpoint; ValueError names every shard of the index that is not there."""
    root = Path(model_dir)
    index = root / INDEX_NAME
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (root / name).is_file()]
        if missing:
            raise ValueError(f"{index} names shards that do not exist in {root}: {', '.join(missing)}")
        return [root / name for name in names]
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model={model_dir}: no *.safetensors file found; expected a Hugging Face model directory")
    return files


def iterate_checkpoint(model_dir: str, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Every wanted tensor of the checkpoint on the host, one in memory at a time.

    ValueError names a file that cannot be read.
    """
    for file in checkpoint_files(model_dir):
        try:
            with safe_open(str(file), framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a dict
                    if is_wanted(name):
                        yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read (truncated or not safetensors): {error}") from error


def each_once(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`weights`; ValueError for a name that comes a second time."""
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise ValueError(f"weight {name} came twice in one update")
        seen.add(name)
        yield name, tensor


def iterate_dummy(targets: dict[str, WeightTarget], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random values for every tensor, drawn per name, so that every layout gets the same model: norms 1, biases 0,
    else normal.
    """
    for name, target in targets.items():
        if len(target.hf_shape) == 1:
            yield name, torch.ones(target.hf_shape) if name.endswith("norm.weight") else torch.zeros(target.hf_shape)
            continue
        if target.parameter is None:
            continue
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        yield name, torch.randn(target.hf_shape, generator=generator) * DUMMY_STD
