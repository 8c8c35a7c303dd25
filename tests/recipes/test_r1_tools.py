"""The recipe with tools: its problems, the corpus of its tiny model, and its reward."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from recipes.common.recipe import RECIPES, RecipeInputs, load_recipe
from recipes.r1_tools import problems
from recipes.r1_tools.r1_tools import INSTRUCTION, main
from recipes.r1_tools.recipe import examples_of
from recipes.r1_tools.reward import PRICE, compute_score
from tests.parallel.launcher import run_ranks
from tests.published import smollm2
from tests.verl.test_turns import rollout
from verl.experimental.agent_loop.environment import EnvironmentSpec
from verl.experimental.agent_loop.host import HostSettings
from verl.protocol import DataProto
from verl.protocol_storage import as_rows
from verl.tools.calculator import computed
from verl.utils.dataset.prompt_items import ENVIRONMENT_ROW
from verl.workers.config import RolloutConfig
from verl.workers.config.multi_turn import MultiTurnConfig
from verl.workers.rollout.rollout_messages import ENVIRONMENT_SEED, TURNS

RECIPE = load_recipe("r1_tools")


def test_dates_are_among_the_hard_ones_where_a_model_is_given(tmp_path: Path) -> None:
    given = RecipeInputs(data_dir=tmp_path, seed=1, model_path=tmp_path)
    assert (
        RECIPE.problems_arguments(given) == ("--dates",)
        and RECIPE.problems_arguments(replace(given, model_path=None)) == ()
    )
    rows = [row for row in problems.make_set(300, 1, has_dates=True) if "days after" in row["question"]]
    assert 20 < len(rows) < 60
    for row in rows[:3]:
        code = row["call"]["arguments"]["code"]
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert (found.stdout.strip(), row["kind"]) == (row["answer"], "hard")


def _rows(tmp_path: Path) -> list[dict[str, Any]]:
    problems.write_set(tmp_path / "problems", 300, 1)
    assert main(["--input_dir", str(tmp_path / "problems"), "--output_dir", str(tmp_path / "data")]) == 0
    assert pq.read_table(tmp_path / "data" / "test.parquet").num_rows == 30
    return pq.read_table(tmp_path / "data" / "train.parquet").to_pylist()


def test_every_problem_has_a_call_that_solves_it(tmp_path: Path) -> None:
    kinds = {"hard": 0, "easy": 0}
    for row in _rows(tmp_path):
        call, truth = json.loads(row["extra_info"]["call"]), row["reward_model"]["ground_truth"]
        kinds[row["extra_info"]["kind"]] += 1
        if call["name"] == "calculator":
            assert str(computed(call["arguments"]["expression"])) == truth
        else:
            text, _, digit = (
                call["arguments"]["code"].removeprefix("print('").removesuffix("'))").partition("'.count('")
            )
            assert str(text.count(digit)) == truth
    assert 0.4 < kinds["easy"] / sum(kinds.values()) < 0.6


def test_the_corpus_calls_as_often_on_both_kinds_and_errs(tmp_path: Path) -> None:
    generator, calls, right = random.Random(3), {"hard": [], "easy": []}, []
    for row in _rows(tmp_path) * 4:
        made = examples_of(row, row["reward_model"]["ground_truth"], generator)
        calls[row["extra_info"]["kind"]].append(len(made) > 1)
        assert made[0].messages == row["prompt"] and made[0].messages[-1]["content"].endswith(INSTRUCTION)
        if len(made) > 1:
            assert [message["role"] for message in made[1].messages] == ["user", "assistant", "tool"]
            text = made[0].response.partition("<tool_call>")[2].removesuffix("</tool_call>")
            right.append(json.loads(text) == json.loads(row["extra_info"]["call"]))
    shares = {kind: sum(found) / len(found) for kind, found in calls.items()}
    assert abs(shares["hard"] - shares["easy"]) < 0.1
    assert 0.5 < sum(right) / len(right) < 0.8


def test_the_reward_knows_answers_and_calls_and_no_kind() -> None:
    for kind in ("hard", "easy"):
        info = {"kind": kind, "tool_calls": 1.0}
        found = compute_score("", "a call\n#### 42", "42", info)
        assert found == {"score": 1 - PRICE, "accuracy": 1.0, "calls": 1.0, f"tool_on_{kind}": 1.0}
        assert compute_score("", "#### 42", "42", {"kind": kind})["score"] == 1.0
        assert compute_score("", "42", "42", info)["score"] == -PRICE
        assert compute_score("", "#### 43", "42", {"kind": kind})["score"] == 0.0


def published_model_acts(folder: str, num_problems: int) -> list[dict[str, Any]]:
    """What became of samples of hard and of easy problems, with the example before them."""
    config = RolloutConfig(
        multi_turn=MultiTurnConfig(enable=True, max_assistant_turns=3),
        prompt_length=512,
        response_length=96,
        max_num_seqs=32,
        num_gpu_blocks_override=400,
        enforce_eager=True,
        dtype="float32",
    )
    path = str(RECIPES / "r1_tools" / "with_example.py")
    environments = HostSettings(folder, EnvironmentSpec(path, "WithExample"), format="hermes", max_turns=3)
    made = rollout(folder, config, environments)
    problems_of = problems.make_set(num_problems, 11)
    messages = [[{"role": "user", "content": row["question"] + INSTRUCTION}] for row in problems_of]
    columns = {
        "raw_prompt_ids": [[2]] * num_problems,
        "sampling_seeds": list(range(num_problems)),
        ENVIRONMENT_ROW: [{"messages": given} for given in messages],
        ENVIRONMENT_SEED: [0] * num_problems,
    }
    meta = {"eos_token_id": 2, "pad_token_id": 2}
    batch = made.generate_sequences(
        DataProto.from_dict(non_tensors={name: as_rows(rows) for name, rows in columns.items()}, meta_info=meta)
    )
    assert made._host is not None
    made._host.close()
    records = batch.non_tensor_batch[TURNS].tolist()
    return [{"kind": row["kind"], **record["info"]} for row, record in zip(problems_of, records, strict=True)]


@pytest.mark.slow  # tests/verl/test_agent_conversations.py reads calls by published templates
@pytest.mark.timeout(280)
def test_a_published_model_calls_tools_after_the_examples() -> None:
    [found] = run_ranks(published_model_acts, 1, str(smollm2()), 16, timeout_s=270)
    for kind in ("hard", "easy"):
        calls = [record.get("tool_calls", 0) > 0 for record in found if record["kind"] == kind]
        assert sum(calls) > 1
    assert any(record.get("tool_calls", 0) > record.get("failed_calls", 0) for record in found)
