"""Agent loops in verl's form: what they ask is what the model is given, and what they cannot do is named."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hf_formats.tokenizer import load_tokenizer
from tests.pages import ROOT
from tests.published import tokenizer_folder
from verl.experimental.agent_loop.agent_loop import AgentLoopEnvironment
from verl.trainer.config import load_config, validate_config
from verl.trainer.preflight import plugin_problems
from verl.workers.rollout.environment_host import agent_names, host_settings

AGENT = "actor_rollout_ref.rollout.agent"
TURNS = "actor_rollout_ref.rollout.multi_turn"
LOOPS = '''
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op


@register("checked")
class Checked(AgentLoopBase):
    """Asks whether the answer is right, as often as its row says."""

    def __init__(self, trainer_config, server_manager, tokenizer, processor, question="Sure?", **kwargs):
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)
        self.question = question
        self.response_length = self.rollout_config.response_length

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        metrics: dict[str, float] = {}
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        response_ids, response_mask = [], []
        for turn in range(kwargs["extra_info"]["turns"]):
            if turn:
                given = await self.apply_chat_template(
                    [{"role": "user", "content": self.question}], remove_system_prompt=True
                )
                response_ids += given
                response_mask += [0] * len(given)
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=uuid4().hex, prompt_ids=prompt_ids + response_ids, sampling_params=sampling_params
                )
            response_ids += output.token_ids
            response_mask += [1] * len(output.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids[: self.response_length],
            response_mask=response_mask[: self.response_length],
            reward_score=0.5,
            num_turns=kwargs["extra_info"]["turns"],
            metrics=metrics,
            extra_fields={"letters": 3},
        )


class Odd(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        kind, ids = kwargs["extra_info"]["kind"], [5, 6, 7]
        given = dict(sampling_params)
        call = lambda: self.server_manager.generate("1", prompt_ids=ids, sampling_params=given)
        if kind == "nothing":
            return AgentLoopOutput(ids, [], [])
        if kind == "sampling":
            given["temperature"] = 0.1
        if kind == "two":
            import asyncio
            await asyncio.gather(call(), call())
        if kind == "long":
            given |= {"max_tokens": 2, "logprobs": True}
        first = await call()
        if kind == "raises":
            raise KeyError("mine")
        if kind == "retry":
            second = await call()
            return AgentLoopOutput(ids, second.token_ids, [1] * len(second.token_ids))
        if kind == "none":
            return None
        if kind == "others":
            return AgentLoopOutput(ids, [9] + first.token_ids, [1] * (1 + len(first.token_ids)))
        mask = [0] * len(first.token_ids) if kind == "masks" else [1] * len(first.token_ids)
        return AgentLoopOutput(ids, first.token_ids + [3], mask + [0])
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the loops in a file, which registers its names once in this process."""
    found = tmp_path_factory.mktemp("loops")
    (found / "loops.py").write_text(LOOPS)
    return found


def _config(folder: Path, *overrides: str) -> Any:
    (folder / "agent.yaml").write_text(
        f"- name: odd\n  _target_: Odd\n  path: {folder}/loops.py\n"
        f"- name: doubtful\n  _target_: Checked\n  path: {folder}/loops.py\n  question: Really?\n"
    )
    return load_config(
        [
            f"{TURNS}.enable=true",
            f"{AGENT}.agent_loop_config_path={folder}/agent.yaml",
            f"{AGENT}.default_agent_loop=doubtful",
            f"actor_rollout_ref.model.path={tokenizer_folder('qwen3')}",
            *overrides,
        ]
    )


def _run(config: Any, row: dict[str, Any], *turns: list[int]) -> list[Any]:
    """What ``reset`` and each ``step`` returned."""
    settings = host_settings(config)
    assert settings is not None
    sent = json.loads(json.dumps(asdict(settings.environment)))  # as it goes to its process

    async def all_of_it() -> list[Any]:
        environment = AgentLoopEnvironment(**sent["kwargs"])
        found: list[Any] = [await environment.reset({"messages": CHAT, "ground_truth": "42", **row}, 0)]
        found += [await environment.step(turn) for turn in turns]
        await environment.close()
        return found

    return asyncio.run(asyncio.wait_for(all_of_it(), 60))


CHAT = [{"role": "user", "content": "What is 6 * 7?"}]


def test_each_prompt_of_a_loop_is_what_the_model_is_given(folder: Path) -> None:
    config = _config(folder)
    tokenizer = load_tokenizer(str(tokenizer_folder("qwen3")))
    prompt, second, end = _run(config, {"extra_info": {"turns": 2}}, [11, 12], [13])
    assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert second[0][: len(prompt) + 2] == [*prompt, 11, 12] and second[1:] == (0.0, False, {})
    given = tokenizer.decode(second[0][len(prompt) + 2 :])
    assert given == "<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\n"
    assert end[:3] == ([], 0.5, True) and end[3]["letters"] == 3 and end[3]["generate_sequences"] > 0


def test_the_runs_own_template_is_that_of_its_loops(folder: Path) -> None:
    template = "{{ 'system:' }}{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"
    config = _config(folder, f'data.apply_chat_template_kwargs.chat_template="{template}"')
    tokenizer = load_tokenizer(str(tokenizer_folder("qwen3")))
    prompt, second = _run(config, {"extra_info": {"turns": 2}}, [11])[:2]
    assert tokenizer.decode(prompt) == "system:<What is 6 * 7?>"
    assert tokenizer.decode(second[0][len(prompt) + 1 :]) == "<Really?>"


