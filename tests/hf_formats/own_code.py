"""A folder's tokenizer in the form of Kimi-K2's and Moonlight's: a tiktoken file and code of its own."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

TOKENS = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w", b" wo"]
SPECIAL = {len(TOKENS): "[BOS]", len(TOKENS) + 1: "[EOS]", len(TOKENS) + 4: "<|im_end|>"}  # with a gap, as theirs have


@dataclass(frozen=True)
class OwnCode:
    """The folder's code, which leaves a mark when it is executed."""

    mark: Path

    def was_executed(self) -> bool:
        return self.mark.exists()


def write_own_code_tokenizer(folder: Path) -> OwnCode:
    """Write tokenizer_config.json, tiktoken.model and tokenization_moonshot.py."""
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(TOKENS)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    config = {
        "added_tokens_decoder": {
            str(token): {"content": text, "special": True, **flags} for token, text in SPECIAL.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
        "chat_template": "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    mark = folder / "executed"
    (folder / "tokenization_moonshot.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    return OwnCode(mark)
