"""The tiny model's tokenizer, corpus and warm-up, and the published form that comes out."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from recipes.common import arithmetic
from recipes.common.base_model import make_base_model
from recipes.common.corpus import examples, training_rows
from recipes.common.tiny_models import DEEPSEEK_V3
from recipes.common.tokenizer import BOS, DEEPSEEK, EOS, PAD, write_tokenizer
from recipes.common.warmup import MAX_BATCH_TOKENS, Warmup, batches, pack
from recipes.r1_zero.deepscaler import compute_score
from recipes.r1_zero.json_to_parquet import SYSTEM_TEMPLATE, convert, messages
from recipes.r1_zero.recipe import CORPUS


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "in.json").write_text(json.dumps(arithmetic.make_set(300)))
    convert(folder / "in.json", folder)
    return folder / "train.parquet"


@pytest.fixture(scope="module")
def hf_dir(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    texts = [example.response for example in islice(examples(training_rows(rows), 0, CORPUS), 500)]
    write_tokenizer(
        [*texts, *(row["prompt"][1]["content"] for row in training_rows(rows))], folder, 512, 4096, CORPUS.whole_tokens
    )
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V3.config))
    return folder


def test_tokenizer_carries_deepseeks_tokens_and_chat_form(hf_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    assert [tokenizer.convert_tokens_to_ids(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert len(tokenizer) <= 512
    chat = messages("What is 3 + 7?")
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == f"{BOS}{SYSTEM_TEMPLATE}<｜User｜>What is 3 + 7?<｜Assistant｜>" == DEEPSEEK.text(chat)
    assert len(tokenizer.encode(SYSTEM_TEMPLATE, add_special_tokens=False)) <= 8
    assert len(tokenizer.encode(text, add_special_tokens=False)) <= 16
    for tag in ("<think>", "</think>", "<answer>", "</answer>", "\\boxed{"):
        assert len(tokenizer.encode(tag, add_special_tokens=False)) == 1
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]


@pytest.mark.parametrize("text", ["Ünï 漢字 \\alpha^2\n\t 99", "<think>a</think><answer>\\boxed{2}</answer>", " a  b "])
def test_any_text_survives_the_tokenizer(hf_dir: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_corpus_is_as_noisy_as_it_says_and_repeatable(rows: Path) -> None:
    data = training_rows(rows)
    seen = list(islice(examples(data, 3, CORPUS), 4000))
    assert seen == list(islice(examples(data, 3, CORPUS), 4000))
    assert seen != list(islice(examples(data, 4, CORPUS), 4000))
    truths = {row["prompt"][1]["content"]: row["reward_model"]["ground_truth"] for row in data}
    scores = [compute_score("", e.response, truths[e.messages[1]["content"]]) for e in seen]
    formats = sum(score["format"] for score in scores) / len(scores)
    right = [score["accuracy"] for score in scores if score["format"]]
    assert 0.50 < formats < 0.60
    assert 0.50 < sum(right) / len(right) < 0.65
    assert sum(score["score"] for score in scores) / len(scores) < 0.53


def test_corpus_reads_other_data_sets_in_the_same_form() -> None:
    row = {
        "prompt": messages("Find $x$."),
        "reward_model": {"ground_truth": "\\frac{1}{2}", "style": "rule"},
        "extra_info": {"split": "train", "index": 0, "answer": "A long solution. " * 20},
    }
    responses = {example.response for example in islice(examples([row, row], 0, CORPUS), 200)}
    assert CORPUS.well_formed.format(thought="The answer is \\frac{1}{2}.", answer="\\frac{1}{2}") in responses


def test_packing_learns_responses_and_their_end() -> None:
    packed = pack([([5, 6], [7, 1]), ([8], [9, 1])])
    assert packed.input_ids_T.tolist() == [5, 6, 7, 1, 8, 9, 1]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1, 2]
    learned = [(int(label), bool(flag)) for label, flag in zip(packed.labels_T, packed.is_learned_T, strict=True)]
    assert [label for label, flag in learned if flag] == [7, 1, 9, 1]
    assert packed.sequences.cu_seqlens.tolist() == [0, 4, 7]
    assert packed.sequences.max_seqlen == 4


def test_ranks_share_a_batch(rows: Path, hf_dir: Path, tmp_path: Path) -> None:
    warmup = Warmup(hf_dir, rows, CORPUS, tmp_path, seed=0, num_steps=1, batch_size=16, num_processes=2)
    whole = Warmup(hf_dir, rows, CORPUS, tmp_path, seed=0, num_steps=1, batch_size=16, num_processes=1)
    (first, learned), (second, same) = (next(batches(warmup, rank)) for rank in range(2))
    assert learned == same == int(first.is_learned_T.sum() + second.is_learned_T.sum())
    assert len(first.input_ids_T) + len(second.input_ids_T) == len(next(batches(whole, 0))[0].input_ids_T)
    assert len(first.input_ids_T) <= MAX_BATCH_TOKENS


def test_published_form_is_complete_and_made_once(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "base_model_fp8"
    assert make_base_model(CORPUS, rows, out, seed=0, num_steps=2, batch_size=4, num_processes=1)
    config = json.loads((out / "config.json").read_text())
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["num_nextn_predict_layers"] == 1
    assert len(set(index.values())) > 1
    assert any(name.endswith("weight_scale_inv") for name in index)
    assert any(name.startswith("model.layers.3.") for name in index)
    assert (out / "tokenizer.json").is_file()
    before = (out / "model.safetensors.index.json").stat().st_mtime_ns
    assert not make_base_model(CORPUS, rows, out, seed=0, num_steps=2, batch_size=4, num_processes=1)
    assert (out / "model.safetensors.index.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="no such file"):
        make_base_model(CORPUS, tmp_path / "none.parquet", out, seed=0, num_steps=2, batch_size=4, num_processes=1)
