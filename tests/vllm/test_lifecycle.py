"""Sleep, wake, new weights, tokenizer, and the errors a user can make."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.vllm.test_parity import as_inputs, make_prompts
from tests.vllm.tiny import TINY, random_weights, write_checkpoint
from vllm import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=10, seed=0, ignore_eos=True)


def build(path: str, **overrides: Any) -> LLM:
    args = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 8} | overrides
    return LLM(path, **args)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(as_inputs(make_prompts(6, 20)), PARAMS)]


def test_sleep_and_wake_cycles_keep_outputs_and_free_memory(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path), enable_prefix_caching=True, block_size=4)
    expected, awake = tokens_of(llm), llm.get_memory_report()
    for level in (1, 2, 1, 2, 2):
        llm.sleep(level)
        asleep = llm.get_memory_report()
        assert asleep["weights_bytes"] == 0 and asleep["kv_cache_bytes"] == 0
        assert asleep["host_weights_bytes"] == (awake["weights_bytes"] if level == 1 else 0)
        with pytest.raises(RuntimeError, match="sleeps"):
            tokens_of(llm)
        llm.wake_up(["weights"])
        if level == 2:
            llm.load_weights(random_weights(TINY).items())
            llm.check_weights_loaded()
        with pytest.raises(RuntimeError, match="kv_cache"):
            tokens_of(llm)
        llm.wake_up(["kv_cache"])
        report = llm.get_memory_report()
        for key in ("weights_bytes", "kv_cache_bytes", "num_gpu_blocks", "host_weights_bytes"):
            assert report[key] == awake[key], key
        assert tokens_of(llm) == expected


def test_an_engine_takes_no_more_threads_than_it_may_use_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    try:
        for given, taken in ((3, 2), (1, 1)):
            torch.set_num_threads(given)
            build(write_checkpoint(tmp_path))
            assert torch.get_num_threads() == taken
    finally:
        torch.set_num_threads(before)


def test_the_block_count_never_changes(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path), device="tests.vllm.capturing_platform:ShrinkingPlatform", block_size=4)
    expected, num_blocks = tokens_of(llm), llm.core.scheduler.kv.pool.num_blocks
    for _ in range(5):
        llm.sleep(1)
        llm.wake_up()
        assert llm.get_memory_report()["num_gpu_blocks"] == num_blocks
        assert all(len(pages) == num_blocks for (pages,) in llm.core.worker.cache.caches)
        assert tokens_of(llm) == expected


def test_new_weights_change_the_outputs_to_those_of_their_checkpoint(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path / "old"), enable_prefix_caching=True, block_size=4)
    old = tokens_of(llm)
    new = tokens_of(build(write_checkpoint(tmp_path / "new", seed=1)))
    loaded: set[str] = set()
    for name, tensor in random_weights(TINY, seed=1).items():  # one by one, as a bucketed sync does
        loaded |= llm.load_weights([(name, tensor)])
    assert loaded == set(random_weights(TINY))
    assert tokens_of(llm) == new != old


def test_missing_unknown_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path))
    llm.sleep(2)
    with pytest.raises(RuntimeError, match="wake_up"):
        llm.load_weights([])
    llm.wake_up()
    weights = random_weights(TINY)
    forgotten = "model.layers.1.mlp.experts.5.up_proj.weight"
    llm.load_weights((name, t) for name, t in weights.items() if name != forgotten)
    with pytest.raises(ValueError, match=forgotten):
        llm.check_weights_loaded()
    with pytest.raises(RuntimeError, match=forgotten):
        tokens_of(llm)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.nonsense"):
        llm.load_weights([("model.layers.0.nonsense", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"\(3, 3\).*\(32, 64\)"):
        llm.load_weights([(forgotten, torch.zeros(3, 3))])
    assert llm.load_weights([("model.layers.3.eh_proj.weight", torch.zeros(1))]) == set()  # multi-token prediction


def test_dummy_weights_generate(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    assert tokens_of(build(path, load_format="dummy")) == tokens_of(build(path, load_format="dummy"))


def test_broken_checkpoints_name_the_file(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    second = tmp_path / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="model-00002-of-00002.*truncated"):
        build(path)
    second.unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002"):
        build(path)


def test_every_config_problem_comes_at_once(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="cannot be built") as error:
        build(
            path,
            tensor_parallel_size=3,
            dtype="fp32",
            max_model_len=10_000,
            block_size=0,
            distributed_executor_backend="ray",
        )
    for part in (
        "world size 1",
        "num_attention_heads=4",
        "dtype='fp32'",
        "max_model_len=10000",
        "block_size=0",
        "'ray'",
    ):
        assert part in str(error.value), part
    with pytest.raises(ValueError, match="num_gpu_blocks_override=2"):
        build(path, num_gpu_blocks_override=2)
    with pytest.raises(ValueError, match="device='tpu'"):
        build(path, device="tpu")
    with pytest.raises(ValueError, match="nowhere:ops"):
        build(path, rollout_ops="nowhere:ops")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["kv_lora_rank"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {}, "hidden_act": "gelu"}))
    with pytest.raises(ValueError, match=r"kv_lora_rank is missing[\s\S]*hidden_act is 'gelu'"):
        build(path)


def test_dp_size_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path)
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    with pytest.raises(ValueError, match="data_parallel_size=2"):
        build(path)
    monkeypatch.setenv("VLLM_DP_SIZE", "two")
    with pytest.raises(ValueError, match="VLLM_DP_SIZE='two'"):
        build(path)


def test_bad_prompts_are_all_named_and_hurt_nobody(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path))
    expected = tokens_of(llm)
    with pytest.raises(ValueError) as error:
        llm.generate(as_inputs([[3], [4] * 64, [], [160]]), PARAMS)
    for part in ("prompt 1 has 64 tokens, the limit is 63", "prompt 2 is empty", "prompt 3 holds token id 160"):
        assert part in str(error.value), part
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("hello", PARAMS)
    with pytest.raises(ValueError, match="2 prompts came with 1"):
        llm.generate(as_inputs([[3], [4]]), [PARAMS])
    assert tokens_of(llm) == expected
    longest = llm.generate(as_inputs([[4] * 63]), SamplingParams(max_tokens=None))[0].outputs[0]
    assert len(longest.token_ids) == 1


def test_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    words = {"<bos>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, TINY["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    llm = build(path, skip_tokenizer_init=False)
    output = llm.generate("w5 w6", PARAMS)[0]
    assert output.prompt == "w5 w6" and output.prompt_token_ids == [5, 6]
    assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids, skip_special_tokens=True)
    assert output.outputs[0].text.startswith("w")


def test_an_unreadable_tokenizer_is_named_before_anything_runs(tmp_path: Path) -> None:
    path, file = write_checkpoint(tmp_path), tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="tokenizer=.* cannot be loaded"):
        build(path, skip_tokenizer_init=False)
    file.write_text('{"version": "1.0", "mod')
    with pytest.raises(ValueError, match=r"tokenizer\.json does not end as JSON does"):
        build(path, skip_tokenizer_init=False)
    file.write_text('{"version": "1.0", "model": }}\n')
    llm = build(path, skip_tokenizer_init=False)  # token ids need no tokenizer, so it is not loaded
    silent = SamplingParams(max_tokens=4, detokenize=False)
    assert len(llm.generate(as_inputs([[3]]), silent)[0].outputs[0].token_ids) > 0
    with pytest.raises(ValueError, match="tokenizer=.* cannot be loaded"):
        llm.generate(as_inputs([[3]]), [SamplingParams(max_tokens=4)])
    assert not llm.engine.has_unfinished_requests()
