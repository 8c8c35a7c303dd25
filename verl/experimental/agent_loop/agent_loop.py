"""Agent loops as verl has them: a coroutine of the user's that asks for turns of the model and returns what came of it.

One is an environment to the engine, in whose process it runs (``AgentLoopEnvironment``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any
from uuid import uuid4

from omegaconf import OmegaConf

from hf_formats.chat import chat_text
from verl.experimental.agent_loop.conversation import num_alike
from verl.experimental.agent_loop.environment import Message
from verl.utils.import_utils import import_external_libs, load_extern_type
from verl.utils.registry import Registry
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.config.multi_turn import SINGLE_TURN

AGENT_LOOPS: Registry[type[AgentLoopBase]] = Registry(
    "actor_rollout_ref.rollout.agent.default_agent_loop, or agent_name of a row", "agent loop"
)
register = AGENT_LOOPS.register
_LENGTHS = ("max_tokens", "max_new_tokens")
_MEDIA = ("image_data", "video_data", "audio_data")


@dataclass(frozen=True)
class TokenOutput:
    """A turn of the model: its token ids; log-probs stay with the engine."""

    token_ids: list[int]
    log_probs: None = None
    routed_experts: None = None
    stop_reason: str = "completed"


@dataclass
class AgentLoopOutput:
    """What ``AgentLoopBase.run`` returns.

    Attributes:
        prompt_ids: what the last context began with; ``response_ids`` followed, and ``response_mask`` is 1 where the
            model wrote them. The engine knows these too, so that they are checked and nothing is taken from them.
        reward_score: added to what the reward function gives.
        metrics, extra_fields: numbers in them are metrics of the run.
        response_logprobs, routed_experts, num_turns: without effect, because the engine has its own.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: Any = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    extra_fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DictConfigWrap:
    """The run's config, as constructors of agent loops get it."""

    config: Any


class AgentLoopBase:
    """Base of agent loops, one object for each sample.

    Attributes:
        config: the run's config without the data's files; ``rollout_config`` is its section of the rollout.
        server_manager: ``await server_manager.generate(request_id, prompt_ids=..., sampling_params=...)`` is a turn of
            the model, one at a time.
    """

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: ModelTurns,
        tokenizer: Any,
        processor: Any = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.loop = asyncio.get_running_loop()

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """A sample; ``kwargs`` are the row: ``raw_prompt`` (its chat), ``extra_info``, ``reward_model``, ..."""
        raise NotImplementedError

    async def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Token ids of ``messages`` for the model to answer, perhaps without what the template begins any chat with."""
        if images or videos:
            raise ValueError("models take text only, and an agent loop gave images or videos to the chat template")
        given = dict(self.config.data.apply_chat_template_kwargs or {})
        text = chat_text(self.tokenizer, messages, **given, **({"tools": list(tools)} if tools else {}))
        if remove_system_prompt:
            chats = ([{"role": "user", "content": ""}] * number for number in (1, 2))
            once, twice = (
                chat_text(self.tokenizer, chat, **given | {"add_generation_prompt": False}) for chat in chats
            )
            text = text.removeprefix(once[: 2 * len(once) - len(twice)])
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]


@register(SINGLE_TURN)
class SingleTurnAgentLoop(AgentLoopBase):
    """One answer to the prompt, for the rows of a data set that ask for no other loop."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        output = await self.server_manager.generate(uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params)
        return AgentLoopOutput(prompt_ids, output.token_ids, [1] * len(output.token_ids))


class ModelTurns:
    """The model as an agent loop sees it (upstream: ``AsyncLLMServerManager``), and the row as the engine has it.

    Args:
        sampling_params: with which the engine draws; a loop cannot change them.
    """

    def __init__(self, sampling_params: Mapping[str, Any]) -> None:
        self._sampling_params = dict(sampling_params)
        self.asked: asyncio.Queue[list[int] | AgentLoopOutput | BaseException] = asyncio.Queue()
        self._answer: asyncio.Future[list[int]] | None = None
        self._row: list[int] = []
        self._is_sampled: list[bool] = []

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **media: Any
    ) -> TokenOutput:
        """The model's turn behind ``prompt_ids``, which is a new row where it does not begin with the one before.

        Raises:
            ValueError: another turn is under way, or it asks for what the engine does not do.
        """
        if self._answer is not None:
            raise ValueError(
                "the agent loop asked for a second turn before it had the first; a sample has one at a time"
            )
        if given := [name for name in _MEDIA if media.get(name)]:
            raise ValueError(f"models take text only, and the agent loop gave {', '.join(given)}")
        known = {**self._sampling_params, "logprobs": sampling_params.get("logprobs")}
        changed = [name for name, value in sampling_params.items() if name not in _LENGTHS and value != known.get(name)]
        if changed:
            raise ValueError(
                f"the agent loop changes {', '.join(changed)}; turns are drawn as actor_rollout_ref.rollout says"
            )
        prompt = [int(token) for token in prompt_ids]
        num_kept = num_alike(self._row, prompt)
        self._row = list(prompt)
        self._is_sampled = self._is_sampled[:num_kept] + [False] * (len(prompt) - num_kept)
        self._answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(prompt)
        token_ids = await self._answer
        self._answer = None
        most = min(
            (int(sampling_params[name]) for name in _LENGTHS if sampling_params.get(name)), default=len(token_ids)
        )
        if len(token_ids) > most:
            raise ValueError(
                f"the agent loop asked for {most} tokens, and the turn has {len(token_ids)}; only the "
                "response's length limits one"
            )
        return TokenOutput(list(token_ids))

    def answer(self, token_ids: Sequence[int]) -> None:
        """The turn that the loop waits for."""
        assert self._answer is not None
        self._row += token_ids
        self._is_sampled += [True] * len(token_ids)
        self._answer.set_result(list(token_ids))

    def check(self, output: AgentLoopOutput) -> None:
        """ValueError where a loop returns other tokens than the model was given and wrote, which are trained on."""
        returned = [*output.prompt_ids, *output.response_ids]
        length = num_alike(returned, self._row)
        if length < min(len(returned), len(self._row)):
            raise ValueError(
                f"the agent loop returned token {returned[length]} at position {length}, where the model's last context"
                f" has {self._row[length]}"
            )
        mask = [bool(value) for value in output.response_mask] + [False] * (len(self._row) - length)
        sampled = self._is_sampled[len(output.prompt_ids) :] + [False] * (len(returned) - length)
        if mask != sampled:
            raise ValueError(
                f"response_mask of the agent loop has {sum(mask)} tokens, and the model wrote {sum(sampled)} behind "
                "prompt_ids; all that it wrote is trained on"
            )


