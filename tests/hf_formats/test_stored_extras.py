"""What published checkpoints store beside the weights: equal copies and derived buffers are ignored, others refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_formats.safetensors import read_directory
from hf_formats.stored_extras import EMBEDDING, HEAD, is_derived_buffer, unread_extras


def extras(folder: Path, tensors: dict[str, torch.Tensor], tied: bool = True) -> frozenset[str]:
    save_file(tensors, folder / "model.safetensors")
    return unread_extras(folder, read_directory(folder), tied)


def test_an_equal_head_and_buffers_are_ignored_with_a_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embedding, mask = torch.randn(3, 4), torch.ones(2, 2, dtype=torch.bool)
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "transformer.h.0.attn.bias")
    stored = {EMBEDDING: embedding, HEAD: embedding.clone(), names[0]: torch.ones(2), names[1]: mask}
    with caplog.at_level(logging.WARNING):
        assert extras(tmp_path, stored) == {HEAD, *names}
        assert extras(tmp_path, stored | {EMBEDDING: embedding.double()}) == {HEAD, *names}
    assert len(caplog.messages) == 4
    assert names[0] in caplog.messages[0] and HEAD in caplog.messages[1]


def test_a_head_that_is_no_copy_is_refused_by_name(tmp_path: Path) -> None:
    embedding = torch.randn(3, 4)
    other = embedding.clone()
    other[1, 3] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight \(model\.safetensors\) differs .* in row 1; set tie_word"):
        extras(tmp_path, {EMBEDDING: embedding, HEAD: other})
    with pytest.raises(ValueError, match=r"shape \(2, 4\) and model\.embed_tokens\.weight \(3, 4\)"):
        extras(tmp_path, {EMBEDDING: embedding, HEAD: other[:2].clone()})
    assert extras(tmp_path, {EMBEDDING: embedding, HEAD: other}, tied=False) == frozenset()


def test_no_weight_of_a_model_counts_as_a_buffer() -> None:
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.gate.e_score_correction_bias", HEAD):
        assert not is_derived_buffer(name)
    for name in ("rotary_emb.inv_freq", "gpt_neox.layers.0.attention.masked_bias", "model.embeddings.position_ids"):
        assert is_derived_buffer(name)
