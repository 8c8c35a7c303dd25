"""The data set and the order of its rows that the config names."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf
from torch.utils.data import Dataset

from verl.experimental.dataset.sampler import AbstractSampler
from verl.trainer.config.data import DataConfig
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.import_utils import load_extern_type


def create_rl_dataset(files: list[str], data: DataConfig, tokenizer: Any, max_samples: int = -1) -> Any:
    """RLHFDataset, or the class of ``data.custom_cls``, with these files."""
    chosen = dataset_class(data)
    return chosen(**_dataset_arguments(chosen, files, data, tokenizer, max_samples))


def create_rl_sampler(data: DataConfig, dataset: Any) -> AbstractSampler | None:
    """The sampler of ``data.sampler``, if any."""
    chosen = sampler_class(data)
    return None if chosen is None else chosen(data_source=dataset, data_config=_tree(data), **data.sampler.kwargs)


def dataset_class(data: DataConfig) -> type:
    """ValueError: the file or the class of ``data.custom_cls`` does not exist, or it is no torch Dataset."""
    path, name = data.custom_cls.path, data.custom_cls.name
    if path is None:
        return RLHFDataset
    chosen = load_extern_type(path, name)
    where = f"data.custom_cls: {name} of {path}"
    if not isinstance(chosen, type) or not issubclass(chosen, Dataset):
        raise ValueError(f"{where} is {chosen!r}; expected a class derived from torch.utils.data.Dataset")
    try:
        given = _dataset_arguments(chosen, None, data, None, data.train_max_samples)
        inspect.signature(chosen).bind(**given)
    except TypeError as error:
        arguments = "data_files, tokenizer, processor, config, and max_samples if it takes that"
        raise ValueError(f"{where}{inspect.signature(chosen)}: {error}; it is made with {arguments}") from error
    return chosen


def sampler_class(data: DataConfig) -> type[AbstractSampler] | None:
    """ValueError: the file or the class of ``data.sampler`` does not exist, or it is no AbstractSampler."""
    path, name = data.sampler.class_path, data.sampler.class_name
    if path is None:
        return None
    chosen = load_extern_type(path, name)
    where = f"data.sampler: {name} of {path}"
    if not isinstance(chosen, type) or not issubclass(chosen, AbstractSampler):
        module = AbstractSampler.__module__
        raise ValueError(f"{where} is {chosen!r}; expected a class derived from {module}.AbstractSampler")
    try:
        inspect.signature(chosen).bind(data_source=None, data_config=None, **data.sampler.kwargs)
    except TypeError as error:
        arguments = "data_source, data_config and data.sampler.kwargs"
        raise ValueError(f"{where}{inspect.signature(chosen)}: {error}; it is made with {arguments}") from error
    if inspect.isabstract(chosen):
        raise ValueError(f"{where} lacks methods that AbstractSampler or AbstractCurriculumSampler asks for")
    return chosen


def _dataset_arguments(chosen: type, files: Any, data: DataConfig, tokenizer: Any, max_samples: int) -> dict[str, Any]:
    """The arguments; a class of a user gets the config as an OmegaConf tree."""
    config = data if chosen is RLHFDataset else _tree(data)
    given = {"data_files": files, "tokenizer": tokenizer, "processor": None, "config": config}
    parameters = inspect.signature(chosen).parameters.values()
    takes_it = any(p.name == "max_samples" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return given | ({"max_samples": max_samples} if takes_it or max_samples != -1 else {})


def _tree(data: DataConfig) -> Any:
    return OmegaConf.create(asdict(data))
