"""Where the chat template opens or closes the thought, every recipe's reward judges the answer behind it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recipes.common.tokenizer import write_tokenizer
from recipes.gsm8k import reward as gsm8k
from recipes.math_lighteval import reward as math_lighteval
from recipes.r1_dynamic_sampling import reward as r1_dynamic_sampling
from recipes.r1_zero import deepscaler as r1_zero
from verl.protocol import DataProto
from verl.trainer.config.data import DataConfig
from verl.utils.dataset import PromptItems, RLHFDataset, collate_fn
from verl.utils.reward_score.thoughts import PROMPT_END
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.reward_manager import NaiveRewardManager
from verl.workers.reward_manager.pooled import grading_jobs

TURNS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ENDS = {
    "plain": "",
    "open": "<think>",
    "open line": "<think>\n",
    "closed": "<think>\n\n</think>\n\n",
    "v31": "</think>",
}
QUESTION = "What is 2 + 2? Write <think> thought </think> first."


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prompts")
    row = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": QUESTION}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 7},
    }
    pq.write_table(pa.Table.from_pylist([row]), root / "rows.parquet")
    write_tokenizer([QUESTION, "<think>\n\n</think>\n\n"], root / "tokenizer", 320, 512)
    return root


def _item(root: Path, end: str) -> tuple[dict[str, Any], Any]:
    tokenizer = hf_tokenizer(str(root / "tokenizer"))
    tokenizer.chat_template = TURNS + "<｜Assistant｜>" + ENDS[end].replace("\n", "{{ '\\n' }}")
    rows = RLHFDataset([str(root / "rows.parquet")], tokenizer, DataConfig(max_prompt_length=200))
    return PromptItems(rows, tokenizer, 200)[0], tokenizer


WHOLE = "<think>so</think><answer>\\boxed{4}</answer>"
REST = WHOLE.removeprefix("<think>")


@pytest.mark.parametrize(
    ("recipe", "end", "answer", "form", "accuracy"),
    [
        (r1_zero, "plain", WHOLE, 1, 1),
        (r1_zero, "plain", REST, 0, 1),
        (r1_zero, "open", REST, 1, 1),
        (r1_zero, "open line", "\n" + REST, 1, 1),
        (r1_zero, "open line", "\nso</think>\n\n<answer>\\boxed{5}</answer>", 1, 0),
        (r1_zero, "open", WHOLE, 0, 1),
        (r1_zero, "open", "</think><answer>\\boxed{4}</answer>", 0, 1),
        (r1_zero, "open", "so<answer>\\boxed{4}</answer>", 0, 1),
        (r1_zero, "closed", WHOLE, 1, 1),
        (r1_zero, "closed", REST, 0, 1),
        (r1_zero, "v31", REST, 0, 1),
        (r1_dynamic_sampling, "plain", "\\boxed{4}", 0, 0),
        (r1_dynamic_sampling, "open", "so</think>\\boxed{4}", 1, 1),
        (r1_dynamic_sampling, "open", "so \\boxed{4}", 0, 0),
        (r1_dynamic_sampling, "closed", "It is \\boxed{4}", 1, 1),
        (r1_dynamic_sampling, "v31", "It is \\boxed{4}", 1, 1),
        (r1_dynamic_sampling, "closed", "<think>\\boxed{4}", 0, 0),
        (gsm8k, "plain", "so\n#### 4", 1, 1),
        (gsm8k, "plain", "<think>so</think>\n#### 4", 1, 1),
        (gsm8k, "plain", "so</think>\n#### 4", 0, 1),
        (gsm8k, "open", "so</think>\n#### 4", 1, 1),
        (gsm8k, "open line", "so\n#### 4", 0, 0),
        (gsm8k, "closed", "so\n#### 4", 1, 1),
        (math_lighteval, "open", "so</think>\\boxed{4}", None, 1),
    ],
)
def test_the_thought_begins_in_the_prompt(
    root: Path, recipe: ModuleType, end: str, answer: str, form: float | None, accuracy: float
) -> None:
    item, _ = _item(root, end)
    assert item["extra_info"][PROMPT_END].endswith("<｜Assistant｜>" + ENDS[end]) and item["extra_info"]["index"] == 7
    result = recipe.compute_score("sums", answer, "4", item["extra_info"])
    assert (result.get("format"), result["accuracy"]) == (form, accuracy)


def test_without_a_word_about_the_prompt_nothing_is_taken_for_granted() -> None:
    assert r1_zero.compute_score("sums", REST, "4", {})["format"] == 0
    assert r1_zero.compute_score("sums", WHOLE, "4", None)["format"] == 1
    assert gsm8k.compute_score("sums", "so</think>\n#### 4", "4")["format"] == 1


def test_graders_and_the_ledger_get_the_end_and_managers_find_it_in_the_tokens(root: Path) -> None:
    """A job's ``extra_info`` is what the ledger writes and ``tools.regrade`` reads."""
    item, tokenizer = _item(root, "open")
    batch = DataProto.from_single_dict(collate_fn([item]))
    [(_, _, job)] = grading_jobs(batch, [REST])
    assert json.loads(json.dumps(job.extra_info)) == item["extra_info"]
    prompt, response = item["raw_prompt_ids"], tokenizer(REST, add_special_tokens=False)["input_ids"]
    tensors = {
        "prompts": torch.tensor([[tokenizer.pad_token_id, *prompt]]),
        "responses": torch.tensor([response]),
        "attention_mask": torch.tensor([[0, *([1] * (len(prompt) + len(response)))]]),
    }
    columns = {"data_source": ["sums"], "reward_model": [{"ground_truth": "4"}], "extra_info": [{"index": 7}]}
    manager = NaiveRewardManager(tokenizer, 0, r1_zero.compute_score)
    assert float(manager(DataProto.from_dict(tensors, columns)).sum()) == pytest.approx(1.0)


def test_a_row_that_has_the_key_is_refused(root: Path) -> None:
    item, tokenizer = _item(root, "plain")
    with pytest.raises(ValueError, match=f"has '{PROMPT_END}', which the run writes itself; rename the key"):
        PromptItems([item], tokenizer, 200)[0]
    rows = pq.read_table(root / "rows.parquet").to_pylist()
    pq.write_table(pa.Table.from_pylist([rows[0] | {"extra_info": {PROMPT_END: ""}}]), root / "own.parquet")
    with pytest.raises(ValueError, match=rf"own.parquet has '{PROMPT_END}'.*rename the key"):
        RLHFDataset([str(root / "own.parquet")], tokenizer, DataConfig(max_prompt_length=200))
