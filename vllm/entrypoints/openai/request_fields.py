"""The fields of OpenAI's and vLLM's requests that nothing here reads: taken without effect, or refused by name.

The fields that are read are those of the bodies in `protocol.py`. A field of neither kind is taken without effect, as
vLLM takes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

MAX_NAME = 100  # characters of a client's name that are looked at


@dataclass(frozen=True)
class BodyField:
    """A field that nothing here reads.

    Attributes:
        reason: why it changes nothing; of a refused value, what is missing.
        accepted: values beside null that are taken, because the answer is the same without them; None means all.
        unless: (another field, its value) beside which every value is taken.
    """

    reason: str
    accepted: tuple[Any, ...] | None = None
    unless: tuple[str, str] | None = None

    def asks_for_something(self, value: Any, body: Mapping[str, Any]) -> bool:
        """Whether an answer without the field would be another one."""
        if self.accepted is None or value is None or _without_nulls(value) in self.accepted:
            return False
        return self.unless is None or body.get(self.unless[0]) != self.unless[1]


_FUNCTIONS = "tools has taken its place"
_GUIDED = "structured outputs are not supported"
_AUDIO = "models take and write text only"
_CALLER = "it describes the caller"
_CACHE = "prefixes are cached for all requests alike"
_BEAMS = "there is no beam search"
_NO_HINT = "the model is not told; chat_template_kwargs reaches a chat template that knows it"

FIELDS: dict[str, BodyField] = {
    # OpenAI's
    "user": BodyField(_CALLER),
    "metadata": BodyField(_CALLER),
    "safety_identifier": BodyField(_CALLER),
    "store": BodyField("answers are not stored"),
    "service_tier": BodyField("there is one tier; `priority` orders requests"),
    "moderation": BodyField("nothing is moderated"),
    "prompt_cache_key": BodyField(_CACHE),
    "prompt_cache_options": BodyField(_CACHE),
    "prompt_cache_retention": BodyField(_CACHE),
    "prediction": BodyField("it would only save time"),
    "reasoning_effort": BodyField(_NO_HINT),
    "verbosity": BodyField(_NO_HINT),
    "functions": BodyField(_FUNCTIONS, ([],), unless=("function_call", "none")),
    "function_call": BodyField(_FUNCTIONS, ("none", "auto")),
    "response_format": BodyField(_GUIDED, ({"type": "text"}, {})),
    "modalities": BodyField(_AUDIO, (["text"], [])),
    "audio": BodyField(_AUDIO, ()),
    "web_search_options": BodyField("the model cannot search", ()),
    "suffix": BodyField("the model only continues a prompt", ("",)),
    "best_of": BodyField("ask for n and choose", (1,)),
    "echo": BodyField("an answer has no prompt; /v1/completions has echo", (False,)),
    # vLLM's
    "use_beam_search": BodyField(_BEAMS, (False,)),
    "length_penalty": BodyField(_BEAMS),
    "early_stopping": BodyField(_BEAMS),
    "guided_json": BodyField(_GUIDED, ()),
    "guided_regex": BodyField(_GUIDED, ()),
    "guided_choice": BodyField(_GUIDED, ([],)),
    "guided_grammar": BodyField(_GUIDED, ()),
    "structural_tag": BodyField(_GUIDED, ()),
    "structured_outputs": BodyField(_GUIDED, ({},)),
    "guided_decoding_backend": BodyField(_GUIDED),
    "guided_whitespace_pattern": BodyField(_GUIDED),
    "logits_processors": BodyField("code of clients does not run in the server", ([],)),
    "documents": BodyField("templates get messages only: put the documents into one", ([],)),
    "prompt_embeds": BodyField("a prompt is text or token ids", ([],)),
    "truncate_prompt_tokens": BodyField("a prompt is taken whole: shorten it", ()),
    "mm_processor_kwargs": BodyField(_AUDIO),
    "return_tokens_as_token_ids": BodyField("log-probs name tokens by their text", (False,)),
    "include_reasoning": BodyField("with a reasoning parser the thought is always returned", (True,)),
    "kv_transfer_params": BodyField("prefill and decode run in the same engine", ({},)),
    "cache_salt": BodyField(_CACHE),
    "request_id": BodyField("the server names requests itself"),
    "vllm_xargs": BodyField("there are no plug-ins that read them"),
    "stream_options.include_obfuscation": BodyField("chunks are not padded"),
    "stream_options.continuous_usage_stats": BodyField("only a last chunk has the usage", (False,)),
}


def take_fields(
    body: Mapping[str, Any], read: Collection[str], prefix: str = ""
) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """(the fields of `read`, the names of those without effect, those to refuse with the reason) of an object.

    `prefix` says where in a request the object is. A null asks for the default, as if the field were not there.
    """
    given = {name: value for name, value in body.items() if value is not None}
    kept = {name: value for name, value in given.items() if name in read}
    refused, ignored = {}, []
    for name, value in given.items():
        known = FIELDS.get(prefix + name)
        if name in read:
            continue
        if known is not None and known.asks_for_something(value, body):
            refused[name] = known.reason
        else:
            ignored.append(prefix + name)
    return kept, ignored, refused


def reason_of(name: str, read: Collection[str]) -> str:
    """Why a field changes nothing; for one that nobody knows with the nearest of `read`."""
    if name in FIELDS:
        return FIELDS[name].reason
    close = difflib.get_close_matches(name, read, n=1)
    return "this server does not know it" + (f"; did you mean {close[0]!r}?" if close else "")


def _without_nulls(value: Any) -> Any:
    return {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value
