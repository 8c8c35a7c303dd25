"""A stored head beside tie_word_embeddings, and stored tables: equal copies are ignored with a line, others refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_formats.stored_extras import EMBEDDING, HEAD
from tests.mindspeed_llm.tiny import tiny_qwen3_config, write_tiny_checkpoint
from tests.vllm.test_lifecycle import build, tokens_of

TABLE = "model.layers.0.self_attn.rotary_emb.inv_freq"


CONFIG = tiny_qwen3_config(tie_word_embeddings=True, vocab_size=160, max_position_embeddings=640)


def write_tied(path: Path, seed: int = 0, **extra: Tensor) -> dict[str, Tensor]:
    """Write a checkpoint with these tensors beside its own; returns its own."""
    weights = write_tiny_checkpoint(path, CONFIG, seed=seed, dtype=torch.float32)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(weights | {name.replace("__", "."): tensor for name, tensor in extra.items()}, path / "model.safetensors")
    return weights


def test_what_a_checkpoint_stores_beside_a_tied_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    embedding = write_tied(tmp_path / "plain")[EMBEDDING]
    assert HEAD not in write_tied(tmp_path / "plain")
    expected = tokens_of(build(str(tmp_path / "plain")))
    extra = {"lm_head__weight": embedding.clone(), TABLE.replace(".", "__"): torch.ones(8)}
    with caplog.at_level(logging.INFO):
        write_tied(tmp_path / "copy", **extra)
        assert tokens_of(build(str(tmp_path / "copy"))) == expected
    for name in (HEAD, TABLE):
        assert len([line for line in caplog.messages if name in line and "ignored" in line]) == 1
    extra["lm_head__weight"][3, 1] += 1
    write_tied(tmp_path / "other", **extra)
    with pytest.raises(
        ValueError, match=r"lm_head\.weight \(model\.safetensors\) differs from .*embed_tokens\.weight in row 3"
    ):
        build(str(tmp_path / "other"))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_tied_head_that_comes_with_an_update(
    is_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before or after the embedding that it must equal."""
    new = write_tied(tmp_path, seed=1)
    write_tied(tmp_path)
    llm = build(str(tmp_path))
    llm.update_weights(new.items())
    expected = tokens_of(llm)

    def with_head(head: Tensor) -> dict[str, Tensor]:
        return {HEAD: head} | new if is_first else new | {HEAD: head}

    with caplog.at_level(logging.INFO):
        llm.update_weights((with_head(new[EMBEDDING].clone()) | {TABLE: torch.ones(8)}).items())
    assert tokens_of(llm) == expected
    assert len([line for line in caplog.messages if HEAD in line and "ignored" in line]) == 1
    other = new[EMBEDDING].clone()
    other[-1, -1] += 1
    for head, message in (
        (other, "differs from model.embed_tokens.weight"),
        (other[:-1], f"has shape .{len(other) - 1}, "),
    ):
        with pytest.raises(ValueError, match=f"weight lm_head.weight {message}"):
            llm.update_weights(with_head(head).items())
        with pytest.raises(RuntimeError, match="never loaded"):
            tokens_of(llm)
