"""The process beside a rollout engine that holds conversations: token ids in, token ids out, as JSON lines.

It runs no code of a user's; environments are in processes of their own (``environment_pool``).
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from hf_formats.parent_death import end_with_parent
from verl.experimental.agent_loop.conversation import Conversation, Given, num_alike
from verl.experimental.agent_loop.environment import EnvironmentSpec, Message, Outcome
from verl.experimental.agent_loop.environment_pool import EnvironmentFailed, EnvironmentPool, PooledEnvironment
from verl.experimental.agent_loop.environment_worker import LINE_BYTES
from verl.utils.child_process import claim_stdout, send
from vllm.tool_parsers import TOOL_PARSERS, ToolParser


@dataclass(frozen=True)
class HostSettings:
    """What a host needs of a run's config.

    Attributes:
        model_path: of the tokenizer.
        template_kwargs: ``data.apply_chat_template_kwargs``.
        end_ids: tokens that end a turn beside the tokenizer's own.
        format: of tool calls; None: messages have no ``tool_calls``.
        num_processes, timeout_s: of the environments (``EnvironmentPool``).
        max_turns: of the model; after the last one nothing more is given.
        max_calls, max_seconds: tool calls, and seconds from the beginning, after which a sample ends.
        splits: a sample goes on where the template changes its earlier tokens; else it ends there.
    """

    model_path: str
    environment: EnvironmentSpec
    end_ids: list[int] = field(default_factory=list)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    format: str | None = None
    num_processes: int = 4
    timeout_s: float = 60.0
    max_turns: int | None = None
    max_user_turns: int | None = None
    max_calls: int | None = None
    max_seconds: float | None = None
    splits: bool = True


def main() -> None:
    """Arguments: the settings as JSON; the parent's pid."""
    end_with_parent(int(sys.argv[2]), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given = json.loads(sys.argv[1])
    settings = HostSettings(**{**given, "environment": EnvironmentSpec(**given["environment"])})
    asyncio.run(_Host(settings, claim_stdout()).serve())


class _Host:
    def __init__(self, settings: HostSettings, replies: TextIO) -> None:
        from verl.utils.tokenizer import hf_tokenizer

        self.settings, self._replies = settings, replies
        self._tokenizer = hf_tokenizer(settings.model_path)
        self._parser: ToolParser | None = None
        if settings.format is not None:
            self._parser = TOOL_PARSERS[settings.format](self._tokenizer)
        self._pool = EnvironmentPool(settings.environment, settings.num_processes, settings.timeout_s)
        self._samples: dict[str, asyncio.Queue[list[int] | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        reader, loop = asyncio.StreamReader(limit=LINE_BYTES), asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        try:
            await self._pool.start()
        except RuntimeError as error:
            self._send({"problem": str(error)})
            return
        self._send({"ready": True, "is_deterministic": self._pool.is_deterministic})
        while line := await reader.readline():
            request = json.loads(line)
            name = request["sample"]
            if "row" in request:
                self._samples[name] = asyncio.Queue()
                task = loop.create_task(self._sample(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif name in self._samples:
                self._samples[name].put_nowait(request["token_ids"])
        await self._pool.close()

    async def _sample(self, request: Mapping[str, Any]) -> None:
        name = request["sample"]
        turns, environment = self._samples[name], self._pool.environment(request["row"], request["seed"])
        sample = _Sample(self, environment)
        try:
            reply = await sample.begin()
            for token_ids in request["turns"]:
                reply = await sample.act(token_ids)
            if request["is_answered"]:
                self._send({"sample": name, **reply})
            while reply["ended"] is None and (token_ids := await turns.get()) is not None:
                reply = await sample.act(token_ids)
                self._send({"sample": name, **reply})
        except Exception as error:  # a task's edge: whatever happened is this sample's
            is_known = isinstance(error, (EnvironmentFailed, ValueError))
            ended = "environment_timeout" if getattr(error, "is_timeout", False) else "environment_error"
            text = str(error) if is_known else f"{type(error).__name__}: {error}"
            self._send({"sample": name, "ended": ended, "error": text, "seconds": sample.seconds})
        finally:
            del self._samples[name]
            await environment.close()

    def conversation(self, tools: Sequence[Mapping[str, Any]]) -> Conversation:
        end_ids = [self._tokenizer.eos_token_id, *self.settings.end_ids]
        return Conversation(self._tokenizer, tools, self.settings.template_kwargs, end_ids)

    def message(self, token_ids: Sequence[int]) -> Message:
        """The model's turn as its environment gets it."""
        content = self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if self._parser is None:
            return {"role": "assistant", "content": str(content)}
        text, calls = self._parser.extract_tool_calls(token_ids)
        as_message = [call.as_message(f"call_{number}") for number, call in enumerate(calls)]
        return {"role": "assistant", "content": text, **({"tool_calls": as_message} if calls else {})}

    @property
    def takes_token_ids(self) -> bool:
        return self._pool.takes_token_ids

    @property
    def writes_rows(self) -> bool:
        return self._pool.writes_rows

    def _send(self, reply: dict[str, Any]) -> None:
        send(self._replies, reply)


class _Sample:
    """One sample's conversation with its environment."""

    def __init__(self, host: _Host, environment: PooledEnvironment) -> None:
        self._host, self._environment = host, environment
        self._conversation: Conversation | None = None  # none where the environment speaks in token ids
        self._row: list[int] = []  # all that the model has, where it does
        self._num_turns = self._num_calls = 0
        self._start_s = time.monotonic()
        self.seconds = 0.0  # of the last call of its environment

    async def begin(self) -> dict[str, Any]:
        outcome = await self._called(self._environment.reset())
        if isinstance(outcome.observation[0], int):
            token_ids, self._row = outcome.observation, list(outcome.observation)
        else:
            self._conversation = self._host.conversation(outcome.tools)
            token_ids = self._conversation.begin(outcome.observation)
        return {"token_ids": token_ids, "ended": None, "reward": 0.0, "seconds": self.seconds, "info": {}}

    async def act(self, token_ids: list[int]) -> dict[str, Any]:
        settings = self._host.settings
        self._num_turns += 1
        message = self._host.message(token_ids)
        self._num_calls += len(message.get("tool_calls", ()))
        outcome = await self._called(self._environment.step(token_ids if self._host.takes_token_ids else message))
        ended = "stop" if outcome.done else None
        limits = (
            ("max_turns", self._num_turns, settings.max_turns),
            ("max_user_turns", self._num_turns, settings.max_user_turns and settings.max_user_turns + 1),
            ("max_tool_calls", self._num_calls, settings.max_calls),
            ("max_seconds", time.monotonic() - self._start_s, settings.max_seconds),
        )
        ended = ended or next((name for name, used, most in limits if most is not None and used >= most), None)
        reply = {"ended": ended, "reward": outcome.reward, "seconds": self.seconds, "info": outcome.info}
        if ended is not None:
            return reply
        given = self._followed(token_ids, outcome.observation)
        if given.num_kept is not None and not settings.splits:
            return {**reply, "ended": "changed_history"}
        return {**reply, "token_ids": given.token_ids, "num_kept": given.num_kept}

    async def _called(self, call: Awaitable[Outcome]) -> Outcome:
        """Where it fails, its seconds are those until then, with what it waited for a process."""
        start_s = time.monotonic()
        try:
            outcome = await call
        except EnvironmentFailed:
            self.seconds = time.monotonic() - start_s
            raise
        self.seconds = outcome.seconds
        return outcome

    def _followed(self, token_ids: list[int], observation: list[Any]) -> Given:
        if self._conversation is None:
            if not all(isinstance(token, int) for token in observation):
                raise ValueError("reset returned token ids, and step messages; expected the same of both")
            row = self._row + token_ids
            num_kept = num_alike(row, observation) if self._host.writes_rows else len(row)
            self._row = observation if self._host.writes_rows else row + observation
            return Given(self._row[num_kept:], None if num_kept == len(row) else num_kept)
        if observation and isinstance(observation[0], int):
            raise ValueError("reset returned messages, and step token ids; expected the same of both")
        self._conversation.answer(token_ids)
        return self._conversation.follow(observation)


if __name__ == "__main__":
    main()
