"""Encodes a complete request as one int64 array and decodes it, so that another replica can continue it."""

from __future__ import annotations

import numpy as np

from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.extras import SamplingExtras

# One word each, in this order; then the tokens, the tokens that stop it, the starts of policy versions, the extras, the
# routed experts, the log-probs and the top log-probs, of output and prompt, each entry of those as its rank, its
# length, ids and log-probs. Floats are the bits of a float64.
HEADER = (
    "num_words",
    "num_computed_tokens",
    "home_rank",
    "home_key",
    "num_tokens",
    "num_prompt_tokens",
    "num_stop_ids",
    "num_policy_starts",
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
    "priority",
    "num_prompt_logprobs",
    "num_prompt_entries",
    "num_extras_words",
    "routed_layers",
    "routed_choices",
    "routed_bytes",
)
STATUSES = tuple(RequestStatus)
FINISH_REASONS = (None, "stop", "length", "abort")
NO_STOP_REASON = NO_PROMPT_LOGPROBS = -1
FIRST_STOP_STRING = -2  # and down


def encode(request: Request, num_computed_tokens: int = 0) -> np.ndarray:
    """int64 [num_words]; the request has a home and holds no KV blocks, their content for `num_computed_tokens` goes
    another way.
    """
    assert request.home is not None and not request.block_ids, request.request_id
    stop_ids = sorted(request.stop_ids)
    top = [_encode_top(*entry) for entry in [*request.output_top, *request.prompt_top]]
    extras = _encode_extras(request)
    routed = request.routed_experts
    header = {
        "num_computed_tokens": num_computed_tokens,
        "home_rank": request.home[0],
        "home_key": request.home[1],
        "num_tokens": len(request.token_ids),
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_stop_ids": len(stop_ids),
        "num_policy_starts": len(request.policy_starts),
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
        "stop_reason": _encode_stop_reason(request),
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
        "priority": request.priority,
        "num_prompt_logprobs": (
            NO_PROMPT_LOGPROBS if request.num_prompt_logprobs is None else request.num_prompt_logprobs
        ),
        "num_prompt_entries": len(request.prompt_top),
        "num_extras_words": len(extras),
        "routed_layers": 0 if routed is None else routed.shape[1],
        "routed_choices": 0 if routed is None else routed.shape[2],
        "routed_bytes": 0 if routed is None else routed.nbytes,
    }
    policy_starts = [word for entry in request.policy_starts for word in entry]
    logprobs = [_bits(request.output_logprobs), _bits(request.prompt_logprobs)]
    choices = _filled(b"" if routed is None else routed.tobytes())
    body = [_words(request.token_ids), _words(stop_ids), _words(policy_starts), extras, choices, *logprobs, *top]
    num_words = len(HEADER) + sum(map(len, body))
    return np.concatenate([_words([{"num_words": num_words, **header}[name] for name in HEADER]), *body])


def decode(words: np.ndarray) -> list[Request]:
    """The requests of arrays that `encode` made, laid one after the other; without KV blocks."""
    return [_decode_one(part) for part in split(words)]


def split(words: np.ndarray) -> list[np.ndarray]:
    """Split concatenated arrays of `encode` into single ones."""
    parts = []
    start = 0
    while start < len(words):
        end = start + int(words[start])
        parts.append(words[start:end])
        start = end
    return parts


def home(words: np.ndarray) -> tuple[int, int]:
    """Return the home of an encoded request."""
    return int(words[HEADER.index("home_rank")]), int(words[HEADER.index("home_key")])


def _decode_one(words: np.ndarray) -> Request:
    header = dict(zip(HEADER, words.tolist(), strict=False))
    rest = words[len(HEADER) :]
    tokens, rest = np.split(rest, [header["num_tokens"]])
    stop_ids, rest = np.split(rest, [header["num_stop_ids"]])
    policy_starts, rest = np.split(rest, [2 * header["num_policy_starts"]])
    extras, rest = np.split(rest, [header["num_extras_words"]])
    choices, rest = np.split(rest, [-(-header["routed_bytes"] // 8)])
    logprobs, rest = np.split(rest, [header["num_outputs"]])
    prompt_logprobs, rest = np.split(rest, [header["num_prompt_entries"]])
    top = _decode_top(rest, header["num_top_entries"] + header["num_prompt_entries"])
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
        num_prompt_logprobs=None if header["num_prompt_logprobs"] < 0 else header["num_prompt_logprobs"],
        extras=SamplingExtras.from_json(extras.tobytes()) if len(extras) else None,
        priority=header["priority"],
    )
    request.home = (header["home_rank"], header["home_key"])
    request.token_ids += token_ids[num_prompt:]
    request.num_computed_tokens = header["num_computed_tokens"]
    request.policy_starts = [(begin, version) for begin, version in policy_starts.reshape(-1, 2).tolist()]
    request.output_logprobs = _floats(logprobs)
    request.prompt_logprobs = _floats(prompt_logprobs)
    request.output_top, request.prompt_top = top[: header["num_top_entries"]], top[header["num_top_entries"] :]
    request.status = STATUSES[header["status"]]
    request.finish_reason = FINISH_REASONS[header["finish_reason"]]
    request.stop_reason = _decode_stop_reason(header["stop_reason"], request)
    request.num_cached_tokens = header["num_cached_tokens"]
    request.num_preemptions = header["num_preemptions"]
    request.routed_experts = _decode_choices(choices, header)
    return request


def _decode_choices(words: np.ndarray, header: dict[str, int]) -> np.ndarray | None:
    """Decode the experts of all tokens but the last; the number of bytes gives the dtype."""
    shape = (header["num_tokens"] - 1, header["routed_layers"], header["routed_choices"])
    count = shape[0] * shape[1] * shape[2]
    if count == 0:
        return None
    dtype = np.uint8 if header["routed_bytes"] == count else np.int16
    return np.frombuffer(words.tobytes(), dtype, count).reshape(shape).copy()


def _encode_extras(request: Request) -> np.ndarray:
    """Their JSON, filled up with spaces to whole words."""
    text = b"" if request.extras is None else request.extras.to_json()
    return _filled(text)


def _filled(text: bytes) -> np.ndarray:
    return np.frombuffer(text.ljust(-(-len(text) // 8) * 8), dtype=np.int64)


def _encode_stop_reason(request: Request) -> int:
    reason = request.stop_reason
    if reason is None:
        return NO_STOP_REASON
    if isinstance(reason, int):
        return reason
    assert request.extras is not None, request.request_id
    return FIRST_STOP_STRING - request.extras.stop.index(reason)


def _decode_stop_reason(word: int, request: Request) -> int | str | None:
    if word >= 0:
        return word
    if word == NO_STOP_REASON:
        return None
    assert request.extras is not None, request.request_id
    return request.extras.stop[FIRST_STOP_STRING - word]


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
