"""Tensors that published checkpoints hold beside a model's weights, and that neither engine reads."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from hf_formats.file_region import FileReader, FileRegion
from hf_formats.problems import shown_names

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Constants that follow from the config, which frameworks have stored as buffers: rotary frequencies, masks, positions.
_BUFFER = re.compile(
    r"(.+\.)?((rotary_emb|rotary_pos_emb)\.(inv_freq|original_inv_freq|cos_cached|sin_cached)"
    r"|(attn|self_attn|attention|self_attention)\.(bias|masked_bias|causal_mask)"
    r"|position_ids)"
)
_CHUNK_BYTES = 8 << 20


def unread_extras(directory: Path, regions: Mapping[str, FileRegion], tie_word_embeddings: bool) -> frozenset[str]:
    """Return the names of a Hugging Face directory's tensors that are to be ignored, and log a line for each kind.

    These are buffers that follow from the config, and with ``tie_word_embeddings`` a stored ``lm_head.weight`` that
    equals the embedding, for which both are read. ValueError when it differs: it is not known which one is meant.
    """
    buffers = sorted(name for name in regions if is_derived_buffer(name))
    if buffers:
        logger.warning("%s: ignored %s; their values follow from config.json", directory, shown_names(buffers))
    if not (tie_word_embeddings and HEAD in regions and EMBEDDING in regions):
        return frozenset(buffers)
    _check_tied_head(directory, regions[HEAD], regions[EMBEDDING])
    logger.warning("%s: ignored %s, an equal copy of %s, because the two are tied", directory, HEAD, EMBEDDING)
    return frozenset((*buffers, HEAD))


def is_derived_buffer(name: str) -> bool:
    """Whether a tensor of this name is a stored buffer whose values follow from the config."""
    return _BUFFER.fullmatch(name) is not None


def _check_tied_head(directory: Path, head: FileRegion, embedding: FileRegion) -> None:
    advice = (
        f"set tie_word_embeddings to false in config.json if the stored head is meant, remove {HEAD} from the "
        "checkpoint if the embedding is"
    )
    what = f"{directory}: config.json has tie_word_embeddings, but {HEAD} ({head.file.name})"
    if head.shape != embedding.shape:
        raise ValueError(f"{what} has shape {head.shape} and {EMBEDDING} {embedding.shape}; {advice}")
    reader = FileReader()
    rows, *row_shape = head.shape or (1,)
    step = max(1, _CHUNK_BYTES * rows // max(1, head.num_bytes))
    dtype = head.dtype if head.dtype == embedding.dtype else torch.float64
    try:
        for start in range(0, rows, step):
            part = ((start, min(start + step, rows)), *((0, size) for size in row_shape))
            one, other = (reader.read(HEAD, region, part).to(dtype) for region in (head, embedding))
            if not torch.equal(one, other):
                row = start + int((one != other).view(len(one), -1).any(dim=1).nonzero()[0])
                raise ValueError(f"{what} differs from {EMBEDDING} in row {row}; {advice}")
    finally:
        reader.close()