class AgentLoopEnvironment:
    """Runs an agent loop: each prompt that it asks with is what the environment answers the turn before.

    Args:
        loops: entries of ``agent_loop_config_path``: ``name``, ``_target_`` (``module.Class``, or ``Class`` with the
            ``path`` of its file), and further arguments of the constructor.
        config: of the run; ``rollout.agent.default_agent_loop`` is for rows without ``agent_name``, and
            ``model.external_lib`` may register loops.
    """

    takes_token_ids = True
    writes_rows = True

    def __init__(self, loops: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> None:
        self._shared = _shared(json.dumps([loops, config]))
        self._shared.loop(None)
        self._task: asyncio.Task[None] | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[int]:
        loop_class, arguments = self._shared.loop(row.get("agent_name"))
        config = self._shared.config
        rollout = config.actor_rollout_ref.rollout
        drawn = {name: rollout[name] for name in ("temperature", "top_p", "top_k")}
        sampling_params = drawn | {"repetition_penalty": 1.0}
        self._model = ModelTurns(sampling_params)
        tools = {"server_manager": self._model, "tokenizer": self._shared.tokenizer, "processor": None}
        loop = loop_class(trainer_config=DictConfigWrap(config), **tools, **arguments)
        fields = {name: value for name, value in row.items() if name not in ("messages", "ground_truth")}
        fields |= {"raw_prompt": list(row["messages"]), "reward_model": {"ground_truth": row["ground_truth"]}}
        fields["tools_kwargs"] = (row.get("extra_info") or {}).get("tools_kwargs") or {}
        self._task = asyncio.create_task(self._run(loop, sampling_params, fields))
        asked = await self._next()
        if isinstance(asked, AgentLoopOutput):
            raise ValueError("the agent loop ended without a turn of the model")
        return asked

    async def step(self, action: list[int]) -> tuple[list[int], float, bool, dict[str, Any]]:
        self._model.answer(action)
        asked = await self._next()
        if not isinstance(asked, AgentLoopOutput):
            return asked, 0.0, False, {}
        self._model.check(asked)
        return [], float(asked.reward_score or 0.0), True, {**asked.metrics, **asked.extra_fields}

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, loop: AgentLoopBase, sampling_params: dict[str, Any], fields: dict[str, Any]) -> None:
        try:
            output = await loop.run(sampling_params, **fields)
            if not isinstance(output, AgentLoopOutput):
                raise ValueError(f"the agent loop returned {output!r:.100}; expected an AgentLoopOutput")
            self._model.asked.put_nowait(output)
        except (Exception, SystemExit) as error:  # the user's code; reset or step raises it
            self._model.asked.put_nowait(error)

    async def _next(self) -> list[int] | AgentLoopOutput:
        asked = await self._model.asked.get()
        if isinstance(asked, BaseException):
            raise asked
        return asked


class _Shared:
    """What all samples of a process share."""

    def __init__(self, loops: Sequence[Mapping[str, Any]], config: Any) -> None:
        self.config = OmegaConf.create(config)
        import_external_libs(self.config.actor_rollout_ref.model.external_lib)
        self._loops = {str(entry["name"]): _loop(entry) for entry in loops}

    @cached_property
    def tokenizer(self) -> Any:
        return hf_tokenizer(self.config.actor_rollout_ref.model.path)

    def loop(self, name: str | None) -> tuple[type[AgentLoopBase], dict[str, Any]]:
        """The class of that name and arguments of its constructor; ValueError lists the known ones."""
        name = name or str(self.config.actor_rollout_ref.rollout.agent.default_agent_loop)
        if name in self._loops:
            return self._loops[name]
        if name not in AGENT_LOOPS.names:
            known = ", ".join(sorted({*self._loops, *AGENT_LOOPS.names}))
            raise ValueError(f"there is no agent loop {name!r}; there is {known}")
        return AGENT_LOOPS.get(name), {}


_shared = cache(lambda text: _Shared(*json.loads(text)))


def _loop(entry: Mapping[str, Any]) -> tuple[type[AgentLoopBase], dict[str, Any]]:
    module, _, name = str(entry["_target_"]).rpartition(".")
    found = load_extern_type(entry.get("path") or f"pkg://{module}", name)
    if not callable(getattr(found, "run", None)):
        raise ValueError(f"{entry['_target_']} of the agent loop {entry['name']} has no run")
    return found, {key: value for key, value in entry.items() if key not in ("name", "_target_", "path")}
