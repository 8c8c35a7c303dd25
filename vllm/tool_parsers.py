"""Tool calls in the token ids of a turn, in the forms of Qwen, DeepSeek-V3 and Llama 3.1."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.utils.markers import num_begun


@dataclass(frozen=True)
class FunctionCall:
    """One call as the model wrote it; ``arguments`` is its text, which may be no JSON."""

    name: str
    arguments: str

    @property
    def is_whole(self) -> bool:
        """Whether it names a function and its arguments are a JSON object."""
        try:
            return bool(self.name) and isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False

    def as_message(self, call_id: str) -> dict[str, Any]:
        """In the form of OpenAI's ``tool_calls``."""
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolParser(ABC):
    """Finds calls between markers, which are tokens where the tokenizer has them, else text.

    Attributes:
        starts: texts with which calls begin; none where they are the whole turn, a JSON object.
    """

    starts: tuple[str, ...] = ()

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def extract_tool_calls(self, token_ids: Sequence[int]) -> tuple[str, list[FunctionCall]]:
        """The text of a turn without its calls, and the calls; markers that are not whole are text."""

    def num_shown(self, text: str, is_begun: bool) -> int:
        """How many characters of a turn's text, which may go on, are no call and no beginning of one.

        ``is_begun``: other text of the turn stands before.
        """
        if not self.starts:
            return 0 if not is_begun and (text.lstrip() or "{").startswith("{") else len(text)
        places = [place for start in self.starts if (place := text.find(start)) >= 0]
        if places:
            return min(places)
        return len(text) - num_begun(text, *self.starts)

    def parts(self, token_ids: Sequence[int], start: str, end: str) -> tuple[str, list[str]]:
        """The text outside and the texts between the markers.

        Text that only looks like a marker, spelled in other tokens, is none.
        """
        ids = list(token_ids)
        first, last = (self.token(marker) for marker in (start, end))
        if first is None or last is None:
            text = self._text(ids)
            pattern = f"{re.escape(start)}(.*?){re.escape(end)}"
            return re.sub(pattern, "", text, flags=re.DOTALL), re.findall(pattern, text, re.DOTALL)
        outside, inside, position = [], [], 0
        while first in ids[position:]:
            begin = ids.index(first, position)
            if last not in ids[begin:]:
                break
            stop = ids.index(last, begin)
            outside += ids[position:begin]
            inside.append(self._text(ids[begin + 1 : stop]))
            position = stop + 1
        return self._text(outside + ids[position:], plain=True), inside

    def token(self, marker: str) -> int | None:
        """The id of a text that is one token."""
        ids = self.tokenizer(marker, add_special_tokens=False)["input_ids"]
        return int(ids[0]) if len(ids) == 1 else None

    def _text(self, ids: Sequence[int], plain: bool = False) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=plain, clean_up_tokenization_spaces=False)
        return str(text)


class HermesToolParser(ToolParser):
    """Qwen's form: a JSON object with name and arguments between <tool_call> and </tool_call>."""

    starts = ("<tool_call>",)

    def extract_tool_calls(self, token_ids: Sequence[int]) -> tuple[str, list[FunctionCall]]:
        text, found = self.parts(token_ids, "<tool_call>", "</tool_call>")
        return text, [_call_of(one) for one in found]


class DeepSeekV3ToolParser(ToolParser):
    """DeepSeek-V3's form: the function's name behind a separator, then its arguments in a block of JSON."""

    starts = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")

    def extract_tool_calls(self, token_ids: Sequence[int]) -> tuple[str, list[FunctionCall]]:
        text, found = self.parts(token_ids, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
        calls = []
        for one in found:
            _, _, rest = one.partition("<｜tool▁sep｜>")
            name, _, arguments = rest.partition("\n")
            arguments = arguments.strip().removeprefix("```json").removesuffix("```")
            calls.append(FunctionCall(name.strip(), arguments.strip()))
        return text.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", ""), calls


class Llama3ToolParser(ToolParser):
    """Llama 3.1's form: the whole turn is a JSON object with name and parameters, or several, one behind another."""

    def extract_tool_calls(self, token_ids: Sequence[int]) -> tuple[str, list[FunctionCall]]:
        text = self._text(token_ids, plain=True)
        rest = text.strip()
        if not rest.startswith("{"):
            return text, []
        calls, decoder = [], json.JSONDecoder()
        while rest:
            try:
                _, end = decoder.raw_decode(rest)
            except ValueError:
                calls.append(FunctionCall("", rest))
                break
            calls.append(_call_of(rest[:end]))
            rest = rest[end:].lstrip(" \n;")
        return "", calls


def _call_of(text: str) -> FunctionCall:
    try:
        found = json.loads(text)
        arguments = found.get("arguments", found.get("parameters", {}))
        return FunctionCall(str(found["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))
    except (ValueError, KeyError, AttributeError, RecursionError):
        return FunctionCall("", text)


TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
    "deepseek_v3": DeepSeekV3ToolParser,
    "llama3_json": Llama3ToolParser,
}
