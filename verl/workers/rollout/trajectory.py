"""One sample of a prompt as the row that training sees: what the model wrote, and what it was given in between."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class Trajectory:
    """Token ids exactly as the engine was given and sampled them; text is never tokenised a second time.

    It is read as a finished ``Request`` is, whose output is here all that follows the prompt.

    Attributes:
        request_id: of the sample; the engine's requests, a turn each, are named after it.
        limit: the most tokens after the prompt.
        row, environment_seed: what its environment begins with.
        token_ids: the prompt and all that follows, of all its rows; is_sampled: which of the latter the model wrote;
            output_logprobs: theirs, 0 of the others.
        versions: of the weights, of each sampled token.
        choices: experts [tokens, MoE layers, K] each, one behind another from the prompt's first token on.
        spans: (begin, end) after the prompt of each turn of the model.
        row_starts: (index after the prompt where a new row begins, tokens of the row before it that it begins with).
        rewards: (index after the prompt of a turn's last token, its reward from the environment).
        draft_counts: those of its turns, summed up.
        info: numbers that the environment told, summed up.
        seconds: in the engine (``decode``), of the environment's calls, and of waiting for one to begin; since_s: when
            the last of these began.
        request: the turn that the model writes; None while the environment is waited for.
    """

    request_id: str
    seed: int
    limit: int
    token_ids: list[int]
    priority: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    environment_seed: int = 0
    is_sampled: list[bool] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    choices: list[np.ndarray] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    row_starts: list[tuple[int, int]] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    draft_counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    info: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("decode", "environment", "waiting"), 0.0))
    since_s: float = field(default_factory=time.monotonic)
    finish_reason: str | None = None
    problem: str = ""
    request: Request | None = None

    def anew(self) -> Trajectory:
        """The same sample before its first turn."""
        prompt = self.token_ids[: self.num_prompt_tokens]
        row = (self.priority, self.row, self.environment_seed)
        return Trajectory(self.request_id, self.seed, self.limit, prompt, *row)

    @property
    def num_output_tokens(self) -> int:
        return len(self.is_sampled)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - len(self.is_sampled)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def routed_experts(self) -> np.ndarray | None:
        return np.concatenate(self.choices) if self.choices else None

    def policy_versions(self) -> list[int]:
        return self.versions

    @property
    def context(self) -> list[int]:
        """The tokens of the last row, which the model goes on from."""
        if not self.row_starts:
            return self.token_ids
        row, begin, prompt = list[int](), 0, self.num_prompt_tokens
        for start, num_kept in [*self.row_starts, (self.num_output_tokens, 0)]:
            row += self.token_ids[begin : prompt + start]
            begin = prompt + start
            last, row = row, row[:num_kept]
        return last

    @property
    def num_left(self) -> int:
        return self.limit - self.num_output_tokens

    @property
    def turns(self) -> list[list[int]]:
        """What the model wrote, turn by turn."""
        output = self.output_token_ids
        return [output[begin:end] for begin, end in self.spans]

    def take(self, request: Request) -> None:
        """The model's next turn."""
        self.seconds["decode"] += self._lap()
        sampled = request.output_token_ids
        self.spans.append((self.num_output_tokens, self.num_output_tokens + len(sampled)))
        self.token_ids += sampled
        self.is_sampled += [True] * len(sampled)
        self.output_logprobs += request.output_logprobs
        self.versions += request.policy_versions()
        self.draft_counts = [sum(pair) for pair in zip(self.draft_counts, request.draft_counts, strict=True)]
        if request.routed_experts is not None:
            begin, num_kept, num_known = 0, 0, sum(map(len, self.choices))
            if self.row_starts:
                start, num_kept = self.row_starts[-1]
                begin = self.num_prompt_tokens + start  # of the row's own tokens, behind those that it keeps
            if num_known < begin:  # the last token of the row before was no input
                self.choices.append(np.zeros_like(request.routed_experts[: begin - num_known]))
            self.choices.append(request.routed_experts[max(num_known, begin) - begin + num_kept :])

    def give(self, token_ids: list[int], num_kept: int | None = None) -> None:
        """What the model is given before its next turn: behind the first ``num_kept`` of a new row, or all of this."""
        if num_kept is not None:
            self.row_starts.append((self.num_output_tokens, num_kept))
        self.token_ids += token_ids
        self.is_sampled += [False] * len(token_ids)
        self.output_logprobs += [0.0] * len(token_ids)

    def reward(self, value: float) -> None:
        """A reward for the last turn."""
        if value and self.spans:
            self.rewards.append((self.spans[-1][1] - 1, value))

    def add_info(self, numbers: dict[str, float], seconds: float) -> None:
        """What the environment told, in a call of so many seconds."""
        self.seconds["environment"] += seconds
        self.seconds["waiting"] += max(self._lap() - seconds, 0.0)
        for name, value in numbers.items():
            self.info[name] = self.info.get(name, 0.0) + value

    def _lap(self) -> float:
        """Seconds since the last call."""
        before, self.since_s = self.since_s, time.monotonic()
        return self.since_s - before

    def state(self, request: Request | None) -> dict[str, Any]:
        """All of it as plain values, with the turn that was withdrawn, for another process or a checkpoint."""
        found = {item.name: copy.deepcopy(getattr(self, item.name)) for item in fields(self)}
        packed = [(str(part.dtype), part.shape, part.tobytes()) for part in self.choices]
        return found | {"choices": packed, "request": copy.deepcopy(request)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Trajectory:
        parts = [np.frombuffer(raw, dtype=kind).reshape(shape) for kind, shape, raw in state["choices"]]
        return cls(**state | {"choices": parts, "since_s": time.monotonic()})

    def record(self) -> dict[str, Any]:
        """What the controller learns of the turns, as JSON."""
        found: dict[str, Any] = {"num_turns": len(self.spans), "spans": [list(span) for span in self.spans]}
        found |= {"seconds": self.seconds, "info": self.info}
        found |= {"row_starts": [list(start) for start in self.row_starts]} if self.row_starts else {}
        found |= {"rewards": [list(reward) for reward in self.rewards]}
        return found | ({"problem": self.problem} if self.problem else {})
