"""Requests as bytes, in which a checkpoint keeps those that have not finished."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_formats.listed_pickle import load_listed
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.extras import SamplingExtras

_NAMES = {
    (one.__module__, one.__name__): one for one in (Request, RequestStatus, SamplingExtras, IncrementalDetokenizer)
}


def encode(requests: Sequence[Request | dict[str, Any]]) -> np.ndarray:
    """uint8 [bytes] of requests that have not finished, without their KV blocks; each may be part of plain values."""
    return np.frombuffer(pickle.dumps(list(requests)), dtype=np.uint8)


def decode(content: np.ndarray) -> list[Request | dict[str, Any]]:
    """The inverse of ``encode``; it makes requests and plain values: UnpicklingError when the bytes hold more."""
    requests: list[Request | dict[str, Any]] = load_listed(
        io.BytesIO(content.tobytes()), _NAMES, "an unfinished request"
    )
    if not isinstance(requests, list) or not all(isinstance(request, (Request, dict)) for request in requests):
        raise pickle.UnpicklingError("what should be unfinished requests is no list of requests")
    return requests
