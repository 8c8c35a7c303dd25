"""Parquet files of prompts to batches, and batches in an order that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from recipes.common.tokenizer import write_tokenizer
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler
from verl.protocol import DataProto
from verl.trainer.config.data import DataConfig
from verl.utils.dataset import PromptItems, ResumableLoader, RLHFDataset, collate_fn
from verl.utils.parquet import read_rows, schema_problems
from verl.utils.tokenizer import hf_tokenizer


def _row(index: int, question: str) -> dict[str, Any]:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"ground_truth": str(index), "style": "rule"},
        "extra_info": {"split": "train", "index": index},
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(parquet file of 11 prompts, the last one long; directory of a tokenizer)."""
    root = tmp_path_factory.mktemp("data")
    rows = [_row(i, f"What is {i} + {i}?") for i in range(10)] + [_row(10, "What is 1 + " * 40)]
    path = root / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    write_tokenizer([f"What is {i} + {i}?" for i in range(50)], root / "tokenizer", 320, 512)
    return str(path), str(root / "tokenizer")


@pytest.fixture(scope="module")
def dataset(files: tuple[str, str]) -> RLHFDataset:
    path, tokenizer = files
    return RLHFDataset([path], hf_tokenizer(tokenizer), DataConfig(max_prompt_length=40, filter_overlong_prompts=True))


def test_prompts_decode_to_the_chat_text(dataset: RLHFDataset, files: tuple[str, str]) -> None:
    item = dataset[3]
    text = str(hf_tokenizer(files[1]).decode(item["raw_prompt_ids"]))
    assert text == item["prompt_text"]
    assert text.endswith("<｜User｜>What is 3 + 3?<｜Assistant｜>")


def test_a_chat_template_of_the_config_takes_the_tokenizers_place(files: tuple[str, str]) -> None:
    path, tokenizer = files
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    kwargs = {"chat_template": template}
    config = DataConfig(max_prompt_length=40, filter_overlong_prompts=True, apply_chat_template_kwargs=kwargs)
    item = RLHFDataset([path], hf_tokenizer(tokenizer), config)[3]
    assert item["prompt_text"] == "[What is 3 + 3?]"
    assert hf_tokenizer(tokenizer).decode(item["raw_prompt_ids"]).endswith("[What is 3 + 3?]")


def test_long_prompts_are_dropped_or_named(dataset: RLHFDataset, files: tuple[str, str]) -> None:
    assert len(dataset) == 10
    assert dataset.num_filtered == 1
    path, tokenizer = files
    with pytest.raises(ValueError, match="the first in row 10"):
        RLHFDataset([path], hf_tokenizer(tokenizer), DataConfig(max_prompt_length=40))
    with pytest.raises(ValueError, match="no prompt"):
        RLHFDataset([path], hf_tokenizer(tokenizer), DataConfig(max_prompt_length=2, filter_overlong_prompts=True))


@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_long_prompts_are_cut_as_asked(files: tuple[str, str], truncation: str) -> None:
    path, tokenizer = files
    whole = RLHFDataset([path], hf_tokenizer(tokenizer), DataConfig(max_prompt_length=1000))[10]["raw_prompt_ids"]
    cut = RLHFDataset([path], hf_tokenizer(tokenizer), DataConfig(max_prompt_length=41, truncation=truncation))
    item = cut[10]
    expected = {"left": whole[-41:], "right": whole[:41], "middle": whole[:20] + whole[-21:]}
    assert item["raw_prompt_ids"] == expected[truncation]
    assert item["prompt_text"] == hf_tokenizer(tokenizer).decode(expected[truncation])
    assert len(cut) == 11 and cut.num_filtered == 0


def test_batches_become_dataprotos(dataset: RLHFDataset) -> None:
    items = PromptItems(dataset, dataset.tokenizer, 40)
    batch = DataProto.from_single_dict(collate_fn([items[i] for i in range(3)]))
    assert batch.batch is None and batch.non_tensor_batch["raw_prompt_ids"].tolist() == [
        dataset[i]["raw_prompt_ids"] for i in range(3)
    ]
    assert [model["ground_truth"] for model in batch.non_tensor_batch["reward_model"]] == ["0", "1", "2"]


