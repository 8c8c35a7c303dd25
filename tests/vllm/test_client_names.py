"""What clients of vLLM import, pass and call: every name, arguments without meaning here, conversations, the bar."""

from __future__ import annotations

import importlib
import importlib.metadata
import ipaddress
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm
from recipes.common.tokenizer import write_tokenizer
from tests.pages import ROOT
from tests.vllm.tiny import hf_logits, hf_model, write_checkpoint
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs, without_none
from vllm.engine.client_args import CLIENT_ARGS, take_client_args
from vllm.entrypoints.chat_utils import resolve_hf_chat_template
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.utils.network_utils import get_ip, get_open_port

IMPORTED = {  # by lm-evaluation-harness, TRL and trainers beside an engine
    "vllm": ("LLM", "SamplingParams", "TokensPrompt", "TextPrompt", "RequestOutput", "EngineArgs"),
    "vllm.config": ("WeightTransferConfig",),
    "vllm.distributed.weight_transfer.base": ("WeightTransferInitRequest", "WeightTransferUpdateRequest"),
    "vllm.distributed.weight_transfer.ipc_engine": (
        "IPCTrainerSendWeightsArgs", "IPCWeightTransferEngine", "IPCWeightTransferUpdateInfo",
    ),
    "vllm.distributed.weight_transfer.nccl_engine": ("NCCLTrainerSendWeightsArgs", "NCCLWeightTransferEngine"),
    "vllm.engine.arg_utils": ("EngineArgs",),
    "vllm.entrypoints.chat_utils": ("resolve_hf_chat_template",),
    "vllm.lora.request": ("LoRARequest",),
    "vllm.outputs": ("RequestOutput", "CompletionOutput"),
    "vllm.sampling_params": ("GuidedDecodingParams", "StructuredOutputsParams"),
    "vllm.transformers_utils.tokenizer": ("get_tokenizer",),
    "vllm.utils.network_utils": ("get_ip", "get_open_port"),
}  # fmt: skip
CHAT = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, vocab_size=400)
    write_tokenizer([f"What is {i} + {i}?" for i in range(50)], path, 400, 64)
    engine = LLM(str(path), max_model_len=128, num_gpu_blocks_override=64)
    yield engine
    engine.shutdown()


def test_every_name_is_there() -> None:
    for module, names in IMPORTED.items():
        for name in names:
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_clients_can_ask_for_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "third_party" / "clients"), *sys.path])
    assert importlib.metadata.version("vllm") == vllm.__version__


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        ("vllm.lora.request", "LoRARequest", {"lora_name": "a", "lora_int_id": 1, "lora_path": "/a"}),
        ("vllm.sampling_params", "StructuredOutputsParams", {"regex": "a*"}),
        ("vllm.sampling_params", "GuidedDecodingParams", {"json": "{}"}),
        ("vllm.sampling_params", "SamplingParams", {"guided_decoding": {"json": "{}"}}),
        ("vllm.distributed.weight_transfer.nccl_engine", "NCCLTrainerSendWeightsArgs", {"packed": True}),
        ("vllm.distributed.weight_transfer.nccl_engine", "NCCLWeightTransferEngine", {}),
    ],
)
def test_features_that_are_not_there_are_named_when_they_are_used(
    module: str, name: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="not supported"):
        getattr(importlib.import_module(module), name)(**arguments)


def test_arguments_are_acted_on_or_reported_or_refused() -> None:
    assert not CLIENT_ARGS.keys() & EngineArgs.__dataclass_fields__.keys()
    for name, known in CLIENT_ARGS.items():
        assert take_client_args({name: known.default}) == ({}, [], []), name
        assert take_client_args({name: None}) == ({}, [], []), name
        if known.accepted is None:
            assert take_client_args({name: "other"})[1] == [f"{name}='other': {known.reason}"]
        else:
            assert take_client_args({name: "other"})[2] == [f"{name}='other': {known.reason}"]
    given = {"trust_remote_code": True, "max_num_seqs": None, "max_model_len": None, "seed": 3}
    kept, notes, _ = take_client_args(given)
    assert without_none(kept) == {"max_model_len": None, "seed": 3}, "None leaves a default, unless None is a value"
    assert notes == ["trust_remote_code=True: code of model directories is never executed"]


def test_sampling_takes_vllms_other_names_where_they_ask_for_nothing() -> None:
    nothing = dict.fromkeys(("structured_outputs", "guided_decoding", "logits_processors", "truncate_prompt_tokens"))
    assert SamplingParams(n=2, best_of=2, extra_args={}, flat_logprobs=False, **nothing).n == 2
    with pytest.raises(ValueError, match=r"best_of=4: ask for n and choose; temperature=-1"):
        SamplingParams(best_of=4, temperature=-1)
    assert "best_of" not in repr(SamplingParams())


