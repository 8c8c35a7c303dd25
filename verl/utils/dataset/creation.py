"""The data set and the order of its rows that the config names."""

from __future__ import annotations

import inspect
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.utils.data import Dataset, RandomSampler, Sampler, SequentialSampler

from verl.experimental.dataset.sampler import AbstractSampler
from verl.utils.dataset.rl_dataset import RLHFDataset, setting
from verl.utils.import_utils import load_extern_type


def create_rl_dataset(
    data_paths: Any, data_config: Any, tokenizer: Any, processor: Any, is_train: bool = True, max_samples: int = -1
) -> Any:
    """RLHFDataset, or the class of ``data.custom_cls``, with these files; ``is_train`` changes nothing here."""
    chosen = dataset_class(data_config)
    return chosen(**_dataset_arguments(chosen, data_paths, data_config, tokenizer, processor, max_samples))


def create_rl_sampler(data_config: Any, dataset: Any) -> Sampler[int]:
    """The sampler of ``data.sampler``; else a random one with ``data.seed`` if ``data.shuffle``, else rows in order."""
    chosen = sampler_class(data_config)
    if chosen is not None:
        return chosen(data_source=dataset, data_config=_tree(data_config))
    if not setting(data_config, "shuffle", True):
        return SequentialSampler(dataset)
    generator = torch.Generator().manual_seed(setting(data_config, "seed", None) or 1)
    return RandomSampler(dataset, generator=generator)


def dataset_class(data_config: Any) -> type:
    """ValueError: the file or the class of ``data.custom_cls`` does not exist, or it is no torch Dataset."""
    custom = setting(data_config, "custom_cls", None)
    path, name = setting(custom, "path", None), setting(custom, "name", None)
    if path is None:
        return RLHFDataset
    chosen = load_extern_type(path, name)
    where = f"data.custom_cls: {name} of {path}"
    if not isinstance(chosen, type) or not issubclass(chosen, Dataset):
        raise ValueError(f"{where} is {chosen!r}; expected a class derived from torch.utils.data.Dataset")
    try:
        given = _dataset_arguments(chosen, None, data_config, None, None, setting(data_config, "train_max_samples", -1))
        inspect.signature(chosen).bind(**given)
    except TypeError as error:
        arguments = "data_files, tokenizer, processor, config, and max_samples if it takes that"
        raise ValueError(f"{where}{inspect.signature(chosen)}: {error}; it is made with {arguments}") from error
    return chosen


def sampler_class(data_config: Any) -> type[AbstractSampler] | None:
    """ValueError: the file or the class of ``data.sampler`` does not exist, or it is no AbstractSampler."""
    section = setting(data_config, "sampler", None)
    path, name = setting(section, "class_path", None), setting(section, "class_name", None)
    if path is None:
        return None
    chosen = load_extern_type(path, name)
    where = f"data.sampler: {name} of {path}"
    if not isinstance(chosen, type) or not issubclass(chosen, AbstractSampler):
        module = AbstractSampler.__module__
        raise ValueError(f"{where} is {chosen!r}; expected a class derived from {module}.AbstractSampler")
    try:
        inspect.signature(chosen).bind(data_source=None, data_config=None)
    except TypeError as error:
        arguments = "data_source, data_config"
        raise ValueError(f"{where}{inspect.signature(chosen)}: {error}; it is made with {arguments}") from error
    if inspect.isabstract(chosen):
        raise ValueError(f"{where} lacks methods that AbstractSampler or AbstractCurriculumSampler asks for")
    return chosen


def _dataset_arguments(
    chosen: type, files: Any, data_config: Any, tokenizer: Any, processor: Any, max_samples: int
) -> dict[str, Any]:
    """The arguments; a class of a user gets the config as an OmegaConf tree."""
    config = data_config if chosen is RLHFDataset else _tree(data_config)
    given = {"data_files": files, "tokenizer": tokenizer, "processor": processor, "config": config}
    parameters = inspect.signature(chosen).parameters.values()
    takes_it = any(p.name == "max_samples" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return given | ({"max_samples": max_samples} if takes_it or max_samples != -1 else {})


def _tree(data_config: Any) -> Any:
    is_typed = is_dataclass(data_config) and not isinstance(data_config, type)
    return OmegaConf.create(asdict(data_config)) if is_typed else data_config
