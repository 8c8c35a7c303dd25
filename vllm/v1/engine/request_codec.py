"""A request as one int64 array and back, complete, so that another replica can go on with it."""

from __future__ import annotations

import numpy as np

from vllm.v1.request import Request, RequestStatus

# One word each, in this order; then the tokens, the tokens that stop it, the log-probs, and the top log-probs, each
# entry of those as its rank, its length, ids and log-probs. Floats are the bits of a float64.
HEADER = (
    "num_words",
    "num_computed_tokens",
    "home_rank",
    "home_key",
    "num_tokens",
    "num_prompt_tokens",
    "num_stop_ids",
    "num_outputs",
    "num_top_entries",
    "max_tokens",
    "min_tokens",
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "num_top_logprobs",
    "status",
    "finish_reason",
    "stop_reason",
    "num_cached_tokens",
    "num_preemptions",
)
STATUSES = tuple(RequestStatus)
FINISH_REASONS = (None, "stop", "length")
NO_STOP_REASON = -1


def encode(request: Request, num_computed_tokens: int = 0) -> np.ndarray:
    """int64 [num_words]; the request has a home and holds no KV blocks, their content for `num_computed_tokens` goes
    another way.
    """
    assert request.home is not None and not request.block_ids, request.request_id
    stop_ids = sorted(request.stop_ids)
    top = [_encode_top(*entry) for entry in request.output_top]
    header = {
        "num_computed_tokens": num_computed_tokens,
        "home_rank": request.home[0],
        "home_key": request.home[1],
        "num_tokens": len(request.token_ids),
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_stop_ids": len(stop_ids),
        "num_outputs": len(request.output_logprobs),
        "num_top_entries": len(request.output_top),
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "seed": int(np.uint64(request.seed).astype(np.int64)),
        "temperature": int(_bits([request.temperature])[0]),
        "top_k": request.top_k,
        "top_p": int(_bits([request.top_p])[0]),
        "num_top_logprobs": request.num_top_logprobs,
        "status": STATUSES.index(request.status),
        "finish_reason": FINISH_REASONS.index(request.finish_reason),
        "stop_reason": NO_STOP_REASON if request.stop_reason is None else request.stop_reason,
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
    }
    body = [_words(request.token_ids), _words(stop_ids), _bits(request.output_logprobs), *top]
    num_words = len(HEADER) + sum(map(len, body))
    return np.concatenate([_words([{"num_words": num_words, **header}[name] for name in HEADER]), *body])


def decode(words: np.ndarray) -> list[Request]:
    """The requests of arrays that `encode` made, laid one after the other; without KV blocks."""
    requests = []
    start = 0
    while start < len(words):
        end = start + int(words[start])
        requests.append(_decode_one(words[start:end]))
        start = end
    return requests


def _decode_one(words: np.ndarray) -> Request:
    header = dict(zip(HEADER, words.tolist(), strict=False))
    rest = words[len(HEADER) :]
    tokens, rest = np.split(rest, [header["num_tokens"]])
    stop_ids, rest = np.split(rest, [header["num_stop_ids"]])
    logprobs, rest = np.split(rest, [header["num_outputs"]])
    token_ids, num_prompt = tokens.tolist(), header["num_prompt_tokens"]
    request = Request(
        f"guest_{header['home_rank']}_{header['home_key']}",
        token_ids[:num_prompt],
        max_tokens=header["max_tokens"],
        min_tokens=header["min_tokens"],
        seed=int(np.int64(header["seed"]).astype(np.uint64)),
        temperature=_float(header["temperature"]),
        top_k=header["top_k"],
        top_p=_float(header["top_p"]),
        stop_ids=frozenset(stop_ids.tolist()),
        num_top_logprobs=header["num_top_logprobs"],
    )
    request.home = (header["home_rank"], header["home_key"])
    request.token_ids += token_ids[num_prompt:]
    request.num_computed_tokens = header["num_computed_tokens"]
    request.output_logprobs = _floats(logprobs)
    request.output_top = _decode_top(rest, header["num_top_entries"])
    request.status = STATUSES[header["status"]]
    request.finish_reason = FINISH_REASONS[header["finish_reason"]]
    request.stop_reason = None if header["stop_reason"] == NO_STOP_REASON else header["stop_reason"]
    request.num_cached_tokens = header["num_cached_tokens"]
    request.num_preemptions = header["num_preemptions"]
    return request


def _encode_top(rank: int, ids: list[int], logprobs: list[float]) -> np.ndarray:
    return np.concatenate([_words([rank, len(ids), *ids]), _bits(logprobs)])


def _decode_top(words: np.ndarray, count: int) -> list[tuple[int, list[int], list[float]]]:
    entries = []
    start = 0
    for _ in range(count):
        rank, length = words[start : start + 2].tolist()
        middle, end = start + 2 + length, start + 2 + 2 * length
        entries.append((rank, words[start + 2 : middle].tolist(), _floats(words[middle:end])))
        start = end
    return entries


def _words(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _bits(values: list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float64).view(np.int64)


def _floats(words: np.ndarray) -> list[float]:
    values: list[float] = np.ascontiguousarray(words).view(np.float64).tolist()
    return values


def _float(word: int) -> float:
    return _floats(np.array([word]))[0]
