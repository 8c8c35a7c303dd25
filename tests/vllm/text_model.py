"""A tiny checkpoint with a byte-level tokenizer: every byte is a token, and a few pairs are."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.vllm.tiny import write_checkpoint

PAIRS = ["ab", "ba", "re", "th", "é", "Ġt"]  # é: as its two bytes
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
FIRST_BYTE, VOCAB_SIZE = 2, 2 + 256 + 6


def write_text_checkpoint(path: Path) -> str:
    pairs = [("Ã", "©") if pair == "é" else (pair[0], pair[1]) for pair in PAIRS]
    words = ["<bos>", "<eos>", *BYTES, *(first + second for first, second in pairs)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    checkpoint = write_checkpoint(path, vocab_size=VOCAB_SIZE)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return checkpoint


def byte_tokens(text: str) -> list[int]:
    """The token of each byte, none of the pairs."""
    alphabet = _byte_letters()
    return [FIRST_BYTE + BYTES.index(alphabet[byte]) for byte in text.encode()]


def _byte_letters() -> list[str]:
    """The letter of each byte in byte-level vocabularies: itself if printable, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