def test_rows_are_as_upstreams(files: tuple[str, str]) -> None:
    """Padded tensors and all columns, from a typed config, a dict and an OmegaConf tree; the chat if asked for."""
    keys = {"max_prompt_length": 300, "return_raw_chat": True, "return_full_prompt": True, "prompt_key": "prompt"}
    for config in (keys, OmegaConf.create(keys)):
        rows = RLHFDataset(files[0], hf_tokenizer(files[1]), config, max_samples=2)
        item, ids = rows[1], rows[1]["raw_prompt_ids"]
        assert len(rows) == 2 and item["input_ids"].shape == (300,) and item["input_ids"][-len(ids) :].tolist() == ids
        assert item["attention_mask"].sum() == len(ids) and item["position_ids"][-1] == len(ids) - 1
        assert item["raw_prompt"] == [{"content": "What is 1 + 1?", "role": "user"}] and "prompt" not in item
        assert (item["ability"], item["index"], item["full_prompts"]) == ("math", 1, item["prompt_text"])
        assert rows.maybe_filter_out_long_prompts() == rows.dataframe
        batch = collate_fn([rows[0], item])
        assert batch["input_ids"].shape == (2, 300) and batch["ability"].tolist() == ["math", "math"]


class Reversed(AbstractSampler):
    """From the last row to the first, but only the last nine."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self.size = len(data_source)

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, self.size - 10, -1))


class Curriculum(AbstractCurriculumSampler):
    """The row that the last batch asked for, and its followers; the state is the next row."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self.next, self.size = 0, len(data_source)

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield (self.next - 1) % self.size

    def update(self, batch: Any) -> None:
        self.next = batch

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def _sampled(dataset: RLHFDataset, sampler: type) -> ResumableLoader:
    return ResumableLoader(dataset, 3, shuffle=True, seed=5, sampler=sampler(dataset, None))


def test_a_users_sampler_decides_the_order(dataset: RLHFDataset) -> None:
    loader = _sampled(dataset, Reversed)
    assert len(loader) == 3
    batches = [_indices(batch) for batch in islice(iter(loader), 4)]
    assert batches == [[9, 8, 7], [6, 5, 4], [3, 2, 1], [9, 8, 7]]
    for done in (1, 3, 4):
        left, resumed = _sampled(dataset, Reversed), _sampled(dataset, Reversed)
        list(islice(iter(left), done))
        resumed.load_state_dict(left.state_dict())
        assert [_indices(batch) for batch in islice(iter(resumed), 4 - done)] == batches[done:]
    with pytest.raises(ValueError, match="had sampler Reversed, this run's has Curriculum"):
        _sampled(dataset, Curriculum).load_state_dict(loader.state_dict())


