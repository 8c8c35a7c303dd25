"""The engine's side of the process that holds conversations and environments (``agent_loop.host``)."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl.experimental.agent_loop.environment import EnvironmentSpec
from verl.experimental.agent_loop.host import HostSettings
from verl.trainer.config import PPOTrainerConfig
from verl.utils.child_process import child_environment
from verl.utils.import_utils import MODULE_PREFIX, absolute_file
from verl.workers.config.multi_turn import SINGLE_TURN, TOOLS

_START_LIMIT_S = 300.0
_KILL_S = 30.0
_TOOLS = "verl.experimental.agent_loop.tool_environment"
_LOOPS = "verl.experimental.agent_loop.agent_loop"


def host_settings(config: PPOTrainerConfig) -> HostSettings | None:
    """What the rollout's hosts need; None where a sample is a single turn.

    ValueError: the file of ``tool_config_path`` or ``agent_loop_config_path`` cannot be used.
    """
    rollout = config.actor_rollout_ref.rollout
    turns = rollout.multi_turn
    if not turns.enable:
        return None
    environment = turns.environment
    kwargs: dict[str, Any]
    if rollout.agent.has_loops:
        whole = asdict(config)
        whole["data"] |= {"train_files": [], "val_files": []}  # a process takes 128 KiB of arguments
        kwargs = {"loops": loop_entries(rollout.agent.agent_loop_config_path), "config": whole}
        spec = EnvironmentSpec(f"{MODULE_PREFIX}{_LOOPS}", "AgentLoopEnvironment", kwargs)
    elif environment.path is not None:
        spec = EnvironmentSpec(absolute_file(environment.path), environment.name, dict(environment.kwargs))
    else:
        limits = (turns.max_parallel_calls, turns.max_tool_response_length, turns.tool_response_truncate_side)
        names = ("max_parallel_calls", "max_response_length", "truncate_side")
        kwargs = {"tools": tool_entries(str(turns.tool_config_path)), **dict(zip(names, limits, strict=True))}
        spec = EnvironmentSpec(f"{MODULE_PREFIX}{_TOOLS}", "ToolEnvironment", kwargs)
    return HostSettings(
        model_path=config.actor_rollout_ref.model.path,
        environment=spec,
        template_kwargs=dict(config.data.apply_chat_template_kwargs or {}),
        format=turns.format,
        num_processes=environment.num_processes,
        timeout_s=environment.timeout_s,
        max_turns=turns.max_assistant_turns,
        max_user_turns=turns.max_user_turns,
        max_calls=turns.max_tool_calls,
        max_seconds=turns.max_seconds,
        splits=turns.splits,
    )


def agent_names(config: PPOTrainerConfig) -> list[str]:
    """The agent loops that a row of the data may ask for."""
    rollout = config.actor_rollout_ref.rollout
    if not rollout.agent.has_loops:
        return [SINGLE_TURN, TOOLS] if rollout.multi_turn.enable else [SINGLE_TURN]
    from verl.experimental.agent_loop.agent_loop import AGENT_LOOPS

    return sorted(
        {*AGENT_LOOPS.names, *(entry["name"] for entry in loop_entries(rollout.agent.agent_loop_config_path))}
    )


def tool_entries(path: str) -> list[dict[str, Any]]:
    """The entries of a file of tools; ValueError says what is wrong with it."""
    where = f"actor_rollout_ref.rollout.multi_turn.tool_config_path: {path}"
    given = _yaml(path, where)
    return _entries(given.get("tools") if isinstance(given, dict) else None, where, "tools", "class_name")


def loop_entries(path: str | None) -> list[dict[str, Any]]:
    """The entries of a file of agent loops, none without one; ValueError says what is wrong with it."""
    if path is None:
        return []
    where = f"actor_rollout_ref.rollout.agent.agent_loop_config_path: {path}"
    return _entries(_yaml(path, where), where, "of agent loops", "name", "_target_")


def _yaml(path: str, where: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{where} cannot be read: {error}") from error


def _entries(given: Any, where: str, what: str, *names: str) -> list[dict[str, Any]]:
    """A list of sections that have ``names``, with the ``path`` of a file for a process that works elsewhere."""
    if not isinstance(given, list) or not given:
        raise ValueError(f"{where} has no list {what}")
    for entry in given:
        lacking = [name for name in names if not isinstance(entry, dict) or not isinstance(entry.get(name), str)]
        if lacking:
            raise ValueError(f"{where}: the entry {entry!r:.100} has no {' and no '.join(lacking)}")
    return [entry | ({"path": absolute_file(entry["path"])} if entry.get("path") else {}) for entry in given]


class EnvironmentHost:
    """Requests go in at once, and replies are collected by a thread, so that the engine waits for neither.

    Attributes:
        is_deterministic: environments can be rebuilt by replaying their actions.

    Raises:
        RuntimeError: the tokenizer or the environment cannot be loaded.
    """

    def __init__(self, settings: HostSettings) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl.experimental.agent_loop.host", json.dumps(asdict(settings)), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=child_environment(),
            start_new_session=True,
        )
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._come: dict[str, list[dict[str, Any]]] = {}  # by channel
        self._has_come = threading.Event()
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._read, self._write)]
        for thread in self._threads:
            thread.start()
        try:
            first = self._replies.get(timeout=_START_LIMIT_S)
        except queue.Empty:
            first = {"problem": f"it was not ready within {_START_LIMIT_S:g} s"}
        if "ready" not in first:
            problem = first.get("problem") or self._tail()
            self.close()
            raise RuntimeError(f"the environments of multi_turn cannot be run: {problem}")
        self.is_deterministic = bool(first["is_deterministic"])

    def begin(self, sample: str, row: dict[str, Any], seed: int, turns: list[list[int]], is_answered: bool) -> None:
        """A sample begins, or is rebuilt from its turns; ``is_answered``: the answer to the last of these is wanted."""
        self._send({"sample": sample, "row": row, "seed": seed, "turns": turns, "is_answered": is_answered})

    def act(self, sample: str, token_ids: list[int] | None) -> None:
        """The model's turn; None: the sample has ended here."""
        self._send({"sample": sample, "token_ids": token_ids})

    def replies(self, channel: str) -> list[dict[str, Any]]:
        """All that have come to samples of a channel; RuntimeError when the process has ended."""
        self._has_come.clear()
        while not self._replies.empty():
            reply = self._replies.get_nowait()
            if "problem" in reply:
                raise RuntimeError(f"the process of the environments has ended: {self._tail()}")
            self._come.setdefault(str(reply["sample"]).partition("/")[0], []).append(reply)
        return self._come.pop(channel, [])

    def wait(self, seconds: float) -> None:
        """Until a reply has come, at most so long."""
        self._has_come.wait(seconds)

    def close(self) -> None:
        self._sent.put(None)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_KILL_S)
        for thread in self._threads:
            thread.join(_KILL_S)
        self._stderr.close()

    def _send(self, request: dict[str, Any]) -> None:
        self._sent.put(request)  # its thread makes JSON of it while the engine computes

    def _write(self) -> None:
        assert self._process.stdin is not None
        while (request := self._sent.get()) is not None:
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:  # `_read` reports its end
                return

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(json.loads(line))
            self._has_come.set()
        self._replies.put({"problem": ""})
        self._has_come.set()

    def _tail(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")[-2000:]
