"""Prompts of an RL run: chat rows in parquet files to token ids."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.protocol_storage import as_rows
from verl.utils.parquet import read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

RESPONSE_LIMIT = "max_response_length"  # in a row's extra_info: tokens after which its responses are cut


class RLHFDataset:
    """Rows with their prompt tokenised through the chat template.

    Args:
        data_files: parquet files in verl's row schema.
        max_prompt_length: tokens; a longer prompt is dropped (counted in ``num_filtered``) or, without
            ``filter_overlong_prompts``, cut as ``truncation`` says; with ``error`` a ValueError names its row.
        max_samples: use only so many rows from the start; -1 is all.
    """

    def __init__(
        self,
        data_files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        max_prompt_length: int,
        filter_overlong_prompts: bool = False,
        truncation: str = "error",
        max_samples: int = -1,
    ) -> None:
        rows = read_rows(data_files, prompt_key)
        if max_samples >= 0:
            rows = rows[:max_samples]
        chat = tokenizer.apply_chat_template
        texts = [str(chat(row[prompt_key], add_generation_prompt=True, tokenize=False)) for row in rows]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        too_long = [index for index, tokens in enumerate(ids) if len(tokens) > max_prompt_length]
        if too_long and not filter_overlong_prompts and truncation != "error":
            for index in too_long:
                ids[index] = truncated(ids[index], max_prompt_length, truncation)
                texts[index] = str(tokenizer.decode(ids[index]))
            logger.info(
                "%d of %d prompts are cut to %d tokens (%s)", len(too_long), len(rows), max_prompt_length, truncation
            )
            too_long = []
        if too_long and not filter_overlong_prompts:
            raise ValueError(
                f"{len(too_long)} prompts of {', '.join(data_files)} are longer than data.max_prompt_length "
                f"{max_prompt_length} tokens, the first in row {too_long[0]} ({len(ids[too_long[0]])} tokens); "
                "raise it, or set data.filter_overlong_prompts=True or data.truncation=left"
            )
        dropped = set(too_long)
        self.num_filtered = len(dropped)
        self._rows = [(row, texts[index], ids[index]) for index, row in enumerate(rows) if index not in dropped]
        if not self._rows:
            raise ValueError(f"no prompt of {', '.join(data_files)} has at most {max_prompt_length} tokens")
        limits = {index: (row.get("extra_info") or {}).get(RESPONSE_LIMIT) for index, row in enumerate(rows)}
        wrong = [index for index, limit in limits.items() if limit is not None and not (_is_int(limit) and limit > 0)]
        if wrong:
            raise ValueError(
                f"{len(wrong)} rows of {', '.join(data_files)} have an extra_info.{RESPONSE_LIMIT} that is no number "
                f"of tokens, the first is row {wrong[0]} ({limits[wrong[0]]!r}); give a whole number above 0, or none"
            )
        if dropped:
            logger.info("%d of %d prompts are over %d tokens", len(dropped), len(rows), max_prompt_length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``raw_prompt_ids``, a list of at most ``max_prompt_length`` token ids, and the row.

        ``response_limit`` is the row's own ``extra_info.max_response_length``, 0 where it has none.
        """
        row, text, tokens = self._rows[index]
        extra_info = row.get("extra_info") or {}
        return {
            "raw_prompt_ids": list(tokens),
            "prompt_text": text,
            "data_source": row["data_source"],
            "reward_model": row["reward_model"],
            "extra_info": extra_info,
            "response_limit": extra_info.get(RESPONSE_LIMIT) or 0,
            "index": index,
        }


def truncated(tokens: list[int], length: int, truncation: str) -> list[int]:
    """At most ``length`` of the tokens: the last with ``left``, the first with ``right``, both ends with ``middle``."""
    if truncation == "middle":
        first = length // 2
        return [*tokens[:first], *tokens[len(tokens) - (length - first) :]]
    return tokens[-length:] if truncation == "left" else tokens[:length]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def collate_fn(items: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Every field becomes an object array [B]; for ``DataProto.from_single_dict``."""
    return {key: as_rows([item[key] for item in items]) for key in items[0]}
