"""The samples of a rollout engine between two turns: finished turns go to their environments, answers come back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl.workers.rollout.environment_host import EnvironmentHost
from verl.workers.rollout.trajectory import Trajectory
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.engine.rebalancer import exchange_objects
from vllm.v1.request import Request


class TurnSource:
    """The next turns of a replica's samples, for ``LLMEngine.run``. All ranks of the replica call it alike; the first
    one has the environments and tells the others what came.

    Args:
        host: of the first rank.
        channel: tells the samples of this source from those of others with the same host.
        tp: the ranks of the replica, which exchange on ``device``.
        request_of: the next turn of a sample as a request, by its ``meta_info``.
        prompt_length: tokens of the longest prompt.
        in_order: wait for all answers of a step before the next, so that a run can be repeated to the last bit.
    """

    def __init__(
        self,
        host: EnvironmentHost | None,
        channel: str,
        tp: GroupCoordinator,
        device: torch.device,
        request_of: Callable[[Trajectory, dict[str, Any]], Request],
        prompt_length: int,
        *,
        in_order: bool = False,
    ) -> None:
        self._host, self._channel, self._tp, self._device = host, channel, tp, device
        self._request_of, self._prompt_length, self._in_order = request_of, prompt_length, in_order
        flags = [host is None or host.is_deterministic]
        if tp.world_size > 1:
            flags = exchange_objects(tp, [flags] * tp.world_size, device)
        self._is_deterministic = all(flags)
        self.meta_info: dict[str, Any] = {}  # of the generation
        self._numbers = itertools.count()
        self._waiting: dict[str, Trajectory] = {}  # by their names with the host, which come once
        self._running: dict[str, tuple[str, Trajectory]] = {}  # by request
        self._early: dict[str, dict[str, Any]] = {}  # the end of a sample whose turn still runs
        self._ended: list[Trajectory] = []

    def begin(self, sample: Trajectory) -> Request | None:
        """A new sample, whose prompt is what its environment begins with; or one of another source, whose environment
        is rebuilt from its turns: begins the sample once more where it cannot be. Returns the turn that is under way.
        """
        if not self._is_deterministic:
            sample = sample.anew()
        name = f"{self._channel}/{next(self._numbers)}"
        if sample.request is None:
            self._waiting[name] = sample
        else:
            self._running[sample.request.request_id] = name, sample
        if self._host is not None:
            self._host.begin(name, sample.row, sample.environment_seed, sample.turns, sample.request is None)
        return sample.request

    def take_ended(self) -> list[Trajectory]:
        ended, self._ended = self._ended, []
        return ended

    def abandon(self) -> None:
        """Drop the samples that are under way."""
        for name in [*self._waiting, *(name for name, _ in self._running.values())]:
            self._tell(name, None)
        self._waiting, self._running, self._early = {}, {}, {}

    @property
    def unfinished(self) -> list[Trajectory]:
        """Samples as they were before the turn that the model writes."""
        return [*(sample for _, sample in self._running.values()), *self._waiting.values()]

    def state(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """``Trajectory.state`` of the unfinished samples; ``requests`` are their turns, withdrawn from the engine."""
        turns = {request.request_id: request for request in requests}
        running = [sample.state(turns[request_id]) for request_id, (_, sample) in self._running.items()]
        return running + [sample.state(None) for sample in self._waiting.values()]

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def take(self, finished: Sequence[Request]) -> list[Request]:
        for request in finished:
            self._take_turn(*self._running.pop(request.request_id), request)
        requests = []
        for reply in self._replies():
            name = str(reply["sample"])
            sample = self._waiting.pop(name, None)
            if sample is None:
                if any(name == other for other, _ in self._running.values()):
                    self._early[name] = reply
                continue  # or it was abandoned
            if self._goes_on(name, sample, reply):
                requests.append(self._request_of(sample, self.meta_info))
                self._running[requests[-1].request_id] = name, sample
        return requests

    def wait(self, seconds: float) -> None:
        if self._host is not None:
            self._host.wait(seconds)

    def _take_turn(self, name: str, sample: Trajectory, request: Request) -> None:
        sample.take(request)
        sample.request = None
        if name in self._early:
            self._goes_on(name, sample, self._early.pop(name))
        elif request.finish_reason == "stop":
            self._waiting[name] = sample
            self._tell(name, request.output_token_ids)
        else:
            self._end(name, sample, str(request.finish_reason))

    def _goes_on(self, name: str, sample: Trajectory, reply: dict[str, Any]) -> bool:
        """Take what the environment answered; whether the model is to write another turn."""
        sample.add_info(reply.get("info", {}), reply["seconds"])
        sample.reward(reply.get("reward", 0.0))
        if reply["ended"] is not None:
            sample.problem, sample.finish_reason = reply.get("error", ""), reply["ended"]
            self._ended.append(sample)
        elif not sample.spans and len(reply["token_ids"]) > self._prompt_length:
            sample.problem = f"its prompt has {len(reply['token_ids'])} tokens, over data.max_prompt_length"
            self._end(name, sample, "prompt_too_long")
        elif not sample.spans:
            sample.token_ids = reply["token_ids"]
            return True
        elif len(reply["token_ids"]) >= sample.num_left:
            self._end(name, sample, "length")
        else:
            sample.give(reply["token_ids"], reply.get("num_kept"))
            return True
        return False

    def _end(self, name: str, sample: Trajectory, reason: str) -> None:
        sample.finish_reason = reason
        self._ended.append(sample)
        self._tell(name, None)

    def _tell(self, name: str, token_ids: list[int] | None) -> None:
        if self._host is not None:
            self._host.act(name, token_ids)

    def _replies(self) -> list[dict[str, Any]]:
        """What has come, the same on all ranks of the replica."""
        replies: list[dict[str, Any]] = []
        if self._host is not None:
            replies = self._host.replies(self._channel)
            while self._in_order and len(replies) < len(self._waiting):
                self._host.wait(1.0)
                replies += self._host.replies(self._channel)
            replies.sort(key=lambda reply: int(reply["sample"].rpartition("/")[2]))
        if self._tp.world_size == 1:
            return replies
        return exchange_objects(self._tp, [replies] * self._tp.world_size, self._device)  # the others send none
