"""Problems by degree with worked examples, the curriculum over them, and what a small model's run starts with."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from hf_formats.config import load_hf_config
from recipes.common.recipe import load_recipe
from recipes.common.tiny_models import QWEN3
from recipes.common.tokenizer import CHATML, DEEPSEEK, ChatForm, write_tokenizer
from recipes.gsm8k.curriculum import DegreeCurriculum
from recipes.gsm8k.gsm8k import INSTRUCTION, main
from recipes.gsm8k.reward import compute_score
from recipes.gsm8k.word_problems import problem_sides, write_set
from tools.launch.job import Job, resolve_config
from tools.launch.settings import Settings, SettingsError, read_settings, variables
from tools.launch.small_model import with_small_model
from tools.launch.stages import stages
from tools.plan.model_work import model_work
from verl.utils.dataset.creation import sampler_class
from verl.utils.dataset.loader import ResumableLoader
from verl.utils.parquet import schema_problems
from verl.utils.tokenizer import hf_tokenizer

MODEL = str(QWEN3.directory)  # a config that says how large it is


def made(folder: Path, *options: object) -> list[dict[str, Any]]:
    """The training rows that the data script writes with these options."""
    assert main(argv=["--output_dir", str(folder), *map(str, options)]) == 0
    rows: list[dict[str, Any]] = pq.read_table(folder / "train.parquet").to_pylist()
    return rows


def evaluated(folder: Path, degree: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / "eval" / f"degree_{degree}.parquet").to_pylist()
    return rows


def questions(rows: list[dict[str, Any]]) -> set[str]:
    return {row["extra_info"]["question"] for row in rows}


def questions_of(rows: list[dict[str, Any]]) -> set[str]:
    return {row["question"] for row in rows}


def gsm8k(folder: Path, num_rows: int = 4) -> Path:
    """A folder in GSM8K's form, with one test problem in its training side."""
    folder.mkdir()
    rows = [{"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(num_rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text(json.dumps(rows[0]) + "\n")
    return folder


@pytest.mark.parametrize("seed", [42, 1])
def test_the_first_degree_is_the_word_problems(tmp_path: Path, seed: int) -> None:
    write_set(tmp_path, 3000, seed)
    train, test = (
        [json.loads(line) for line in (tmp_path / f"{side}.jsonl").read_text().splitlines()]
        for side in ("train", "test")
    )
    sides = problem_sides(1, seed)
    assert sides["test"] == test
    asked = questions_of(test)
    assert questions_of(sides["train"]) == questions_of(train) - asked
    assert len(sides["train"]) == len(questions_of(sides["train"])), "none twice"


def test_every_degree_is_solved_by_its_worked_answers(tmp_path: Path) -> None:
    made(tmp_path, "--degrees", "1,2,3")
    numbers = {1: range(10), 2: range(28), 3: range(2000)}
    for degree in (1, 2, 3):
        rows = evaluated(tmp_path, degree)
        assert len(rows) == 300 and {row["data_source"] for row in rows} == {f"gsm8k/degree_{degree}"}
        assert schema_problems(str(tmp_path / "eval" / f"degree_{degree}.parquet")) == []
        for row in rows:
            *steps, last = row["extra_info"]["answer"].splitlines()
            assert len(steps) == (2 if degree == 2 else 1)
            assert all(eval_step(step) >= 0 for step in steps)
            assert last == f"#### {eval_step(steps[-1])}"
            assert compute_score("", row["extra_info"]["answer"], row["reward_model"]["ground_truth"])["score"] == 1
            assert int(steps[0].split()[0]) in numbers[degree]
    assert any(int(row["reward_model"]["ground_truth"]) > 99 for row in evaluated(tmp_path, 3))


def eval_step(step: str) -> int:
    """The result of ``a + b = c``, which must be right."""
    first, sign, second, equals, result = step.split()
    assert equals == "=" and int(first) + (1 if sign == "+" else -1) * int(second) == int(result)
    return int(result)


@pytest.mark.parametrize("seed", [42, 0, 7])
def test_no_problem_of_a_test_set_is_in_the_training_set(tmp_path: Path, seed: int) -> None:
    arguments = ["--degrees", "1,2,3,4", "--input_dir", gsm8k(tmp_path / "given"), "--num_shots", 2, "--seed", seed]
    rows = made(tmp_path / "out", *arguments)
    tested = set[str]()
    for degree in (1, 2, 3, 4):
        found = evaluated(tmp_path / "out", degree)
        tested |= questions(found)
        shown = {message["content"].removesuffix(INSTRUCTION) for row in found for message in row["prompt"][:-1]}
        assert not shown & questions(found), "an example is a test problem"
    assert tested and not tested & questions(rows)
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    assert [int(degree) for degree, _ in itertools.groupby(row["extra_info"]["degree"] for row in rows)] == [1, 2, 3, 4]


def test_examples_are_turns_before_the_question_and_not_trained_on(tmp_path: Path) -> None:
    rows = made(tmp_path, "--degrees", "1", "--num_shots", 2)
    plain = {row["question"]: row["answer"] for row in problem_sides(1, 42)["train"]}
    *turns, last = rows[0]["prompt"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2 and last["role"] == "user"
    for asked, answered in zip(turns[::2], turns[1::2], strict=True):
        question = asked["content"].removesuffix(INSTRUCTION)
        assert question != asked["content"] and plain.pop(question) == answered["content"]
    assert questions(rows) == set(plain), "every other training problem is asked"
    assert {json.dumps(row["prompt"][:-1]) for row in rows} == {json.dumps(turns)}
    again = made(tmp_path / "again", "--degrees", "1", "--num_shots", 2)
    other = made(tmp_path / "other", "--degrees", "1", "--num_shots", 2, "--seed", 43)
    assert again == rows and other[0]["prompt"][0] != rows[0]["prompt"][0]
    assert questions(pq.read_table(tmp_path / "test.parquet").to_pylist()) == {
        row["question"] for row in problem_sides(1, 42)["test"]
    }


def test_too_many_examples_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--degrees", "4", "--input_dir", str(gsm8k(tmp_path / "given")), "--output_dir", str(tmp_path / "out")]
    assert main(argv=[*arguments, "--num_shots", "3"]) == 2
    assert "--num_shots 3 (NUM_SHOTS): degree 4 has 3 training problems" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert main(argv=[*arguments, "--num_shots", "2"]) == 0


def test_examples_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokenizer([row["question"] for row in problem_sides(2, 42)["test"]], tmp_path / "tokenizer", 400, 512)

    def convert(num_shots: int, longest: int) -> int:
        fit = ["--tokenizer", str(tmp_path / "tokenizer"), "--max_prompt_length", str(longest)]
        return main(argv=["--degrees", "2", "--num_shots", str(num_shots), "--output_dir", str(tmp_path), *fit])

    assert convert(1, 100_000) == 0
    assert convert(3, 40) == 2
    assert (
        "--num_shots 3 (NUM_SHOTS): 0 of 2697 training prompts have at most 40 tokens, the longest has"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("form", [CHATML, DEEPSEEK], ids=["qwen", "deepseek"])
def test_the_tiny_models_read_examples_as_their_template_writes_them(tmp_path: Path, form: ChatForm) -> None:
    prompt = made(tmp_path, "--degrees", "1", "--num_shots", 2)[0]["prompt"]
    write_tokenizer([message["content"] for message in prompt], tmp_path / "tokenizer", 320, 512, form=form)
    tokenizer = hf_tokenizer(str(tmp_path / "tokenizer"))
    assert form.text(prompt) == tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


def settings_of(given: Mapping[str, str], *overrides: str) -> tuple[Settings, str | None]:
    return with_small_model(read_settings(load_recipe("gsm8k"), list(overrides), given), given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"NUM_SHOTS": "-1"}, "NUM_SHOTS='-1': expected a whole number of at least 0"),
        ({"NUM_SHOTS": "1.5"}, "NUM_SHOTS='1.5': expected a whole number of at least 0"),
        ({"DEGREES": "1,5"}, "DEGREES='1,5': expected some of 1,2,3,4"),
        ({"DEGREES": "1,4"}, "DEGREES has 4, GSM8K itself: set INPUT_DIR, or MODEL_PATH"),
    ],
)
def test_values_that_cannot_be_are_refused_before_anything_starts(given: dict[str, str], expected: str) -> None:
    with pytest.raises(SettingsError, match=expected) as caught:
        settings_of(given)
    assert caught.value.settings.own == {}


def test_a_small_model_starts_with_an_example_and_the_first_degrees(tmp_path: Path) -> None:
    """Without INPUT_DIR no hub is needed: the only data stage makes everything itself."""
    given = {"MODEL_PATH": MODEL, "OUTPUT_DIR": str(tmp_path)}
    settings, line = settings_of(given)
    assert line is not None and "CONFIG_NAME=gsm8k_small DEGREES=1,2 NUM_SHOTS=1" in line and settings.chooses_layout
    job = Job(settings, resolve_config(settings))
    data, sampler = job.config.data, job.config.data.sampler
    assert (sampler.class_path, sampler.class_name) == ("pkg://recipes.gsm8k.curriculum", "DegreeCurriculum")
    assert data.val_files == {f"degree_{i}": str(tmp_path / f"data/eval/degree_{i}.parquet") for i in (1, 2)}
    first, second = stages(job)[:2]
    assert (first.name, second.name) == ("data", "base_model")
    shown = first.shown()
    assert f"--degrees 1,2 --num_shots 1 --seed 42 --tokenizer {MODEL} --max_prompt_length 256" in shown
    assert "--input_dir" not in shown
    assert main(argv=[*first.command[3:]][: first.command[3:].index("--tokenizer")]) == 0, "it is the script's command"


def test_with_an_input_the_degrees_come_first(tmp_path: Path) -> None:
    given = {"MODEL_PATH": MODEL, "OUTPUT_DIR": str(tmp_path), "INPUT_DIR": str(tmp_path)}
    settings, line = settings_of(given)
    assert line is not None and "CONFIG_NAME=gsm8k_cpu DEGREES=1,2,3,4 NUM_SHOTS=1" in line
    (first, *_) = stages(Job(settings, resolve_config(settings)))
    assert f"--input_dir {tmp_path} " in first.shown() and "--degrees 1,2,3,4" in first.shown()


def test_what_the_user_sets_goes_before(tmp_path: Path) -> None:
    given = {"MODEL_PATH": MODEL, "OUTPUT_DIR": str(tmp_path)}
    settings, line = settings_of(given | {"DEGREES": "4", "NUM_SHOTS": "0"})
    assert settings.config_name == "gsm8k_cpu" and line is not None and "DEGREES" not in line
    job = Job(settings, resolve_config(settings))
    assert stages(job)[0].name == "fetch" and job.config.data.sampler.class_path is None
    assert job.config.data.val_files == str(tmp_path / "data/test.parquet")
    for changed in ({"CONFIG_NAME": "gsm8k_cpu"}, {"CONFIG_NAME": "my.yaml"}):
        assert settings_of(given | changed)[0].own == {}
    assert settings_of(given, "data.train_files=a.parquet")[0].own == {}
    plain = read_settings(load_recipe("gsm8k"), [], given, "cuda")
    assert with_small_model(plain, given) == (plain, None)


def test_nothing_changes_for_the_tiny_model_and_for_a_large_one(tmp_path: Path) -> None:
    tiny, line = settings_of({"OUTPUT_DIR": str(tmp_path)})
    assert (tiny.config_name, tiny.own, line) == ("gsm8k_tiny", {}, None)
    names = [stage.name for stage in stages(Job(tiny, resolve_config(tiny)))]
    assert names[:3] == ["problems", "data", "base_model"]
    config = {**QWEN3.config, "hidden_size": 8192, "intermediate_size": 65536}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    assert model_work(load_hf_config(model)).parameters > 1e9
    large, line = settings_of({"OUTPUT_DIR": str(tmp_path), "MODEL_PATH": str(model)})
    assert (large.config_name, large.own, line) == ("gsm8k_cpu", {}, None)


def test_examples_alone_leave_the_rest_as_it_is(tmp_path: Path) -> None:
    settings, _ = settings_of({"OUTPUT_DIR": str(tmp_path), "NUM_SHOTS": "2"})
    job = Job(settings, resolve_config(settings))
    assert "--degrees 1 --num_shots 2" in stages(job)[0].shown() and job.config.data.sampler.class_path is None
    assert job.config.data.val_files == str(tmp_path / "data/test.parquet")
    assert {"NUM_SHOTS", "DEGREES"} < set(variables(load_recipe("gsm8k")))
    assert not {"NUM_SHOTS", "DEGREES"} & set(variables(load_recipe("r1_zero")))


class Rows:
    """A data set with rows of each of these degrees."""

    def __init__(self, *degrees: int) -> None:
        self.degrees = degrees

    def __len__(self) -> int:
        return len(self.degrees)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": torch.tensor(index), "extra_info": {"degree": str(self.degrees[index])}}


ROWS = Rows(*[1] * 5, *[2] * 4, *[4] * 3)


def curriculum(**kwargs: Any) -> DegreeCurriculum:
    return DegreeCurriculum(ROWS, SimpleNamespace(seed=3), **kwargs)


def loader(**kwargs: Any) -> ResumableLoader:
    return ResumableLoader(ROWS, 2, shuffle=True, seed=3, sampler=curriculum(**kwargs))


def run(of: ResumableLoader, scores: list[float]) -> list[list[int]]:
    """The rows of each step, with these scores."""
    batches, found = iter(of), []
    for score in scores:
        found.append(next(batches)["index"].tolist())
        batch = SimpleNamespace(batch={"token_level_scores": torch.tensor([[0.0, score], [score, 0.0]])}, meta_info={})
        of.sampler.update(batch)
    return found


def degrees(steps: list[list[int]]) -> list[set[int]]:
    return [{ROWS.degrees[index] for index in step} for step in steps]


def test_it_moves_on_when_the_last_steps_are_good_and_never_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scores = [1.0, 0.2, 0.9, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 0.0, 0.0]
    found = degrees(run(loader(threshold=0.8, num_steps=2), scores))
    assert found == [{1}] * 4 + [{2}] * 4 + [{4}] * 3
    assert [record.message for record in caplog.records] == [
        "curriculum: the mean score of 2 steps is 0.900, above 0.8: from degree 1 to 2",
        "curriculum: the mean score of 2 steps is 0.900, above 0.8: from degree 2 to 4",
    ]
    assert degrees(run(loader(), [0.95] * 9)) == [{1}] * 9, "not above the default"
    assert degrees(run(loader(), [1.0] * 9)) == [{1}] * 5 + [{2}] * 4


def test_the_metric_is_the_degree_that_the_step_trained() -> None:
    sampler = curriculum(threshold=0.5, num_steps=1)
    batch: Any = SimpleNamespace(batch={"token_level_scores": torch.ones(2, 3) / 3}, meta_info={})
    assert [sampler.update(batch)["curriculum/degree"] for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]


def test_groups_that_a_filter_left_out_count() -> None:
    sampler = curriculum(threshold=0.8, num_steps=1)
    meta = {"train/reward_before_filter": 0.9}
    batch: Any = SimpleNamespace(batch={"token_level_scores": torch.ones(2, 2) / 4}, meta_info=meta)
    assert [sampler.update(batch)["curriculum/degree"] for _ in range(2)] == [1.0, 2.0]


def test_every_problem_of_a_degree_comes_before_one_comes_again() -> None:
    sampler = curriculum()
    drawn = list(itertools.islice(iter(sampler), 15))
    assert all(sorted(drawn[i : i + 5]) == [0, 1, 2, 3, 4] for i in (0, 5, 10))
    assert drawn[:5] != drawn[5:10] and drawn == list(itertools.islice(iter(curriculum()), 15))


@pytest.mark.parametrize("done", range(12))
def test_a_resumed_run_equals_one_that_never_stopped(done: int) -> None:
    scores = [0.9, 0.9, 0.9, 0.0, 0.9, 0.9, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9]
    kwargs = {"threshold": 0.8, "num_steps": 2}
    whole = run(loader(**kwargs), scores)
    assert degrees(whole)[-1] == {4}
    first, second = loader(**kwargs), loader(**kwargs)
    assert run(first, scores[:done]) == whole[:done]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert run(second, scores[done:]) == whole[done:]


@pytest.mark.parametrize("kwargs", [{"threshold": 2}, {"num_steps": 0}, {"num_steps": 1.5}])
def test_settings_that_cannot_be_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected a score from 0 to 1 and a whole number of at least 1"):
        curriculum(**kwargs)


def test_rows_without_a_degree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"row 0 has no extra_info.degree"):
        DegreeCurriculum([{"extra_info": {}}], SimpleNamespace(seed=3))


def test_the_small_config_is_one_update_of_64_samples(tmp_path: Path) -> None:
    settings, _ = settings_of({"MODEL_PATH": MODEL, "OUTPUT_DIR": str(tmp_path)})
    config = resolve_config(replace(settings, overrides=("data.sampler.kwargs.threshold=0.5",)))
    assert config.data.sampler.kwargs == {"threshold": 0.5} and sampler_class(config.data) is DegreeCurriculum
    misspelt = replace(config.data, sampler=replace(config.data.sampler, kwargs={"treshold": 0.5}))
    with pytest.raises(ValueError, match="unexpected keyword argument 'treshold'"):
        sampler_class(misspelt)
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 64
    assert config.trainer.export_hf and config.trainer.tests_first