def test_a_curriculum_decides_batch_by_batch_and_resumes(dataset: RLHFDataset) -> None:
    loader = _sampled(dataset, Curriculum)
    batches = iter(loader)
    assert [_indices(next(batches)) for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    loader.sampler.update(8)
    state = loader.state_dict()
    assert _indices(next(batches)) == [8, 9, 0]
    resumed = _sampled(dataset, Curriculum)
    resumed.load_state_dict(state)
    assert [_indices(batch) for batch in islice(iter(resumed), 2)] == [[8, 9, 0], [2, 3, 4]]


def test_rows_of_any_data_set_become_prompts(dataset: RLHFDataset) -> None:
    row = dataset[0]
    bare = {key: row[key] for key in ("input_ids", "attention_mask", "data_source", "reward_model")}
    item = PromptItems([bare], dataset.tokenizer, 40)[0]
    assert (item["raw_prompt_ids"], item["prompt_text"]) == (row["raw_prompt_ids"], row["prompt_text"])
    assert (item["response_limit"], item["index"]) == (0, 0) and "input_ids" not in item
    assert item["extra_info"] == {"prompt_end": row["prompt_text"][-64:]}
    for change, problem in (
        ({"input_ids": None, "raw_prompt_ids": []}, r"has 0 tokens; expected 1 to data.max_prompt_length \(40\)"),
        ({"reward_model": {"truth": 1}}, "expected a dict with ground_truth"),
    ):
        with pytest.raises(ValueError, match=problem):
            PromptItems([bare | change], dataset.tokenizer, 40)[0]
    with pytest.raises(ValueError, match="has no data_source and no reward_model"):
        PromptItems([{"raw_prompt_ids": [1]}], dataset.tokenizer, 40)[0]


def test_rows_with_a_chat_alone_become_prompts(dataset: RLHFDataset) -> None:
    """As upstream's data set gives them; what a subclass makes of the chat is the prompt."""
    row = dataset[3]
    chat = {key: row[key] for key in ("data_source", "reward_model", "extra_info", "index")}
    chat |= {"raw_prompt": dataset.dataframe[3]["prompt"], "agent_name": "single_turn_agent"}
    item = PromptItems([chat], dataset.tokenizer, 40)[0]
    assert (item["raw_prompt_ids"], item["prompt_text"]) == (row["raw_prompt_ids"], row["prompt_text"])
    with pytest.raises(ValueError, match="asks for the agent loop 'tool_agent'; there is single_turn_agent; "):
        PromptItems([chat | {"agent_name": "tool_agent"}], dataset.tokenizer, 40)[0]
    with pytest.raises(ValueError, match="has no raw_prompt_ids, input_ids with attention_mask or raw_prompt: "):
        PromptItems([{key: row[key] for key in ("data_source", "reward_model")}], dataset.tokenizer, 40)[0]


def test_a_subclass_may_change_the_chat(files: tuple[str, str]) -> None:
    class Polite(RLHFDataset):
        def __getitem__(self, item: int) -> dict[str, Any]:
            row = super().__getitem__(item)
            if item:
                row["raw_prompt"][-1]["content"] += " Please."
            return row

    tokenizer = hf_tokenizer(files[1])
    items = PromptItems(Polite([files[0]], tokenizer, DataConfig(max_prompt_length=300)), tokenizer, 300)
    for _ in range(2):
        texts = [items[0]["prompt_text"], items[1]["prompt_text"]]
        assert ["Please" in text for text in texts] == [False, True] and texts[1].count("Please") == 1
        assert items[1]["raw_prompt_ids"] == tokenizer(texts[1], add_special_tokens=False)["input_ids"]


def _indices(batch: dict[str, Any]) -> list[int]:
    return list(batch["index"])


def test_an_epoch_has_every_prompt_at_most_once_and_epochs_differ(dataset: RLHFDataset) -> None:
    loader = ResumableLoader(dataset, 3, shuffle=True, seed=1)
    batches = [_indices(batch) for batch in islice(iter(loader), 2 * len(loader))]
    first, second = list(chain(*batches[:3])), list(chain(*batches[3:]))
    assert len(set(first)) == len(set(second)) == 9
    assert first != second
    assert batches == [_indices(batch) for batch in islice(iter(ResumableLoader(dataset, 3, shuffle=True, seed=1)), 6)]
    plain = ResumableLoader(dataset, 3, shuffle=False, seed=1)
    assert _indices(next(iter(plain))) == [0, 1, 2]


@pytest.mark.parametrize("stop_after", [1, 3, 4])
def test_a_resumed_loader_goes_on_as_if_never_stopped(dataset: RLHFDataset, stop_after: int) -> None:
    whole = ResumableLoader(dataset, 3, shuffle=True, seed=5)
    expected = [_indices(batch) for batch in islice(iter(whole), 8)]
    left = ResumableLoader(dataset, 3, shuffle=True, seed=5)
    list(islice(iter(left), stop_after))
    resumed = ResumableLoader(dataset, 3, shuffle=True, seed=5)
    resumed.load_state_dict(left.state_dict())
    assert [_indices(batch) for batch in islice(iter(resumed), 8 - stop_after)] == expected[stop_after:]


def test_prompts_by_number_are_those_of_the_batches(dataset: RLHFDataset) -> None:
    loader = ResumableLoader(dataset, 3, shuffle=True, seed=5)
    batches = chain.from_iterable(_indices(batch) for batch in islice(iter(loader), 7))
    asked = ResumableLoader(dataset, 3, shuffle=True, seed=5)
    assert [asked.prompt(number)["index"] for number in range(21)] == list(batches)
    assert asked.locate(8) == (0, 8) and asked.locate(9) == (1, 0)


def test_a_row_may_have_a_response_limit_of_its_own(dataset: RLHFDataset, files: tuple[str, str]) -> None:
    assert dataset[0]["response_limit"] == 0
    path = Path(files[0]).with_name("limits.parquet")
    for limit in (7, 0, -3):
        row = _row(0, "What is 1 + 1?")
        row["extra_info"]["max_response_length"] = limit
        pq.write_table(pa.Table.from_pylist([row]), path)
        if limit == 7:
            assert (
                RLHFDataset([str(path)], hf_tokenizer(files[1]), DataConfig(max_prompt_length=40))[0]["response_limit"]
                == 7
            )
            continue
        with pytest.raises(ValueError, match=rf"row 0 \({limit}\); give a whole number above 0"):
            RLHFDataset([str(path)], hf_tokenizer(files[1]), DataConfig(max_prompt_length=40))


def test_resuming_with_other_data_is_an_error(dataset: RLHFDataset) -> None:
    state = ResumableLoader(dataset, 3, shuffle=True, seed=5).state_dict()
    with pytest.raises(ValueError, match="seed 5, this run's has 6"):
        ResumableLoader(dataset, 3, shuffle=True, seed=6).load_state_dict(state)
    with pytest.raises(ValueError, match="batch_size 3, this run's has 2"):
        ResumableLoader(dataset, 2, shuffle=True, seed=5).load_state_dict(state)
    with pytest.raises(ValueError, match="only 10 prompts"):
        ResumableLoader(dataset, 11, shuffle=True, seed=5)


def test_text_columns_may_be_large_strings_or_categories(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([_row(0, "q")])
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        changed = table.set_column(0, "data_source", table.column("data_source").cast(kind))
        pq.write_table(changed, tmp_path / "data.parquet")
        assert schema_problems(str(tmp_path / "data.parquet")) == []


def test_schema_problems_name_the_file_the_column_and_what_was_expected(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    table = pa.table({"data_source": [1], "prompt": ["text"], "other": [1]})
    pq.write_table(table, path)
    problems = "\n".join(schema_problems(str(path)))
    assert f"{path}: column 'data_source' is int64; expected a string" in problems
    assert "column 'prompt' is string; expected a list of {role, content}" in problems
    assert "no column 'reward_model'" in problems
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.Table.from_pylist([_row(0, "q")]).slice(0, 0), empty)
    assert schema_problems(str(empty)) == [f"{empty} has no rows"]
    text = tmp_path / "text.parquet"
    text.write_text("not parquet")
    assert "is not a readable parquet file" in schema_problems(str(text))[0]
    assert "does not exist" in schema_problems(str(tmp_path / "absent.parquet"))[0]


CHATS = [
    [{"role": "user", "content": "What is 1 + 1?"}],
    [
        {"role": "system", "content": "Use tools.", "name": "root"},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "get", "arguments": {"city": "Oslo"}}},
                {"type": "function", "function": {"name": "ask", "arguments": {"unit": "C", "days": [1, 2]}}},
            ],
        },
        {"role": "tool", "content": "5", "tool_call_id": "7"},
    ],
]


