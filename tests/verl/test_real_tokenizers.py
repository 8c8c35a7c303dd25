"""Training data and rewards with tokenizers of the real kinds, and what an export keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mindspeed_llm.hf_checkpoint import HFCheckpoint, save_hf_checkpoint
from recipes.gsm8k.reward import compute_score as gsm8k_score
from recipes.r1_dynamic_sampling.reward import compute_score as dynamic_sampling_score
from recipes.r1_zero.deepscaler import compute_score as r1_zero_score
from tests.mindspeed_llm.tiny import write_tiny_checkpoint
from tests.real_tokenizers import CLOSE, KINDS, NAMES, NAMES_AND_TAGS, OPEN, TAGS
from tests.tiny_models import CONFIGS
from verl.protocol import DataProto
from verl.trainer.config.data import DataConfig
from verl.utils.dataset import RLHFDataset
from verl.utils.tokenizer import hf_tokenizer, texts_to_grade
from verl.workers.reward_manager.samples import grading_samples

QUESTION = "x = 2?"
ANSWERS = {
    gsm8k_score: "<think>3 + 4, so 7</think>\n#### 7",
    r1_zero_score: "<think>3 + 4</think><answer>\\boxed{7}</answer>",
    dynamic_sampling_score: "<think>3 + 4</think>The answer is \\boxed{7}.",
}
# Llama 3 has no token for padding.
pytestmark = pytest.mark.filterwarnings("ignore:the tokenizer has no pad token")


@pytest.mark.parametrize("kind", NAMES)
def test_a_row_becomes_the_template_s_tokens(kind: str, tmp_path: Path) -> None:
    """As transformers makes them, with one begin token; arguments of the template count."""
    KINDS[kind].write(tmp_path)
    tokenizer = hf_tokenizer(str(tmp_path))
    prompt = [{"role": "user", "content": QUESTION}]
    row = {"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": "7", "style": "rule"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    config = DataConfig(max_prompt_length=64, apply_chat_template_kwargs={"enable_thinking": False})
    item = RLHFDataset(str(tmp_path / "rows.parquet"), tokenizer, config)[0]
    ids = item["raw_prompt_ids"]
    given: dict[str, Any] = {"add_generation_prompt": True, "enable_thinking": False, "return_dict": False}
    assert ids == tokenizer.apply_chat_template(prompt, **given)
    thought = f"{OPEN}\n\n{CLOSE}\n\n" if "qwen" in kind else ""
    assert item["prompt_text"] == KINDS[kind].turn.format(QUESTION) + thought
    assert ids.count(tokenizer.bos_token_id) == (KINDS[kind].bos is not None)
    assert item["input_ids"][item["attention_mask"].bool()].tolist() == ids


@pytest.mark.parametrize(("kind", "tags"), NAMES_AND_TAGS)
def test_rewards_read_the_thought(kind: str, tags: str, tmp_path: Path) -> None:
    """Whatever its tags are; the end token is in no text."""
    whole_tokens, are_special = TAGS[tags]
    KINDS[kind].write(tmp_path, whole_tokens, are_special=are_special)
    tokenizer = hf_tokenizer(str(tmp_path))
    for score, answer in ANSWERS.items():
        for end in KINDS[kind].ends:
            ids = tokenizer.encode(answer + end, add_special_tokens=False)
            [text] = texts_to_grade(tokenizer, [ids])
            assert text == answer
            [sample] = grading_samples(_batch(tokenizer.encode(QUESTION), ids), tokenizer, "data_source")
            assert (sample.prompt_str, sample.solution_str) == (QUESTION, answer)
            result = score("s", text, "7")
            assert (result if isinstance(result, float) else result["score"]) == pytest.approx(1)


def _batch(prompt: list[int], response: list[int]) -> DataProto:
    tensors = {
        "prompts": torch.tensor([prompt]),
        "responses": torch.tensor([response]),
        "attention_mask": torch.ones(1, len(prompt) + len(response)),
    }
    return DataProto.from_dict(
        tensors=tensors, non_tensors={"data_source": ["s"], "reward_model": [{"ground_truth": "7"}]}
    )


@pytest.mark.parametrize("kind", NAMES)
def test_an_export_keeps_the_tokenizer(kind: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_checkpoint(model, CONFIGS["qwen3"], seed=1)
    KINDS[kind].write(model, (OPEN, CLOSE))
    (model / "tokenizer.model").write_bytes(b"pieces")  # which other programs read
    with HFCheckpoint(model) as source:
        tensors = ((name, source.read(name)) for name in source.names())
        save_hf_checkpoint(tensors, tmp_path / "export", model)
    kept = {
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "chat_template.jinja",
        "generation_config.json",
    }
    kept &= {file.name for file in model.iterdir()}  # a published template may be in tokenizer_config.json
    assert all((tmp_path / "export" / name).read_bytes() == (model / name).read_bytes() for name in kept)
    assert hf_tokenizer(str(tmp_path / "export")).chat_template == hf_tokenizer(str(model)).chat_template is not None
