"""Spans of a user's rollout code, and a generation that is taken from disk."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from verl.protocol import DataProto
from verl.utils.rollout_skip import RolloutSkip
from verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op


class Loop:
    tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))

    @rollout_trace_op
    async def generate(self, prompt: str, length: int = 2) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"prompt_ids": [1], "response_ids": [7] * length, "prompt": prompt}

    @rollout_trace_op
    def score(self, answer: str) -> float:
        if not answer:
            raise ValueError("no answer")
        return float(len(answer))


@pytest.fixture(autouse=True)
def _nothing_is_traced_afterwards() -> Any:
    RolloutTraceConfig.reset()
    yield
    RolloutTraceConfig.reset()


def test_without_a_backend_calls_are_calls() -> None:
    RolloutTraceConfig.init("project", "run", None)
    with rollout_trace_attr(sample_index=1, step=2, rollout_n=3):
        assert asyncio.run(Loop().generate("hi"))["response_ids"] == [7, 7]
        assert Loop().score(answer="abc") == 3.0
    assert RolloutTraceConfig.get_backend() is None and RolloutTraceConfig.get_client() is None
    assert RolloutTraceConfig.get_instance().project_name == "project"
    RolloutTraceConfig.init("other", "run", "absent")  # there is one already
    RolloutTraceConfig.reset()
    with pytest.raises(ValueError, match="'absent'; expected mlflow, weave or None"):
        RolloutTraceConfig.init("project", "run", "absent")


def test_spans_arrive_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'runs.db'}")
    RolloutTraceConfig.init("project", "run", "mlflow", token2text=True)
    assert RolloutTraceConfig.enable_token2text()
    with rollout_trace_attr(sample_index=1, step=2, rollout_n=3, validate=True):
        asyncio.run(Loop().generate("hi", length=3))
        with pytest.raises(ValueError, match="no answer"):
            Loop().score("")
    mlflow.flush_trace_async_logging(terminate=True)
    [trace] = mlflow.search_traces(return_type="list")
    assert {"sample_index": "1", "step": "2", "rollout_n": "3", "validate": "True"}.items() <= trace.info.tags.items()
    spans = {span.name: span for span in trace.data.spans}
    assert spans["Loop.generate"].inputs == {"prompt": "hi", "length": 3}
    assert spans["Loop.generate"].outputs["response_text"] == "7 7 7"
    assert spans["Loop.score"].status.status_code.value == "ERROR"


def test_the_first_generation_is_the_generation_of_later_runs(tmp_path: Path) -> None:
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"n": 2, "skip_dump_dir": str(tmp_path)}},
            "data": {"train_batch_size": 4, "max_prompt_length": 8, "max_response_length": 16},
            "trainer": {"project_name": "project", "experiment_name": "run"},
        }
    )
    calls = []

    def generate(batch: DataProto) -> DataProto:
        calls.append(batch)
        return DataProto.from_dict({"responses": torch.arange(4)}, meta_info={"timing": 1.0})

    for _ in range(2):
        workers = SimpleNamespace(generate_sequences=generate)
        skip = RolloutSkip(config, workers)
        skip.wrap_generate_sequences()
        for _ in range(2):
            found = workers.generate_sequences(DataProto.from_dict({"prompts": torch.zeros(4)}))
            assert found.batch["responses"].tolist() == [0, 1, 2, 3] and found.meta_info["timing"] == 1.0
    assert len(calls) == 1
    assert skip.curr_path_dump == tmp_path / "run_project" / "GBS4__N2_in8_out16"
    next(skip.curr_path_dump.iterdir()).write_bytes(b"")
    assert skip.try_load() is None


class WeaveClient:
    """The client of Weave, which needs an account: it keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def create_call(self, op: str, inputs: dict[str, Any], attributes: dict[str, str]) -> dict[str, Any]:
        self.calls.append({"op": op, "inputs": inputs, "attributes": attributes})
        return self.calls[-1]

    def finish_call(self, call: dict[str, Any], output: Any = None, exception: Exception | None = None) -> None:
        call |= {"output": output, "exception": exception}


def test_calls_arrive_in_weave(monkeypatch: pytest.MonkeyPatch) -> None:
    client = WeaveClient()
    monkeypatch.setitem(sys.modules, "weave", SimpleNamespace(init=lambda project: client))
    RolloutTraceConfig.init("project", "run", "weave", token2text=True)
    assert RolloutTraceConfig.get_client() is client
    with rollout_trace_attr(sample_index=1, step=2, rollout_n=3):
        asyncio.run(Loop().generate("hi"))
    with pytest.raises(ValueError, match="no answer"):
        Loop().score("")
    generated, scored = client.calls
    assert generated["op"] == "Loop.generate" and generated["inputs"] == {"prompt": "hi", "length": 2}
    assert generated["output"]["response_text"] == "7 7" and generated["exception"] is None
    tags = {"sample_index": "1", "step": "2", "rollout_n": "3", "validate": "False", "experiment_name": "run"}
    assert generated["attributes"] == tags and scored["attributes"] == {}
    assert isinstance(scored["exception"], ValueError) and scored["output"] is None
