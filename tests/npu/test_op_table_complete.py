"""Every entry of both op tables is tested against its reference; read from the sources, so that it runs anywhere."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from megatron.core.ops import resolve as resolve_train_ops
from megatron.core.ops.contract import TrainOps
from vllm.ops.contract import RolloutOps
from vllm.ops.contract import resolve as resolve_rollout_ops

HERE = Path(__file__).parent
# Files with a dict CASES of the entries that they test, and tests of one entry that needs more than one process.
CASES_OF_TRAINING = ("train_op_cases.py",)
CASES_OF_ROLLOUT = ("rollout_op_cases.py", "test_rollout_layers.py")
OTHER_TESTS = {"exchanged_experts": "test_expert_exchange.py"}
TRAINING_ENTRIES = {field.name for field in fields(TrainOps) if field.default is not None} - {"names"}


def entries_with_cases(sources: list[str]) -> set[str]:
    """Keys of the dicts called CASES, each with at least one case."""
    keys: set[str] = set()
    for source in sources:
        for statement in ast.parse(source).body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            is_cases = any(isinstance(target, ast.Name) and target.id == "CASES" for target in targets)
            if is_cases and isinstance(dictionary := getattr(statement, "value", None), ast.Dict):
                keys |= {ast.literal_eval(key) for key in dictionary.keys if key is not None}
    return keys


def read(names: tuple[str, ...]) -> list[str]:
    return [(HERE / name).read_text("utf-8") for name in names]


def test_every_training_entry_has_cases() -> None:
    assert entries_with_cases(read(CASES_OF_TRAINING)) == TRAINING_ENTRIES


def test_every_rollout_entry_has_cases() -> None:
    for entry, file in OTHER_TESTS.items():
        assert f"{entry}(" in (HERE / file).read_text("utf-8"), f"{file} does not call {entry}"
    assert entries_with_cases(read(CASES_OF_ROLLOUT)) | set(OTHER_TESTS) == RolloutOps.entries()


def test_a_new_entry_without_cases_is_noticed() -> None:
    assert entries_with_cases(['CASES = {"old": 1}', 'CASES: dict = {"other": 2}']) != {"old", "other", "new"}


@pytest.mark.parametrize(
    ("implementations", "entries"),
    [
        (resolve_train_ops("mindspeed.ops:train_ops").names, TRAINING_ENTRIES),
        (resolve_rollout_ops("vllm_ascend.ops:rollout_ops").implementations, RolloutOps.entries()),
    ],
    ids=["train", "rollout"],
)
def test_the_printed_table_says_what_each_entry_is(implementations: dict[str, str], entries: set[str]) -> None:
    assert set(implementations) == entries
    assert all(kind.split()[0] in ("native", "reference") for kind in implementations.values())
