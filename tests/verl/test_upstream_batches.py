"""Upstream's functions for data sets of a user's: tokenizers and positions."""

from __future__ import annotations

from pathlib import Path

import torch

from recipes.common.tokenizer import write_tokenizer
from verl.utils import model as model_utils
from verl.utils.tokenizer import hf_tokenizer


def test_a_tokenizer_has_a_pad_token(tmp_path: Path) -> None:
    write_tokenizer(["a few words"] * 3, tmp_path, 270, 64)
    tokenizer = hf_tokenizer(str(tmp_path), trust_remote_code=True)
    assert tokenizer.pad_token_id is not None


def test_positions_of_a_padded_batch() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert model_utils.compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
