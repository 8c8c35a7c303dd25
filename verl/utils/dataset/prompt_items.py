"""Rows of any data set as the trainer needs them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.utils.data import Dataset

from hf_formats.chat import chat_text
from verl.protocol_storage import as_json
from verl.utils.dataset.rl_dataset import RESPONSE_LIMIT, RLHFDataset
from verl.utils.reward_score.thoughts import PROMPT_END, prompt_end
from verl.workers.config.multi_turn import SINGLE_TURN

ENVIRONMENT_ROW = "environment_row"
_PADDED = ("input_ids", "attention_mask", "position_ids")  # engines get token ids without padding


class PromptItems(Dataset):
    """A data set whose rows have ``raw_prompt_ids``, ``prompt_text``, ``extra_info`` and ``response_limit``.

    Each is derived where the row of ``dataset`` lacks it: the ids from ``input_ids`` and ``attention_mask``, or from
    the chat in ``raw_prompt``, and the text from the ids. A chat that a subclass of RLHFDataset changed counts.
    ``data_source`` and ``reward_model`` are the row's own. ``extra_info`` also has what the prompt ended with, for the
    reward function (``verl.utils.reward_score.thoughts``).

    Args:
        max_prompt_length: a longer prompt is an error.
        template_kwargs: ``data.apply_chat_template_kwargs``.
        has_environments: rows also have ``environment_row``, what the environments of several turns begin with.
        agent_names: what a row may have as ``agent_name``.
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: Any,
        max_prompt_length: int,
        template_kwargs: Any = None,
        has_environments: bool = False,
        agent_names: Collection[str] = (SINGLE_TURN,),
    ) -> None:
        self.dataset, self.tokenizer, self.max_prompt_length = dataset, tokenizer, max_prompt_length
        self.template_kwargs, self.has_environments = template_kwargs or {}, has_environments
        self.agent_names = agent_names

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self.dataset[index])
        if isinstance(self.dataset, RLHFDataset) and self.dataset.is_rewritten(row, index):
            row = {key: value for key, value in row.items() if key not in ("raw_prompt_ids", "prompt_text", *_PADDED)}
        where = f"row {index} of {type(self.dataset).__name__}"
        ids = self._prompt_ids(row, where)
        missing = [key for key in ("data_source", "reward_model") if key not in row]
        if missing:
            raise ValueError(f"{where} has no {' and no '.join(missing)}; it has {', '.join(sorted(row))}")
        if row.get("agent_name") not in (None, *self.agent_names):
            more = "" if self.has_environments else "; actor_rollout_ref.rollout.multi_turn.enable=True gives more"
            raise ValueError(
                f"{where} asks for the agent loop {row['agent_name']!r}; there is {', '.join(self.agent_names)}{more}"
            )
        if not isinstance(row["reward_model"], Mapping) or "ground_truth" not in row["reward_model"]:
            given = row["reward_model"]
            raise ValueError(f"the reward_model of {where} is {given!r}; expected a dict with ground_truth")
        if not 1 <= len(ids) <= self.max_prompt_length:
            raise ValueError(
                f"the prompt of {where} has {len(ids)} tokens; expected 1 to data.max_prompt_length "
                f"({self.max_prompt_length})"
            )
        extra_info = row.get("extra_info") or {}
        if PROMPT_END in extra_info:
            raise ValueError(
                f"the extra_info of {where} has {PROMPT_END!r}, which the run writes itself; rename the key"
            )
        kept = {key: value for key, value in row.items() if key not in _PADDED}
        if self.has_environments:
            kept[ENVIRONMENT_ROW] = self._environment_row(row, index, extra_info)
        return {
            "index": index,
            "response_limit": extra_info.get(RESPONSE_LIMIT) or 0,
            **kept,
            "raw_prompt_ids": ids,
            "prompt_text": row["prompt_text"] if "prompt_text" in row else str(self.tokenizer.decode(ids)),
            "extra_info": {**extra_info, PROMPT_END: prompt_end(self.tokenizer, ids)},
        }

    def _environment_row(self, row: Mapping[str, Any], index: int, extra_info: Mapping[str, Any]) -> dict[str, Any]:
        messages = row.get("raw_prompt")
        if messages is None and isinstance(self.dataset, RLHFDataset):
            messages = self.dataset.dataframe[index][self.dataset.prompt_key]
        if messages is None:
            messages = [{"role": "user", "content": row.get("prompt_text", "")}]
        found = {"messages": list(messages), "ground_truth": row["reward_model"]["ground_truth"], "index": index}
        found |= {name: row[name] for name in ("data_source", "agent_name") if name in row}
        return dict(as_json(found | {"extra_info": extra_info}))

    def _prompt_ids(self, row: Mapping[str, Any], where: str) -> list[int]:
        if "raw_prompt_ids" in row:
            return [int(token) for token in row["raw_prompt_ids"]]
        if "input_ids" in row and "attention_mask" in row:
            return [int(token) for token in row["input_ids"][row["attention_mask"].bool()]]
        if "raw_prompt" in row:
            try:
                text = chat_text(self.tokenizer, list(row["raw_prompt"]), **self.template_kwargs)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        raise ValueError(f"{where} has no raw_prompt_ids, input_ids with attention_mask or raw_prompt: {sorted(row)}")
