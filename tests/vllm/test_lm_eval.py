"""lm-evaluation-harness gives its `--model hf`'s results on our engine and on our server, by the page's commands."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.common.tokenizer import write_tokenizer
from tests.pages import ROOT
from tests.vllm.clients import clients_python, run_client
from tests.vllm.tiny import write_checkpoint
from vllm import LLM
from vllm.entrypoints.openai.api_server import serve_in_background
from vllm.entrypoints.openai.cli_args import ServerArgs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

QUESTIONS = [f"What is {i} + {2 * i}?" for i in range(8)]
TASK = """
task: {name}
output_type: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
# A text ends before its first "a", and after 24 tokens at the latest.
FORMS = {
    "multiple_choice": """
doc_to_choice: "{{options}}"
doc_to_target: label
metric_list: [{metric: acc}]
""",
    "generate_until": """
doc_to_target: answer
generation_kwargs: {until: ["a"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "loglikelihood_rolling": """
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
""",
}
TRANSFORMERS = ["--model", "hf", "--model_args", "pretrained=model,dtype=float32", "--device", "cpu"]
SCORED = ("multiple_choice", "loglikelihood_rolling")
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, `model`, and the tasks, `tasks`."""
    clients_python()  # or skip, before anything is made
    folder = tmp_path_factory.mktemp("lm_eval")
    write_checkpoint(folder / "model", vocab_size=400, max_position_embeddings=2048)
    write_tokenizer([*QUESTIONS, "abc"], folder / "model", 400, 2048)
    tasks = folder / "tasks"
    tasks.mkdir()
    data = tasks / "data.jsonl"
    options = [[str(3 * i), str(i + 1), f"not {i}"] for i in range(len(QUESTIONS))]
    rows = [
        {"question": question, "options": options[i], "label": i % 3, "answer": str(3 * i)}
        for i, question in enumerate(QUESTIONS)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, form in FORMS.items():
        (tasks / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + form)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    llm = LLM(str(folder / "model"), num_gpu_blocks_override=256)
    with serve_in_background(llm, ServerArgs(port=0, served_model_name="model")) as server:
        yield server.url
    llm.shutdown()


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[Any]]:
    return evaluate(folder, [*TRANSFORMERS, "--tasks", ",".join(FORMS)])


def test_the_engine_equals_transformers(folder: Path, expected: dict[str, list[Any]]) -> None:
    assert_same(evaluate(folder, page_command("vllm", settings="num_gpu_blocks_override=256")), expected)


@pytest.mark.parametrize("settings", ["tokenizer_backend=huggingface", "tokenized_requests=False"])
def test_completions_equal_transformers(folder: Path, expected: dict[str, list[Any]], url: str, settings: str) -> None:
    assert_same(evaluate(folder, page_command("local-completions", url, settings)), expected)


def test_chat_completions_equal_transformers(folder: Path, url: str) -> None:
    """Of the tasks, the one that generates: this interface scores no text of the caller's."""
    expected = evaluate(folder, [*TRANSFORMERS, "--tasks", "generate_until", "--apply_chat_template"])
    chat = page_command("local-chat-completions", url, "tokenizer_backend=None", tasks=["generate_until"])
    assert_same(evaluate(folder, chat), expected)


def page_command(model: str, url: str = "", settings: str = "", tasks: Iterable[str] = FORMS) -> list[str]:
    """The arguments of the page's command for a model, with further settings of the model."""
    text = (ROOT / "docs" / "evaluating.md").read_text(encoding="utf-8")
    [line] = re.findall(rf"^    lm_eval (--model {model} .*)$", text, flags=re.MULTILINE)
    line = line.replace("=DIR,", "=model,").replace("http://127.0.0.1:8000", url).replace("TASK", ",".join(tasks))
    arguments = line.split()
    arguments[arguments.index("--model_args") + 1] += f",{settings}"
    return arguments


def evaluate(folder: Path, arguments: list[str]) -> dict[str, list[Any]]:
    """Run the command; return each task's answers, by document, that it saved."""
    output = Path(tempfile.mkdtemp(dir=folder))
    run_client(
        ["-m", "lm_eval", *arguments, "--include_path", "tasks", "--log_samples", "--output_path", str(output)], folder
    )
    answers = {}
    for task in arguments[arguments.index("--tasks") + 1].split(","):
        [saved] = output.glob(f"*/samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in saved.read_text(encoding="utf-8").splitlines()]
        answers[task] = [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
    return answers


def assert_same(got: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    assert got.keys() == expected.keys()
    assert got["generate_until"] == expected["generate_until"]
    for form in set(SCORED) & expected.keys():
        scores, expected_scores = flat(got[form]), flat(expected[form])
        assert len(scores) == len(expected_scores) >= len(QUESTIONS)
        for score, wanted in zip(scores, expected_scores, strict=True):
            if wanted in ("True", "False"):  # whether the continuation is the greedy one
                assert score == wanted
            else:
                assert abs(float(score) - float(wanted)) < TOLERANCE


def flat(answers: Any) -> list[str]:
    """The strings in nested lists: log-probs, each with whether it is greedy where a task asks for that."""
    return [answers] if isinstance(answers, str) else [text for one in answers for text in flat(one)]
