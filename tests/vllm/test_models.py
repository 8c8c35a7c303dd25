"""Every model family against transformers' model of the same checkpoint, fp32, and over two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mindspeed_llm.tiny import tiny_qwen3_config, tiny_v2_lite_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.tiny_models import CONFIGS, write_model
from tests.vllm.test_parity import as_inputs, assert_same, check_greedy, make_prompts
from tests.vllm.tiny import hf_logits, hf_model, write_checkpoint
from vllm import LLM, SamplingParams

VOCABULARY = 128
EXPERTS = {"enable_expert_parallel": True}


def prompts(count: int, longest: int) -> list[Any]:
    return as_inputs([[token % VOCABULARY for token in prompt] for prompt in make_prompts(count, longest, seed=9)])


def build(path: str, **arguments: Any) -> LLM:
    defaults = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    return LLM(path, skip_tokenizer_init=True, **(defaults | arguments))


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    path, their_path = write_model(tmp_path, name, seed=3)
    llm, reference = build(str(path)), hf_model(str(their_path))
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, logprobs=VOCABULARY)
    outputs = llm.generate(prompts(6, 80), params)
    sequences = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
    worst = 0.0
    for output, logits in zip(outputs, hf_logits(reference, sequences), strict=True):
        expected = logits.log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
        top_logprobs = output.outputs[0].top_logprobs
        assert top_logprobs is not None and len(top_logprobs) == 12
        for entry, row in zip(top_logprobs, expected, strict=True):
            got = torch.tensor([value.logprob for value in entry.values()])
            worst = max(worst, float((got - row[list(entry)]).abs().max()))
    assert worst < 2e-5, worst
    greedy = llm.generate(prompts(8, 40), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert check_greedy(reference, greedy) <= 1


@pytest.mark.parametrize("name", ["deepseek-v2", "qwen3"])
def test_chunks_preemption_and_prefixes_change_nothing(name: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, CONFIGS[name], seed=3)
    params = SamplingParams(n=2, max_tokens=30, ignore_eos=True, seed=5)
    roomy, tight = {"max_num_batched_tokens": 512}, {"block_size": 4, "num_gpu_blocks_override": 34}
    expected = build(str(tmp_path), **roomy).generate(prompts(5, 50), params)
    for arguments in (tight, tight | {"enable_prefix_caching": True}, {"max_num_batched_tokens": 4}):
        llm = build(str(tmp_path), **arguments)
        assert_same(llm.generate(prompts(5, 50), params), expected)
        if arguments == tight:
            assert llm.core.scheduler.num_preemptions > 0


def generate_everywhere(
    cases: list[tuple[str, list[dict[str, Any]]]],
) -> list[list[list[tuple[list[int], list[float]]]]]:
    """(tokens, log-probs) of each prompt: for each checkpoint, for each of its layouts."""
    results = []
    for path, layouts in cases:
        of_layouts = []
        for layout in layouts:
            llm = build(path, **layout)
            share = slice(llm.config.parallel.replica, None, llm.config.parallel.data_parallel_size)
            outputs = llm.generate(prompts(4, 30)[share], SamplingParams(max_tokens=8, ignore_eos=True, seed=2))
            llm.shutdown()
            of_layouts.append([(o.outputs[0].token_ids, o.outputs[0].sampled_logprobs) for o in outputs])
        results.append(of_layouts)
    return results


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """Qwen3 with one head of keys and values has it on both ranks."""
    tp, dp = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
    models = {
        "v2": (CONFIGS["deepseek-v2"], [tp, tp | EXPERTS, dp | EXPERTS]),
        "qwen3": (CONFIGS["qwen3 tied"], [tp, dp]),
        "qwen3_one": (tiny_qwen3_config(num_key_value_heads=1), [tp]),
    }
    cases = []
    for name, (config, layouts) in models.items():
        write_tiny_checkpoint(tmp_path / name, config, seed=3)
        cases.append((str(tmp_path / name), layouts))
    expected = generate_everywhere([(path, [{}]) for path, _ in cases])
    for rank, results in enumerate(run_ranks(generate_everywhere, 2, cases, timeout_s=120)):
        for (path, layouts), of_layouts, (alone,) in zip(cases, results, expected, strict=True):
            for layout, found in zip(layouts, of_layouts, strict=True):
                share = slice(rank, None, 2) if "data_parallel_size" in layout else slice(None)
                for (tokens, logprobs), (own_tokens, own_logprobs) in zip(found, alone[share], strict=True):
                    assert tokens == own_tokens, (path, layout)
                    assert logprobs == pytest.approx(own_logprobs, abs=1e-5)


def test_what_a_model_cannot_do_is_named(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, CONFIGS["qwen3"])
    with pytest.raises(ValueError, match=r"kv_cache_layout='nz'[\s\S]*enable_expert_parallel=True: Qwen3"):
        build(str(tmp_path), kv_cache_layout="nz", enable_expert_parallel=True)
    with pytest.raises(ValueError, match=r"shared_expert=True: Qwen3[\s\S]*mla=True: Qwen3\w+ has no latent"):
        build(str(tmp_path), multistream_overlap_shared_expert=True, enable_multistream_mla=True)
    with pytest.raises(ValueError, match="enable_multistream_mla=True: the op table for cpu has no second stream"):
        build(write_checkpoint(tmp_path / "deepseek"), device="cpu", enable_multistream_mla=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, problem in (
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads 3"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling.original_max_position_embeddings is missing"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "architecture 'Qwen2ForCausalLM' is not supported"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=problem):
            build(str(tmp_path))
    write_tiny_checkpoint(tmp_path, tiny_v2_lite_config(scoring_func="sigmoid"))
    with pytest.raises(ValueError, match="scoring_func='sigmoid' with topk_method='greedy'"):
        build(str(tmp_path))
