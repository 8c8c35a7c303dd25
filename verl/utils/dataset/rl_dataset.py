"""Prompts of an RL run: chat rows in parquet files to token ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_formats.chat import chat_text
from verl.protocol_storage import as_rows
from verl.utils.errors import TooLongError
from verl.utils.parquet import read_rows
from verl.utils.reward_score.thoughts import PROMPT_END

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Token = TypeVar("Token")

RESPONSE_LIMIT = "max_response_length"  # in a row's extra_info: tokens after which its responses are cut


class RLHFDataset(Dataset):
    """Rows with their prompt tokenised through the chat template.

    Args:
        data_files: parquet files in verl's row schema.
        config: the section ``data``, as a typed config, an OmegaConf tree or a dict. Read are ``prompt_key``,
            ``max_prompt_length`` (a longer prompt is dropped and counted in ``num_filtered`` or, without
            ``filter_overlong_prompts``, cut as ``truncation`` says; with ``error`` a ValueError names its row),
            ``return_raw_chat``, ``return_full_prompt`` and ``apply_chat_template_kwargs``.
        processor: of images and the like; there are none here.
        max_samples: use only so many rows from the start; -1 is all.

    Attributes:
        dataframe: the rows that are used, as dicts.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.tokenizer, self.config, self.processor, self.max_samples = tokenizer, config, processor, max_samples
        self.prompt_key = str(setting(config, "prompt_key", "prompt"))
        self.max_prompt_length = int(setting(config, "max_prompt_length", 1024))
        self.truncation = str(setting(config, "truncation", "error"))
        self.filter_overlong_prompts = bool(setting(config, "filter_overlong_prompts", True))
        self.return_raw_chat = bool(setting(config, "return_raw_chat", False))
        self.return_full_prompt = bool(setting(config, "return_full_prompt", False))
        self.apply_chat_template_kwargs = dict(setting(config, "apply_chat_template_kwargs", None) or {})
        self.num_filtered = 0
        self.resume_dataset_state()

    def resume_dataset_state(self) -> None:
        """Reads the files again."""
        rows = read_rows(self.data_files, self.prompt_key)
        rows = rows[: self.max_samples] if self.max_samples >= 0 else rows
        self.dataframe: list[dict[str, Any]] = rows
        self._texts, self._ids = self._tokenized(rows)
        self._check_extra_infos()
        too_long = [index for index, ids in enumerate(self._ids) if len(ids) > self.max_prompt_length]
        if too_long and self.filter_overlong_prompts:
            dropped = set(too_long)
            kept = [index for index in range(len(rows)) if index not in dropped]
            self.dataframe = [rows[index] for index in kept]
            self._texts, self._ids = [self._texts[i] for i in kept], [self._ids[i] for i in kept]
            self.num_filtered = len(too_long)
            logger.info("%d of %d prompts are over %d tokens", len(too_long), len(rows), self.max_prompt_length)
        elif too_long:
            self._cut(too_long)
        if not self.dataframe:
            raise ValueError(f"no prompt of {self._named()} has at most {self.max_prompt_length} tokens")
        self._columns = list(dict.fromkeys(key for row in self.dataframe for key in row))

    def maybe_filter_out_long_prompts(self, dataframe: Sequence[Mapping[str, Any]] | None = None) -> list[Any]:
        """The rows of ``dataframe`` (None: this set's) that fit, or all without ``filter_overlong_prompts``."""
        rows = list(self.dataframe if dataframe is None else dataframe)
        if not self.filter_overlong_prompts:
            return rows
        _, ids = self._tokenized(rows)
        return [row for row, tokens in zip(rows, ids, strict=True) if len(tokens) <= self.max_prompt_length]

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """The row without its prompt column, and

        ``input_ids``, ``attention_mask``, ``position_ids``: int64 [max_prompt_length], padded on the left.
        ``raw_prompt_ids``: the token ids; ``prompt_text``: the prompt as text.
        ``response_limit``: the row's own ``extra_info.max_response_length``, 0 where it has none.
        ``index``: that of ``extra_info``, or else the number of the row.
        ``raw_prompt``: the chat messages, with ``return_raw_chat`` or in a subclass, which may change them.
        ``full_prompts``: the prompt as text, with ``return_full_prompt``.
        """
        row, ids = self.dataframe[item], self._ids[item]
        extra_info = row.get("extra_info") or {}
        found = {key: row.get(key) for key in self._columns if key != self.prompt_key}
        found |= _padded(ids, self.max_prompt_length, self.tokenizer.pad_token_id or 0)
        found |= {
            "raw_prompt_ids": list(ids),
            "prompt_text": self._texts[item],
            "extra_info": extra_info,
            "response_limit": extra_info.get(RESPONSE_LIMIT) or 0,
            "index": extra_info.get("index", item),
        }
        if self.return_raw_chat or type(self) is not RLHFDataset:
            found["raw_prompt"] = [dict(message) for message in row[self.prompt_key]]
        if self.return_full_prompt:
            found["full_prompts"] = self._texts[item]
        return found

    def is_rewritten(self, row: Mapping[str, Any], item: int) -> bool:
        """Whether ``raw_prompt`` of a row that a subclass made is another chat than the file's."""
        return "raw_prompt" in row and list(row["raw_prompt"]) != list(self.dataframe[item][self.prompt_key])

    def _tokenized(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[int]]]:
        """The prompts as texts, through the chat template, and as token ids."""
        if not rows:
            return [], []
        texts = []
        for index, row in enumerate(rows):
            try:
                texts.append(chat_text(self.tokenizer, row[self.prompt_key], **self.apply_chat_template_kwargs))
            except ValueError as error:
                raise ValueError(f"row {index} of {self._named()}: {error}") from error
        return texts, self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _cut(self, too_long: list[int]) -> None:
        longest = self.max_prompt_length
        if self.truncation == "error":
            raise TooLongError(
                f"{len(too_long)} prompts of {self._named()} are longer than data.max_prompt_length {longest} tokens, "
                f"the first in row {too_long[0]} ({len(self._ids[too_long[0]])} tokens); raise it, or set "
                "data.filter_overlong_prompts=True or data.truncation=left"
            )
        for index in too_long:
            self._ids[index] = truncated(self._ids[index], longest, self.truncation)
            self._texts[index] = str(self.tokenizer.decode(self._ids[index]))
        counts = (len(too_long), len(self._ids), longest, self.truncation)
        logger.info("%d of %d prompts are cut to %d tokens (%s)", *counts)

    def _check_extra_infos(self) -> None:
        if any(PROMPT_END in (row.get("extra_info") or {}) for row in self.dataframe):
            raise ValueError(
                f"the extra_info of {self._named()} has {PROMPT_END!r}, which a run writes itself (docs/rewards.md); "
                "rename the key"
            )
        limits = {i: (row.get("extra_info") or {}).get(RESPONSE_LIMIT) for i, row in enumerate(self.dataframe)}
        wrong = [index for index, limit in limits.items() if limit is not None and not (_is_int(limit) and limit > 0)]
        if wrong:
            raise ValueError(
                f"{len(wrong)} rows of {self._named()} have an extra_info.{RESPONSE_LIMIT} that is no number "
                f"of tokens, the first is row {wrong[0]} ({limits[wrong[0]]!r}); give a whole number above 0, or none"
            )

    def _named(self) -> str:
        return ", ".join(self.data_files)