def test_refused_arguments_come_in_one_message_and_others_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"enable_lora=True: LoRA[\s\S]*pipeline_parallel_size=2: generation"):
        LLM("/nowhere", enable_lora=True, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="no argument max_num_seq, did you mean max_num_seqs"):
        LLM("/nowhere", max_num_seq=2)
    with caplog.at_level(logging.INFO):
        LLM(write_checkpoint(tmp_path), skip_tokenizer_init=True, swap_space=8, num_gpu_blocks_override=40).shutdown()
    assert "taken without effect:\n  swap_space=8: a preempted sequence is computed again" in caplog.text


def test_a_conversation_is_the_prompt_that_the_template_makes(llm: LLM) -> None:
    tokenizer, params = llm.get_tokenizer(), SamplingParams(temperature=0, max_tokens=5)
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    [expected] = llm.generate([{"prompt_token_ids": ids}], params)
    [single] = llm.chat(CHAT, params)
    assert single.prompt_token_ids == ids and single.outputs[0].token_ids == expected.outputs[0].token_ids
    answers = llm.chat([CHAT, CHAT], [params, params])
    assert [answer.outputs[0].token_ids for answer in answers] == [expected.outputs[0].token_ids] * 2
    [other] = llm.chat(CHAT, params, chat_template="{{ messages[0].content }}")
    assert other.prompt_token_ids == tokenizer.encode(CHAT[0]["content"], add_special_tokens=False)
    with pytest.raises(ValueError, match="does not take these messages"):
        llm.chat(CHAT, params, chat_template="{{ raise_exception('no') }}")
    template = "{% for tool in tools %}{{ tool.name }}{% endfor %}{{ messages[0].content }}"
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    [shown] = llm.chat([{"role": "user", "content": parts}], params, False, None, template, tools=[{"name": "a"}])
    assert shown.prompt_token_ids == tokenizer.encode("ab\nc", add_special_tokens=False)
    with pytest.raises(ValueError, match="a part of type 'image_url'; models take text only"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}], params)
    assert resolve_hf_chat_template(tokenizer, None, tools=None, model_config=None) == tokenizer.chat_template


def test_a_tokenizer_takes_transformers_options(llm: LLM) -> None:
    path = llm.config.model.tokenizer
    tokenizer = get_tokenizer(path, tokenizer_mode="auto", trust_remote_code=True, revision=None, padding_side="left")
    assert tokenizer.padding_side == "left" != llm.get_tokenizer().padding_side
    with pytest.raises(ValueError, match="revision='main'"):
        get_tokenizer(path, revision="main")


def test_a_bar_counts_finished_prompts(llm: LLM) -> None:
    bars: list[Bar] = []

    class Bar:
        def __init__(self, total: int, **style: Any) -> None:
            self.total, self.count, self.is_closed = total, 0, False
            bars.append(self)

        def update(self, count: int) -> None:
            self.count += count

        def close(self) -> None:
            self.is_closed = True

    seen: list[str] = []
    llm.generate(
        ["What", "is", "1"], SamplingParams(max_tokens=2), Bar, on_output=lambda out: seen.append(out.request_id)
    )
    assert [(bar.total, bar.count, bar.is_closed) for bar in bars] == [(3, 3, True)] and len(seen) == 3
    with pytest.raises(ValueError, match="LoRA adapters are not supported"):
        llm.generate(["What"], lora_request=object())  # type: ignore[arg-type]


def test_a_trainer_loads_its_models_parameters_one_by_one(tmp_path: Path) -> None:
    """The path that TRL takes; transformers' model holds the experts of a layer in one tensor, and biases elsewhere."""
    first, other = (write_checkpoint(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    engine = LLM(first, skip_tokenizer_init=True, max_model_len=64, num_gpu_blocks_override=40)
    model, prompt = hf_model(other), list(range(2, 22))
    loaded: set[str] = set()
    in_engine = engine.llm_engine.model_executor.driver_worker.model_runner.model
    for name, weight in model.named_parameters():
        loaded |= in_engine.load_weights([(name, weight.data)])
    biases = {name: value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")}
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in loaded and not loaded & biases.keys()
    engine.load_weights(biases.items())
    engine.reset_prefix_cache()
    [output] = engine.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=8, logprobs=0))
    tokens = output.outputs[0].token_ids
    [logits] = hf_logits(model, [prompt + tokens])
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    assert expected.argmax(-1).tolist() == tokens
    for values, row, token in zip(output.outputs[0].logprobs or [], expected, tokens, strict=True):
        assert abs(values[token].logprob - float(row[token])) < 2e-5
    engine.shutdown()


def test_addresses_that_clients_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ipaddress.ip_address(get_ip())
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.2.3")
    assert get_ip() == "10.1.2.3"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", get_open_port()))
