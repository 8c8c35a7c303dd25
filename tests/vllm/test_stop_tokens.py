"""Generation ends at every end token of config.json and of generation_config.json, and verl's rollout masks it so."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_formats.config import load_hf_config
from tests.vllm.tiny import write_checkpoint
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from vllm import LLM, SamplingParams, TokensPrompt

PROMPT = TokensPrompt(prompt_token_ids=[5, 9, 11])
SIZES: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 4, "skip_tokenizer_init": True}


def ends(llm: LLM, **given: Any) -> tuple[list[int], str | None]:
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, **given), use_tqdm=False)
    return list(output.outputs[0].token_ids), output.outputs[0].finish_reason


def test_both_files_name_end_tokens(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, eos_token_id=None)
    free, reason = ends(LLM(path, **SIZES))
    assert (len(free), reason) == (24, "length")
    end = free[3]
    first = free.index(end) + 1
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, free[-1]]}))
    llm = LLM(path, **SIZES)
    assert ends(llm) == (free[:first], "stop")
    assert ends(llm, ignore_eos=True) == (free, "length")

    rollout = SimpleNamespace(config=RolloutConfig(prompt_length=4, response_length=24))
    params = vLLMRollout.sampling_params(rollout, {"eos_token_id": 0, "do_sample": False}, seed=1)  # type: ignore[arg-type]
    batch = vLLMRollout.to_batch(rollout, llm.generate(PROMPT, params, use_tqdm=False), {"pad_token_id": 0})  # type: ignore[arg-type]
    assert batch.batch["response_mask"].sum() == first and batch.batch["responses"][0, first - 1] == end
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop"]


@pytest.mark.parametrize(
    ("inner", "beside", "expected"), [(2, [2, 0], (2, 0)), ([7, 8], 9, (7, 8, 9)), (1, None, (1,))]
)
def test_end_tokens_of_both_files(tmp_path: Path, inner: Any, beside: Any, expected: tuple[int, ...]) -> None:
    write_checkpoint(tmp_path, eos_token_id=inner)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": beside}))
    assert load_hf_config(tmp_path).eos_token_ids == expected
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is '</s>'; expected a token's id"):
        load_hf_config(tmp_path)