def setting(config: Any, key: str, default: Any) -> Any:
    """A key of a typed config, of an OmegaConf tree or of a dict."""
    return config.get(key, default) if hasattr(config, "get") else getattr(config, key, default)


def truncated(tokens: list[Token], length: int, truncation: str) -> list[Token]:
    """At most ``length`` of the tokens: the last with ``left``, the first with ``right``, both ends with ``middle``."""
    if truncation == "middle":
        first = length // 2
        return [*tokens[:first], *tokens[len(tokens) - (length - first) :]]
    return tokens[-length:] if truncation == "left" else tokens[:length]


def _padded(ids: list[int], length: int, pad: int) -> dict[str, Tensor]:
    num_pad = length - len(ids)
    mask = torch.tensor([0] * num_pad + [1] * len(ids))
    return {
        "input_ids": torch.tensor([pad] * num_pad + list(ids)),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(0) - 1).clamp(min=0),
    }


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | np.ndarray]:
    """Tensors are stacked to [B, ...], every other field becomes an object array [B].

    For ``DataProto.from_single_dict``.
    """
    columns: dict[str, Tensor | np.ndarray] = {}
    for key, first in data_list[0].items():
        values = [row[key] for row in data_list]
        columns[key] = torch.stack(values) if isinstance(first, Tensor) else as_rows(values)
    return columns
