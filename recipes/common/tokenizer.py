"""The tiny models' tokenizers: byte-level BPE with the special tokens and the chat form of DeepSeek or of Qwen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_formats.files import write_text

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
SPECIAL_TOKENS = (BOS, EOS, PAD)  # ids 0, 1, 2 as in DeepSeek-V3
ROLE_TOKENS = (USER, ASSISTANT)
START, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

_DEEPSEEK_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{ message['content'] }}"
    "{%- elif message['role'] == 'user' -%}{{ '" + USER + "' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '" + ASSISTANT + "' + message['content'] + eos_token }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '" + ASSISTANT + "' }}{%- endif -%}"
)

_CHATML_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '" + START + "' + message['role'] + '\n' + message['content'] + '" + END + "\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '" + START + "assistant\n' }}{%- endif -%}"
)


@dataclass(frozen=True)
class ChatForm:
    """Special tokens and chat template.

    special: special tokens, whose ids count from 0 · roles: further texts that are one token each · turns: role -> what
    stands before and after the content of a message · opening: what the assistant's answer follows.
    """

    bos: str | None
    eos: str
    pad: str
    special: tuple[str, ...]
    roles: tuple[str, ...]
    template: str
    beginning: str
    turns: Mapping[str, tuple[str, str]]
    opening: str

    def text(self, messages: Iterable[dict[str, str]]) -> str:
        """The template's text of the messages, up to the start of the assistant's next turn."""
        turns = [(self.turns[message["role"]], message["content"]) for message in messages]
        return self.beginning + "".join(before + text + after for (before, after), text in turns) + self.opening


DEEPSEEK = ChatForm(
    bos=BOS,
    eos=EOS,
    pad=PAD,
    special=SPECIAL_TOKENS,
    roles=ROLE_TOKENS,
    template=_DEEPSEEK_TEMPLATE,
    beginning=BOS,
    turns={"system": ("", ""), "user": (USER, ""), "assistant": (ASSISTANT, EOS)},
    opening=ASSISTANT,
)
CHATML = ChatForm(
    bos=None,
    eos=END,
    pad=END_OF_TEXT,
    special=(END_OF_TEXT, START, END),
    roles=(),
    template=_CHATML_TEMPLATE,
    beginning="",
    turns={role: (f"{START}{role}\n", f"{END}\n") for role in ("system", "user", "assistant", "tool")},
    opening=f"{START}assistant\n",
)


def write_tokenizer(
    texts: Iterable[str],
    out_dir: Path,
    vocab_size: int,
    model_max_length: int,
    whole_tokens: Sequence[str] = (),
    form: ChatForm = DEEPSEEK,
) -> None:
    """Train on ``texts`` and write ``tokenizer.json`` and ``tokenizer_config.json`` as ``AutoTokenizer`` reads them.

    Every digit is a token of its own, so a number has the same tokens everywhere. Merges may cross spaces, which makes
    a frequent question a handful of tokens; any other text falls back to bytes. Each of ``whole_tokens`` is one token.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    one_token = (*form.special, *form.roles, *whole_tokens)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True) for text in one_token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without(one_token, texts), trainer)
    saved = json.loads(tokenizer.to_str())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] in form.special  # decoding must not drop the tags
    write_text(out_dir / "tokenizer.json", json.dumps(saved, ensure_ascii=False, indent=1) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": form.bos,
        "eos_token": form.eos,
        "pad_token": form.pad,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        "chat_template": form.template,
    }
    write_text(out_dir / "tokenizer_config.json", json.dumps(config, ensure_ascii=False, indent=1) + "\n")


def _without(whole_tokens: Sequence[str], texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        pieces = [text]
        for whole in whole_tokens:
            pieces = [part for piece in pieces for part in piece.split(whole)]
        yield from (piece for piece in pieces if piece)
