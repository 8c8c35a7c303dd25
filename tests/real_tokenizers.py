"""Tokenizers of the kinds that published models have, trained on the spot: of Qwen's, Llama 3's and Llama 2's kind.

They have what makes each kind different: how text is cut before BPE, what stands for a byte, the special tokens and
their places, the chat template, what the tokenizer adds by itself to a text. Only the vocabulary is small. Slow tests
take the published ones of DeepSeek-V3, Qwen3 and Llama 3 too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.published import tokenizer_folder

TEXTS = (
    "What is 3 + 4? The answer is 7, so the final answer is #### 7.",
    "Natalia sold half as many clips in May. She didn't sell any in June, did she?",
    "def f(x):\n    return x * 2  # twice\n\nÜber die Straße, 中文 und 🙂.",
)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
OPEN, CLOSE = "<think>", "</think>"
# How a tokenizer may hold them: its whole tokens, and whether these are special.
TAGS = {"several tokens": ((), False), "one token": ((OPEN, CLOSE), False), "special": ((OPEN, CLOSE), True)}


@dataclass(frozen=True)
class Kind:
    """How to make a tokenizer.

    config: tokenizer_config.json, without the template · bos: what begins a conversation, once · ends: tokens that end
    an answer, of generation_config.json · turn: what the template makes of one question, up to the answer.
    """

    make: Callable[[], Tokenizer]
    special: tuple[str, ...]
    bos: str | None
    ends: tuple[str, ...]
    template: str
    turn: str
    config: dict[str, Any]

    def write(self, folder: Path, whole_tokens: Sequence[str] = (), *, are_special: bool = False) -> int:
        """Write tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json; number of tokens.

        Each of ``whole_tokens`` is one token.
        """
        tokenizer = self.make()
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=are_special) for text in whole_tokens])
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": self.bos, **self.config}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(self.template)
        ends = [tokenizer.token_to_id(end) for end in self.ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        return int(tokenizer.get_vocab_size())


@dataclass(frozen=True)
class Published(Kind):
    """One of ``published.TOKENIZERS``, by its name: its files are written as they are."""

    name: str = ""

    def write(self, folder: Path, whole_tokens: Sequence[str] = (), *, are_special: bool = False) -> int:
        shutil.copytree(tokenizer_folder(self.name), folder, dirs_exist_ok=True)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ends = [tokenizer.token_to_id(end) for end in self.ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        return int(tokenizer.get_vocab_size())


def _published(name: str, bos: str | None, ends: tuple[str, ...], turn: str) -> Published:
    return Published(Tokenizer, special=(), bos=bos, ends=ends, template="", turn=turn, config={}, name=name)


def _byte_level(special: Sequence[str], numbers: str, normalizer: Any, bos: str | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    cut = pre_tokenizers.Split(Regex(WORDS % numbers), "isolated")
    whole_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, whole_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if bos is not None:
        begins = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begins])
    return tokenizer


def _pieces(special: Sequence[str], bos: str) -> Tokenizer:
    """BPE over pieces that begin with their space; what is no piece is its bytes, a token ``<0xE4>`` each."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    ascii_only = ["".join(letter for letter in text if letter.isascii()) for text in TEXTS]
    trained.train_from_iterator(ascii_only, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    made = json.loads(trained.to_str())["model"]
    words = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(made["vocab"], key=made["vocab"].get)]
    merges = [tuple(pair) for pair in made["merges"]]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    begins = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    tokenizer.post_processor = begins
    return tokenizer


_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
_LLAMA2 = ("<unk>", "<s>", "</s>")

KINDS: dict[str, Kind] = {
    "qwen": Kind(
        lambda: _byte_level(_QWEN, r"\p{N}", normalizers.NFC(), None),
        special=_QWEN,
        bos=None,
        ends=("<|im_end|>", "<|endoftext|>"),
        template=(
            "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
            "{{- message.content + '<|im_end|>\n' }}{%- endfor %}"
            "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
            "{%- if enable_thinking is defined and enable_thinking is false %}"
            "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
        ),
        turn="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        config={
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
        },
    ),
    "llama3": Kind(
        lambda: _byte_level(_LLAMA3, r"\p{N}{1,3}", None, "<|begin_of_text|>"),
        special=_LLAMA3,
        bos="<|begin_of_text|>",
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        template=(
            "{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
            "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
            "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
        ),
        turn=(
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        config={"eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": True},  # and no token for padding
    ),
    "llama2": Kind(
        lambda: _pieces(_LLAMA2, "<s>"),
        special=_LLAMA2,
        bos="<s>",
        ends=("</s>",),
        template=(
            "{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
            "{{- '[INST] ' + message['content'] + ' [/INST]' }}{%- else %}"
            "{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
        ),
        turn="<s>[INST] {} [/INST]",
        config={"eos_token": "</s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False},
    ),
}

_LLAMA3_TURN, _LLAMA3_ENDS = KINDS["llama3"].turn, ("<|end_of_text|>", "<|eot_id|>")
PUBLISHED = {
    "published deepseek_v3": _published(
        "deepseek_v3",
        "<｜begin▁of▁sentence｜>",
        ("<｜end▁of▁sentence｜>",),
        "<｜begin▁of▁sentence｜><｜User｜>{}<｜Assistant｜>",
    ),
    "published qwen3": _published("qwen3", None, ("<|im_end|>", "<|endoftext|>"), KINDS["qwen"].turn),
    "published llama3": _published("llama3", "<|begin_of_text|>", _LLAMA3_ENDS, _LLAMA3_TURN),
    "published llama3_1": _published("llama3_1", "<|begin_of_text|>", _LLAMA3_ENDS, _LLAMA3_TURN),
}
NAMES = [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED)]
NAMES_AND_ENDS = [
    *((name, end) for name, kind in KINDS.items() for end in kind.ends),
    *(pytest.param(name, end, marks=pytest.mark.slow) for name, kind in PUBLISHED.items() for end in kind.ends),
]
NAMES_AND_TAGS = [
    *((name, tags) for name in KINDS for tags in TAGS),
    *(pytest.param(name, "several tokens", marks=pytest.mark.slow) for name in PUBLISHED),  # as they are
]
KINDS |= PUBLISHED
