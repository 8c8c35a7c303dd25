"""One sample of a prompt as the row that training sees: what the model wrote, and what it was given in between."""

from __future__ import annotations

import copy
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
        token_ids: the prompt and all that follows; is_sampled: which of the latter the model wrote; output_logprobs:
            theirs, 0 of the others.
        versions: of the weights, of each sampled token.
        choices: experts [tokens, MoE layers, K] each, one behind another from the prompt's first token on.
        spans: (begin, end) after the prompt of each turn of the model.
        rewards: (index after the prompt of a turn's last token, its reward from the environment).
        info: numbers that the environment told, summed up; seconds: that it took.
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
    rewards: list[tuple[int, float]] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    finish_reason: str | None = None
    problem: str = ""
    request: Request | None = None

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
    def num_left(self) -> int:
        return self.limit - self.num_output_tokens

    @property
    def turns(self) -> list[list[int]]:
        """What the model wrote, turn by turn."""
        output = self.output_token_ids
        return [output[begin:end] for begin, end in self.spans]

    def take(self, request: Request) -> None:
        """The model's next turn."""
        sampled = request.output_token_ids
        self.spans.append((self.num_output_tokens, self.num_output_tokens + len(sampled)))
        self.token_ids += sampled
        self.is_sampled += [True] * len(sampled)
        self.output_logprobs += request.output_logprobs
        self.versions += request.policy_versions()
        if request.routed_experts is not None:
            self.choices.append(request.routed_experts[sum(map(len, self.choices)) :])

    def give(self, token_ids: list[int]) -> None:
        """What the model is given before its next turn."""
        self.token_ids += token_ids
        self.is_sampled += [False] * len(token_ids)
        self.output_logprobs += [0.0] * len(token_ids)

    def reward(self, value: float) -> None:
        """A reward for the last turn."""
        if value and self.spans:
            self.rewards.append((self.spans[-1][1] - 1, value))

    def add_info(self, numbers: dict[str, float], seconds: float) -> None:
        self.seconds += seconds
        for name, value in numbers.items():
            self.info[name] = self.info.get(name, 0.0) + value

    def state(self, request: Request | None) -> dict[str, Any]:
        """All of it as plain values, with the turn that was withdrawn, for another process or a checkpoint."""
        found = {item.name: copy.deepcopy(getattr(self, item.name)) for item in fields(self)}
        packed = [(str(part.dtype), part.shape, part.tobytes()) for part in self.choices]
        return found | {"choices": packed, "request": copy.deepcopy(request)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Trajectory:
        parts = [np.frombuffer(raw, dtype=kind).reshape(shape) for kind, shape, raw in state["choices"]]
        return cls(**state | {"choices": parts})

    def record(self) -> dict[str, Any]:
        """What the controller learns of the turns, as JSON."""
        found: dict[str, Any] = {"num_turns": len(self.spans), "environment_s": self.seconds, "info": self.info}
        found |= {"rewards": [list(reward) for reward in self.rewards]}
        return found | ({"problem": self.problem} if self.problem else {})
