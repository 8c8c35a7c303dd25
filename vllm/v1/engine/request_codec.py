"""Requests as bytes, in which a checkpoint keeps those that have not finished."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.extras import SamplingExtras

_CLASSES = {one.__name__: one for one in (Request, RequestStatus, SamplingExtras, IncrementalDetokenizer)}


class _RequestUnpickler(pickle.Unpickler):
    """Makes requests and nothing else, whatever bytes a file holds."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        found = _CLASSES.get(global_name)
        if found is None or found.__module__ != module_name:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no part of an unfinished request")
        return found


def encode(requests: Sequence[Request]) -> np.ndarray:
    """uint8 [bytes] of requests that have not finished; without their KV blocks."""
    return np.frombuffer(pickle.dumps(list(requests)), dtype=np.uint8)


def decode(content: np.ndarray) -> list[Request]:
    requests: list[Request] = _RequestUnpickler(io.BytesIO(content.tobytes())).load()
    return requests