def test_a_loop_may_be_registered_by_a_file_and_rows_may_name_theirs(folder: Path) -> None:
    config = _config(folder, f"actor_rollout_ref.model.external_lib={folder}/loops.py")
    assert plugin_problems(config) == []
    assert {"checked", "doubtful", "odd", "single_turn_agent"} <= set(agent_names(config))
    checked = _run(config, {"agent_name": "checked", "extra_info": {"turns": 2}}, [11])
    assert checked[1][0][-20:] != _run(config, {"extra_info": {"turns": 2}}, [11])[1][0][-20:]
    _, end = _run(config, {"agent_name": "single_turn_agent", "extra_info": {}}, [11])
    assert end == ([], 0.0, True, {})


def test_the_pages_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "turns.md").read_text(encoding="utf-8").partition("## An agent loop")[2]
    for name, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", page, flags=re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    given = re.findall(r"^    (actor_rollout_ref\.\S+)$", page.partition("## ")[0], flags=re.MULTILINE)
    config = load_config([*given, f"actor_rollout_ref.model.path={tokenizer_folder('qwen3')}"])
    assert plugin_problems(config) == []
    prompt, again, end = _run(config, {}, [11, 12], [13])
    assert again[0][: len(prompt) + 2] == [*prompt, 11, 12] and len(again[0]) > len(prompt) + 2
    assert end == ([], 0.0, True, {})


TOOLS = '''
import json
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.utils.tool_registry import initialize_tools_from_config


class Calculates(AgentLoopBase):
    """Calls tools as upstream's own loop does."""

    async def run(self, sampling_params, **kwargs):
        turns = self.config.actor_rollout_ref.rollout.multi_turn
        tools = {tool.name: tool for tool in initialize_tools_from_config(turns.tool_config_path)}
        parser = ToolParser.get_tool_parser(turns.format, self.tokenizer)
        schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools.values()]
        prompt = await self.apply_chat_template(kwargs["raw_prompt"], tools=schemas)
        first = await self.server_manager.generate("1", prompt_ids=prompt, sampling_params=sampling_params)
        _, [call] = await parser.extract_tool_calls(first.token_ids)
        instance, _ = await tools[call.name].create()
        told, _, _ = await tools[call.name].execute(instance, json.loads(call.arguments))
        more = await self.apply_chat_template([{"role": "tool", "content": told.text}], remove_system_prompt=True)
        given = prompt + first.token_ids + more
        last = await self.server_manager.generate("1", prompt_ids=given, sampling_params=sampling_params)
        return AgentLoopOutput(given, last.token_ids, [1] * len(last.token_ids))
'''


def test_a_loop_calls_the_tools_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "calculates.py").write_text(TOOLS)
    (tmp_path / "tools.yaml").write_text("tools:\n  - class_name: verl.tools.calculator.CalculatorTool\n")
    (tmp_path / "agent.yaml").write_text(
        f"- {{name: calculates, _target_: Calculates, path: {tmp_path}/calculates.py}}"
    )
    config = load_config(
        [
            f"{TURNS}.enable=true",
            f"{TURNS}.tool_config_path={tmp_path}/tools.yaml",
            f"{AGENT}={{agent_loop_config_path:{tmp_path}/agent.yaml,default_agent_loop:calculates}}",
            f"actor_rollout_ref.model.path={tokenizer_folder('qwen3')}",
        ]
    )
    assert plugin_problems(config) == []
    tokenizer = load_tokenizer(str(tokenizer_folder("qwen3")))
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call><|im_end|>'
    prompt, given, end = _run(config, {}, tokenizer(call)["input_ids"], [13])
    assert "calculator" in tokenizer.decode(prompt) and end[2]
    assert tokenizer.decode(given[0]).endswith(
        "<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


ODD = {"agent_name": "odd"}


@pytest.mark.parametrize(
    ("kind", "problem"),
    {
        "nothing": "ended without a turn",
        "sampling": "changes temperature",
        "two": "one at a time",
        "long": "asked for 2 tokens, and the turn has 3",
        "raises": "mine",
        "none": "expected an AgentLoopOutput",
        "others": "returned token 9 at position 3, where the model's last context has 21",
        "masks": "response_mask of the agent loop has 0 tokens, and the model wrote 3",
    }.items(),
)
def test_what_a_loop_cannot_do_is_named(folder: Path, kind: str, problem: str) -> None:
    with pytest.raises((ValueError, KeyError), match=problem):
        _run(_config(folder), ODD | {"extra_info": {"kind": kind}}, [21, 22, 23])


def test_a_loop_may_ask_once_more(folder: Path) -> None:
    first, again, end = _run(_config(folder), ODD | {"extra_info": {"kind": "retry"}}, [21, 22, 23], [24])
    assert first == again[0] == [5, 6, 7] and end[2]


def test_files_and_names_are_checked_before_a_run(folder: Path) -> None:
    config = _config(folder)
    assert not [problem for problem in validate_config(config) if "agent" in problem]
    problems = "\n".join(validate_config(_config(folder, f"{TURNS}.enable=false")))
    assert f"set {TURNS}.enable=True" in problems
    problems = "\n".join(validate_config(_config(folder, f"{TURNS}.environment.path=/x.py")))
    assert "give one of" in problems
    for text, problem in {
        "": "has no list of agent loops",
        "- name: odd": "has no _target_",
        "- {name: odd, _target_: Missing, path: loops.py}": "loops.py does not exist",
        "- {name: odd, _target_: no_such_module.Odd}": "no_such_module",
        f"- {{name: odd, _target_: Missing, path: {folder}/loops.py}}": "defines no 'Missing'",
        f"- {{name: odd, _target_: Odd, path: {folder}/loops.py}}": "no agent loop 'doubtful'",
    }.items():
        config = _config(folder)
        (folder / "agent.yaml").write_text(text)
        assert any(problem in found for found in plugin_problems(config)), text
