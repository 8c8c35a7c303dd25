"""Config of the prompt data set."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl.workers.config.values import Section, Values, at_least, one_of

TRUNCATIONS = ("error", "left", "right", "middle")
TAKES_NAMES = "takes_names"  # metadata of a field that may hold keys of the user's own
_ROWS = Values("give a number of rows, or -1 for all", lambda value: value == -1 or value >= 1)
_SET_NAME = re.compile(r"[\w-]+")  # a part of a dotted key


@dataclass(frozen=True)
class CustomClassConfig(Section):
    """A data set class of your own.

    Attributes:
        path: Python file of the class, or ``pkg://package.module``.
        name: a ``torch.utils.data.Dataset`` that is made with ``data_files``, ``tokenizer``, ``processor`` and
            ``config``.
    """

    path: str | None = None
    name: str | None = None

    def contradictions(self, where: str) -> list[str]:
        return _pair_problems(where, path=self.path, name=self.name)


@dataclass(frozen=True)
class SamplerConfig(Section):
    """An order of the training rows of your own.

    Attributes:
        class_path: Python file of the class, or ``pkg://package.module``.
        class_name: a subclass of ``verl.experimental.dataset.sampler.AbstractSampler``, for which ``shuffle`` and
            ``seed`` then are; with ``trainer.schedule=sync`` only.
    """

    class_path: str | None = None
    class_name: str | None = None

    def contradictions(self, where: str) -> list[str]:
        return _pair_problems(where, class_path=self.class_path, class_name=self.class_name)


@dataclass(frozen=True)
class DataConfig(Section):
    """Parquet files of prompts; lengths are tokens, batch sizes prompts.

    Attributes:
        train_files: path of the training rows, or a list of paths.
        val_files: the evaluation rows, as a path or a list; or sets by name, ``{aime: a.parquet, math: [b.parquet,
            c.parquet]}``, each with metrics of its own under ``val/<name>/``.
        prompt_key: column with the prompt, a list of chat messages.
        max_prompt_length: tokens of the longest prompt; a longer one is an error, or is dropped with
            ``filter_overlong_prompts``.
        max_response_length: tokens after which a response is cut.
        train_batch_size: prompts that one step trains on.
        gen_batch_size: prompts of each generation with ``algorithm.filter_groups``; absent means ``train_batch_size``.
        val_batch_size: prompts of one generation in a validation; absent means a whole set.
        train_max_samples: number of training rows that are used, from the first; -1 means all.
        val_max_samples: number of rows of each evaluation set that are used, from the first; -1 means all.
        shuffle: draw a new order of the rows for each epoch, which depends on (``seed``, epoch) alone.
        seed: seed of that order; absent means 0.
        filter_overlong_prompts: drop prompts that are longer than ``max_prompt_length``.
        truncation: what happens to longer prompts that are not dropped: ``error`` ends the run before its first step,
            ``left`` cuts their first tokens, ``right`` their last, ``middle`` those between two halves.
        return_raw_chat: give rows the column ``raw_prompt``, the chat messages, which a reward manager sees.
        apply_chat_template_kwargs: further arguments of the tokenizer's chat template.
    """

    VALUES: ClassVar = {
        **dict.fromkeys(("max_prompt_length", "max_response_length", "train_batch_size"), at_least(1)),
        **dict.fromkeys(("gen_batch_size", "val_batch_size"), at_least(1)),
        **dict.fromkeys(("train_max_samples", "val_max_samples"), _ROWS),
        "truncation": one_of(*TRUNCATIONS),
    }

    train_files: Any = "~/data/rlhf/train.parquet"
    val_files: Any = field(default="~/data/rlhf/test.parquet", metadata={TAKES_NAMES: True})
    prompt_key: str = "prompt"
    max_prompt_length: int = 512
    max_response_length: int = 512
    train_batch_size: int = 1024
    gen_batch_size: int | None = None
    val_batch_size: int | None = None
    train_max_samples: int = -1
    val_max_samples: int = -1
    shuffle: bool = True
    seed: int | None = None
    filter_overlong_prompts: bool = False
    truncation: str = "error"
    return_raw_chat: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)

    def contradictions(self, where: str) -> list[str]:
        where, sets = f"{where}.val_files", self.val_files
        if not isinstance(sets, dict):
            return []
        found = [] if sets else [f"{where} has no sets; give a path, a list, or paths by name"]
        for name, files in sets.items():
            if not _SET_NAME.fullmatch(str(name)):
                found.append(f"{where} names {name!r}; expected letters, digits, _ and -")
            if not files or not isinstance(files, str | list):
                found.append(f"{where}.{name} is {files!r}; expected a path or a list of paths")
        return found


def _pair_problems(where: str, **pair: str | None) -> list[str]:
    given = [key for key, value in pair.items() if value is not None]
    missing = [f"{where}.{key}" for key in pair if key not in given]
    return [f"{where}.{given[0]} is given without {missing[0]}; give both or none"] if len(given) == 1 else []


def file_list(files: Any) -> list[str]:
    """All paths of a path, a list of paths, or paths by name."""
    if isinstance(files, dict):
        return [path for named in files.values() for path in file_list(named)]
    return [files] if isinstance(files, str) else [str(path) for path in files]


def val_sets(files: Any) -> dict[str, list[str]]:
    """The evaluation sets of ``data.val_files``, by name; without names one set, called ""."""
    named = files if isinstance(files, dict) else {"": files}
    return {str(name): file_list(paths) for name, paths in named.items()}
