"""The tokenizer of a GGUF file in Hugging Face form: BPE over bytes, or SentencePiece's BPE.

How text is cut before BPE has only a name in the file. tokenizers.json says what each kind (``tokenizer.ggml.model``)
and name (``tokenizer.ggml.pre``) stands for, as the published tokenizer.json of its model has it, and whether a text
begins with a token where no key of the file says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

_USER_DEFINED, _UNUSED = 4, 5  # tokenizer.ggml.token_type
_ADDED = (2, 3, _USER_DEFINED)  # unknown and control tokens are special


def make_tokenizer(keys: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer. ValueError naming a kind or a pre-tokenizer that is not known."""
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in keys.items()}
    forms = json.loads(Path(__file__).with_name("tokenizers.json").read_text(encoding="utf-8"))
    kind = given.get("model")
    if kind not in forms:
        raise ValueError(f"tokenizer.ggml.model is {kind!r}; supported: {', '.join(forms)}")
    name = given.get("pre") if kind == "gpt2" else f"add_space_prefix {given.get('add_space_prefix', True)}"
    if name not in forms[kind]:
        raise ValueError(f"tokenizer.ggml.pre is {name!r}; supported pre-tokenizers: {', '.join(forms[kind])}")
    form, tokens = forms[kind][name], given["tokens"]
    types = given.get("token_type") or [1] * len(tokens)
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED}
    form["model"]["vocab"] = vocabulary
    if kind == "llama":
        form["model"] |= {"merges": _merges(vocabulary, given), "unk_token": tokens[given.get("unknown_token_id", 0)]}
    else:
        form["model"]["merges"] = [pair.split(" ", 1) for pair in given["merges"]]
    adds_bos = given.get("add_bos_token", form.pop("add_bos_token"))
    try:
        tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **form}))
    except Exception as error:  # the library raises nothing more particular
        raise ValueError(f"the file's tokens and merges do not make a tokenizer: {error}") from error
    added = [(token, types[index] != _USER_DEFINED) for token, index in vocabulary.items() if types[index] in _ADDED]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=is_special) for token, is_special in added])
    begin = tokens[given["bos_token_id"]] if adds_bos and "bos_token_id" in given else ""
    end = tokens[given["eos_token_id"]] if given.get("add_eos_token") else ""
    if begin or end:
        special = [(token, vocabulary[token]) for token in (begin, end) if token]
        tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A {end}".split(), special_tokens=special)
    return tokenizer


def tokenizer_config(keys: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """Return tokenizer_config.json: special tokens by their texts, and the chat template where the file has one."""
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    ids = {f"{name}_token": keys.get(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}
    config = {name: keys["tokenizer.ggml.tokens"][index] for name, index in ids.items() if index is not None}
    if "tokenizer.chat_template" in keys:
        config["chat_template"] = keys["tokenizer.chat_template"]
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": max_length}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **config}


def end_tokens(keys: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens that end a text, a turn or a message."""
    given = (keys.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return list(dict.fromkeys(index for index in given if index is not None))


def _merges(vocabulary: Mapping[str, int], given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """SentencePiece's BPE has no merges: of all neighbours those are joined whose piece has the best score."""
    ranked = []
    for piece, index in vocabulary.items():
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = ((vocabulary[left], vocabulary[right]) for left, right in halves if {left, right} <= vocabulary.keys())
        ranked += [(-given["scores"][index], *pair) for pair in pairs]
    return [(given["tokens"][left], given["tokens"][right]) for _, left, right in sorted(ranked)]
