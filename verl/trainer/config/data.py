"""Config of the prompt data set."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.workers.config.keys import Idle, Section, Values, at_least, beside, key, one_of

TRUNCATIONS = ("error", "left", "right", "middle")
_ROWS = Values("give a number of rows, or -1 for all", lambda value: value == -1 or value >= 1)
_SET_NAME = re.compile(r"[\w-]+")  # a part of a dotted key
_OF_ROLLOUT = Idle(
    "actor_rollout_ref.rollout.response_length is given, and decides",
    lambda run, own: own.max_response_length != run.actor_rollout_ref.rollout.response_length,
)


@dataclass(frozen=True)
class CustomClassConfig(Section):
    """A data set class of your own."""

    path: str | None = key(None, is_path=True)  #: Python file of the class, or ``pkg://package.module``.
    #: a ``torch.utils.data.Dataset`` that is made with ``data_files``, ``tokenizer``, ``processor`` and ``config``.
    name: str | None = None

    def contradictions(self, where: str) -> Iterator[str]:
        yield from _pair_problems(where, path=self.path, name=self.name)


@dataclass(frozen=True)
class SamplerConfig(Section):
    """An order of the training rows of your own."""

    class_path: str | None = key(None, is_path=True)  #: Python file of the class, or ``pkg://package.module``.
    #: a subclass of ``verl.experimental.dataset.sampler.AbstractSampler``, for which ``shuffle`` and ``seed`` then are;
    #: with ``trainer.schedule=sync`` only.
    class_name: str | None = None
    #: further keyword arguments of the class.
    kwargs: dict[str, Any] = key(dict, beside("class_path", None), takes_names=True)

    def contradictions(self, where: str) -> Iterator[str]:
        yield from _pair_problems(where, class_path=self.class_path, class_name=self.class_name)


@dataclass(frozen=True)
class DataConfig(Section):
    """Parquet files of prompts; lengths are tokens, batch sizes prompts."""

    train_files: Any = key("~/data/rlhf/train.parquet", is_path=True)  #: path of the training rows, or a list of paths.
    #: the evaluation rows, as a path or a list; or sets by name, ``{aime: a.parquet, math: [b.parquet, c.parquet]}``,
    #: each with metrics of its own under ``val/<name>/``.
    val_files: Any = key("~/data/rlhf/test.parquet", is_path=True, takes_names=True)
    prompt_key: str = "prompt"  #: column with the prompt, a list of chat messages.
    #: tokens of the longest prompt; a longer one is an error, or is dropped with ``filter_overlong_prompts``.
    max_prompt_length: int = key(512, at_least(1))
    max_response_length: int = key(512, at_least(1), _OF_ROLLOUT)  #: tokens after which a response is cut.
    train_batch_size: int = key(1024, at_least(1))  #: prompts that one step trains on.
    #: prompts of each generation with ``algorithm.filter_groups``; absent means ``train_batch_size``.
    gen_batch_size: int | None = key(None, at_least(1))
    #: prompts of one generation in a validation; absent means a whole set.
    val_batch_size: int | None = key(None, at_least(1))
    train_max_samples: int = key(-1, _ROWS)  #: number of training rows that are used, from the first; -1 means all.
    #: number of rows of each evaluation set that are used, from the first; -1 means all.
    val_max_samples: int = key(-1, _ROWS)
    shuffle: bool = True  #: draw a new order of the rows for each epoch, which depends on (``seed``, epoch) alone.
    seed: int | None = key(None, beside("shuffle", False))  #: seed of that order; absent means 0.
    filter_overlong_prompts: bool = False  #: drop prompts that are longer than ``max_prompt_length``.
    #: what happens to longer prompts that are not dropped: ``error`` ends the run before its first step, ``left`` cuts
    #: their first tokens, ``right`` their last, ``middle`` those between two halves.
    truncation: str = key("error", one_of(*TRUNCATIONS))
    #: give rows the column ``raw_prompt``, the chat messages, which a reward manager sees.
    return_raw_chat: bool = False
    #: further arguments of the tokenizer's chat template; ``chat_template``, a text in Jinja, takes its place for the
    #: prompts, and an exported model keeps its own.
    apply_chat_template_kwargs: dict[str, Any] = key(dict, takes_names=True)
    custom_cls: CustomClassConfig = key(CustomClassConfig)
    sampler: SamplerConfig = key(SamplerConfig)

    def contradictions(self, where: str) -> Iterator[str]:
        where, sets = f"{where}.val_files", self.val_files
        if not isinstance(sets, dict):
            return
        if not sets:
            yield f"{where} has no sets; give a path, a list, or paths by name"
        for name, files in sets.items():
            if not _SET_NAME.fullmatch(str(name)):
                yield f"{where} names {name!r}; expected letters, digits, _ and -"
            if not files or not isinstance(files, str | list):
                yield f"{where}.{name} is {files!r}; expected a path or a list of paths"


def _pair_problems(where: str, **pair: str | None) -> Iterator[str]:
    given = [name for name, value in pair.items() if value is not None]
    if len(given) == 1:
        missing = next(name for name in pair if name not in given)
        yield f"{where}.{given[0]} is given without {where}.{missing}; give both or none"


def file_list(files: Any) -> list[str]:
    """All paths of a path, a list of paths, or paths by name."""
    if isinstance(files, dict):
        return [path for named in files.values() for path in file_list(named)]
    return [files] if isinstance(files, str) else [str(path) for path in files]


def val_sets(files: Any) -> dict[str, list[str]]:
    """The evaluation sets of ``data.val_files``, by name; without names one set, called ""."""
    named = files if isinstance(files, dict) else {"": files}
    return {str(name): file_list(paths) for name, paths in named.items()}
