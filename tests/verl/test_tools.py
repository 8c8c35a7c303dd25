"""Tools: what they compute and refuse, and the environment that makes the model's calls."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.published import tokenizer_folder
from verl.experimental.agent_loop.tool_environment import ToolEnvironment
from verl.tools.calculator import computed
from verl.trainer.config import load_config
from verl.trainer.preflight import plugin_problems, tool_warnings
from verl.utils.reward_score.sandbox import missing_protection
from verl.workers.rollout.environment_host import host_settings, tool_entries

CALCULATOR = {"class_name": "verl.tools.calculator.CalculatorTool"}
TURNS = "actor_rollout_ref.rollout.multi_turn"
OWN_TOOL = '''
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

class Shop(BaseTool):
    """Sells what its sample's row says is there."""

    def __init__(self, config, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.stock = {}

    async def create(self, instance_id=None, *, stock=(), **kwargs):
        instance_id, response = await super().create(instance_id)
        self.stock[instance_id] = list(stock)
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        has_it = parameters["thing"] in self.stock[instance_id]
        return ToolResponse(text="sold" if has_it else "out of stock"), 0.5 if has_it else -0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(len(self.stock[instance_id]))

    async def release(self, instance_id, **kwargs):
        del self.stock[instance_id]
'''
SHOP_SCHEMA = {
    "type": "function",
    "function": {"name": "buy", "description": "Buys.", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("347 * 862", 299114),
        ("(12 + 30) * 7 - -1", 295),
        ("2 ** 100", 2**100),
        ("7 / 2", 3.5),
        ("7 // 2 % 2", 1),
        (" 1e3 ", 1000.0),
    ],
)
def test_the_calculator_computes(expression: str, value: float) -> None:
    assert computed(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *(None, 5, "", "1 +", "1 / 0", "9 ** 9 ** 9", "(-8) ** 0.5", "__import__('os')", "a", "'a' * 9", "True"),
        *("1" * 501, "10 ** 900 * 10 ** 900", "1j", "[1][0]"),
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic(expression: Any) -> None:
    with pytest.raises((ValueError, SyntaxError, ArithmeticError)):
        computed(expression)


def _call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": text}}


def _steps(environment: ToolEnvironment, row: dict[str, Any], *turns: list[dict[str, Any]]) -> list[Any]:
    async def run() -> list[Any]:
        assert await environment.reset({"messages": [], **row}, 0) == []
        found = [await environment.step({"role": "assistant", "content": "", "tool_calls": calls}) for calls in turns]
        await environment.close()
        return found

    return asyncio.run(run())


def test_a_turn_without_a_call_ends_and_wrong_calls_are_answered() -> None:
    environment = ToolEnvironment([CALCULATOR], 2, 20, "middle")
    assert [tool["function"]["name"] for tool in environment.tools] == ["calculator"]
    right = _call("calculator", {"expression": "6 * 7"})
    many, wrong, last = _steps(
        environment,
        {},
        [right, _call("search", "{}"), right],
        [_call("calculator", "not json"), _call("calculator", "[1]")],
        [],
    )
    results = [message["content"] for message in many[0]]
    assert results[0] == "42" and all(text.startswith("error: ") for text in results[1:])
    assert all(len(message["content"]) <= 20 and message["role"] == "tool" for message in many[0])
    assert many[1:] == (0.0, False, {"tool_calls": 3.0, "failed_calls": 2.0})
    assert wrong[3] == {"tool_calls": 2.0, "failed_calls": 2.0}
    assert last == ([], 0.0, True, {})


def test_a_tool_of_a_users_own_file_has_its_rows_arguments_and_rewards(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(OWN_TOOL)
    entry = {"class_name": "Shop", "path": str(tmp_path / "shop.py"), "tool_schema": SHOP_SCHEMA}
    environment = ToolEnvironment([entry], 1, 100, "right")
    row = {"extra_info": {"tools_kwargs": {"buy": {"create_kwargs": {"stock": ["tea", "milk"]}}}}}
    tea, wine, last = _steps(environment, row, [_call("buy", {"thing": "tea"})], [_call("buy", {"thing": "wine"})], [])
    assert (tea[0][0]["content"], tea[1]) == ("sold", 0.5)
    assert (wine[0][0]["content"], wine[1]) == ("out of stock", -0.5)
    assert last == ([], 2.0, True, {})


@pytest.mark.skipif(bool(missing_protection()), reason=f"no sandbox: {missing_protection()}")
def test_programs_run_in_the_sandbox() -> None:
    entry = {"class_name": "verl.tools.python_tool.PythonTool", "config": {"timeout_s": 2}}
    environment = ToolEnvironment([entry], 4, 500, "left")
    calls = [_call("python", {"code": code}) for code in ("print(6 * 7)", "1 / 0", "while True: pass")]
    [(messages, *_)] = _steps(environment, {}, [*calls, _call("python", {"code": 7})])
    texts = [message["content"] for message in messages]
    assert texts[0] == "42\n"
    assert "ZeroDivisionError" in texts[1]
    assert texts[2].endswith("timeout")
    assert texts[3].startswith("error")


def test_settings_of_a_run_name_the_tools_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text("tools:\n  - class_name: verl.tools.calculator.CalculatorTool\n")
    config = load_config([f"{TURNS}.enable=true", f"{TURNS}.tool_config_path={file}", f"{TURNS}.max_tool_calls=3"])
    settings = host_settings(config)
    assert settings is not None and settings.max_calls == 3
    assert settings.environment.kwargs["tools"] == [CALCULATOR]
    assert host_settings(load_config([])) is None
    for text, problem in {"": "no list tools", "tools: [1]": "no class_name", "tools: [": "cannot be read"}.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=problem):
            tool_entries(str(file))
    file.write_text("tools:\n  - class_name: verl.tools.calculator.Missing\n")
    assert any("Missing" in problem for problem in plugin_problems(config))


def test_a_template_that_shows_no_tools_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text("tools:\n  - class_name: verl.tools.calculator.CalculatorTool\n")
    found = {}
    for name in ("qwen3", "deepseek_v3"):
        model = f"actor_rollout_ref.model.path={tokenizer_folder(name)}"
        found[name] = list(
            tool_warnings(load_config([f"{TURNS}.enable=true", f"{TURNS}.tool_config_path={file}", model]))
        )
    assert found["qwen3"] == [] == list(tool_warnings(load_config([])))
    [warning] = found["deepseek_v3"]
    assert "shows the model no tools" in warning


def test_several_turns_need_one_environment() -> None:
    def problems(*overrides: str) -> str:
        from verl.trainer.config import validate_config

        return "\n".join(validate_config(load_config([f"{TURNS}.enable=true", *overrides])))

    assert "give one of" in problems()
    assert "give one of" in problems(f"{TURNS}.tool_config_path=a", f"{TURNS}.environment.path=b")
    assert "rebalance_interval must be 0" in problems(
        f"{TURNS}.tool_config_path=a", "actor_rollout_ref.rollout.rebalance_interval=8"
    )
