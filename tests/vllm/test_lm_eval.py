"""lm-evaluation-harness gives its `--model hf`'s results on our engine and on our server, sample by sample."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.common.tokenizer import write_tokenizer
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
CHAT_FORMS = ("generate_until",)
SCORED = ("multiple_choice", "loglikelihood_rolling")
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, `model`, and the tasks, `tasks`."""
    clients_python()  # or skip, before anything is made
    folder = tmp_path_factory.mktemp("lm_eval")
    write_checkpoint(folder / "model", vocab_size=400)
    write_tokenizer([*QUESTIONS, "abc"], folder / "model", 400, 640)
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
def expected(folder: Path) -> dict[str, list[Any]]:
    return evaluate(folder, "hf", "pretrained=model,dtype=float32", "--device", "cpu")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    llm = LLM(str(folder / "model"), num_gpu_blocks_override=128)
    with serve_in_background(llm, ServerArgs(port=0, served_model_name="model")) as server:
        yield server.url
    llm.shutdown()


def test_the_engine_equals_transformers(folder: Path, expected: dict[str, list[Any]]) -> None:
    settings = "pretrained=model,dtype=float32,max_model_len=256"
    assert_same(evaluate(folder, "vllm", settings, "--batch_size", "auto"), expected)


@pytest.mark.parametrize("tokenized", [True, False])
def test_completions_equal_transformers(
    folder: Path, expected: dict[str, list[Any]], url: str, tokenized: bool
) -> None:
    settings = f"model=model,base_url={url}/v1/completions,num_concurrent=4,max_length=640"
    settings += f",tokenizer_backend=huggingface,tokenized_requests={tokenized}"
    assert_same(evaluate(folder, "local-completions", settings), expected)


def test_chat_completions_equal_transformers(folder: Path, url: str) -> None:
    """Of the tasks, those that generate: this interface scores no text of the caller's."""
    chat = ("--apply_chat_template",)
    expected = evaluate(folder, "hf", "pretrained=model,dtype=float32", "--device", "cpu", *chat, forms=CHAT_FORMS)
    settings = f"model=model,base_url={url}/v1/chat/completions,num_concurrent=4"
    assert_same(evaluate(folder, "local-chat-completions", settings, *chat, forms=CHAT_FORMS), expected)


def evaluate(
    folder: Path, model: str, settings: str, *options: str, forms: tuple[str, ...] = tuple(FORMS)
) -> dict[str, list[Any]]:
    """Run the command; return each task's answers, by document, that it saved."""
    output = Path(tempfile.mkdtemp(dir=folder))
    chosen = ["--tasks", ",".join(forms), "--include_path", "tasks", "--log_samples", "--output_path", str(output)]
    run_client(["-m", "lm_eval", "--model", model, "--model_args", settings, *chosen, *options], folder)
    answers = {}
    for form in forms:
        [saved] = output.glob(f"*/samples_{form}_*.jsonl")
        samples = [json.loads(line) for line in saved.read_text(encoding="utf-8").splitlines()]
        answers[form] = [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
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
