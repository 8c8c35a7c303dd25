"""A model that writes fixed texts: after each token it always continues with the same one.

Attention and experts add nothing, so a position's hidden state is its token's embedding, and the head maps that to the
next token. The vocabulary has all bytes and the pieces of the texts; a text begins after its key, one character.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.vllm.tiny import write_checkpoint

EOS = 1
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_parrot(path: Path, texts: Mapping[str, Sequence[str]], special_tokens: Sequence[str] = ()) -> str:
    """Write the checkpoint; `texts` are lists of pieces, a token each, of which none is in two places."""
    words = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces = [piece for text in texts.values() for piece in text]
    assert len(set(pieces)) == len(pieces), "a piece has one successor"
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=piece in special_tokens) for piece in pieces])
    checkpoint = write_checkpoint(path, vocab_size=len(words) + len(pieces))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(path)
    next_of = {}
    for key, text in texts.items():
        ids = [tokenizer.token_to_id(piece) for piece in text]
        next_of |= dict(pairwise([*tokenizer.encode(key).ids, *ids, EOS]))
    write_successors(path, next_of)
    return checkpoint


def write_successors(path: Path, next_of: Mapping[int, int]) -> None:
    """Give the checkpoint in ``path`` weights with which each token of ``next_of`` is followed by its value."""
    files = {file: load_file(file) for file in path.glob("*.safetensors")}
    weights = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"].zero_()
    weights["model.norm.weight"].fill_(1)
    for place, (token, after) in enumerate(next_of.items()):  # IndexError for more than hidden_size tokens
        embeddings[token] = 0
        embeddings[token, place] = head[after, place] = 1
    for file, tensors in files.items():
        save_file(tensors, file, metadata={"format": "pt"})