def test_chat_rows_are_read_as_they_were_written(tmp_path: Path, files: tuple[str, str]) -> None:
    """Arrow gives each message every key of the column; a template must not see the nulls, at any depth."""
    rows = [_row(index, "") | {"prompt": chat} for index, chat in enumerate(CHATS)]
    rows[0]["reward_model"]["ground_truth"], rows[1]["reward_model"]["ground_truth"] = {"a": 1, "b": None}, {"a": 2}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    raw = pq.read_table(tmp_path / "chats.parquet").to_pylist()
    assert raw[0]["prompt"][0]["tool_calls"] is None, "what Arrow adds"
    found = read_rows([str(tmp_path / "chats.parquet")], "prompt")
    assert [row["prompt"] for row in found] == CHATS
    assert found[0]["reward_model"]["ground_truth"] == {"a": 1, "b": None}, "nulls of other columns stay as they are"
    tokenizer = hf_tokenizer(files[1])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function.arguments }}"
        "{% endfor %}{% elif m.content is none %}no content{% else %}{{ m.content }}{% endif %}"
        "{% if m.name is defined %}{{ m.name }}{% endif %}{% endfor %}"
    )
    data = RLHFDataset([str(tmp_path / "chats.parquet")], tokenizer, DataConfig(max_prompt_length=500))
    assert "None" not in data[0]["prompt_text"] + data[1]["prompt_text"]
    assert data[0]["prompt_text"] == "What is 1 + 1?"


def test_parts_of_a_message_have_their_own_keys(tmp_path: Path) -> None:
    parts = [[{"type": "text", "text": "See"}, {"type": "image", "image": "a.png"}], [{"type": "text", "text": "x"}]]
    rows = [_row(i, "") | {"prompt": [{"role": "user", "content": content}]} for i, content in enumerate(parts)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "parts.parquet")
    found = read_rows([str(tmp_path / "parts.parquet")], "prompt")
    assert [row["prompt"][0]["content"] for row in found] == parts


def test_parts_of_text_are_lines_and_what_a_template_refuses_is_named_with_its_row(
    tmp_path: Path, files: tuple[str, str]
) -> None:
    """A template that writes contents as they are would write Python's form of a list."""
    tokenizer, path = hf_tokenizer(files[1]), str(tmp_path / "parts.parquet")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not so') }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )

    def dataset(*contents: list[dict[str, str]]) -> RLHFDataset:
        rows = [_row(i, "") | {"prompt": [{"role": "user", "content": content}]} for i, content in enumerate(contents)]
        pq.write_table(pa.Table.from_pylist(rows), path)
        return RLHFDataset([path], tokenizer, DataConfig(max_prompt_length=500))

    text = {"type": "text", "text": "What is"}
    assert dataset([text, {"type": "text", "text": "1 + 1?"}])[0]["prompt_text"] == "What is\n1 + 1?"
    with pytest.raises(ValueError, match=r"row 1 of .*parts.parquet: .*a part of type 'image'; models take text only"):
        dataset([text], [text, {"type": "image", "image": "a.png"}])
    with pytest.raises(ValueError, match=r"row 1 of .*parts.parquet: the chat template does not take .*: not so"):
        dataset([text], [{"type": "text", "text": "no"}])
