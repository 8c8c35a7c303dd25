"""One decode layer of latent attention and experts, launched op by op and as a captured graph: equal, and the time.

The engine itself runs it: a DeepSeek-V3 of one layer in bfloat16 whose sizes the kernels take, with random weights.
Prompts of several lengths cross a block's border while they generate, so lengths and tables change under the graph.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.doctor.die_check import Check, Die, difference, in_ms
from tools.doctor.finding import Finding
from tools.workshop.bench.models import deepseek_v3_config
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

NAME = "captured layer"
BLOCK_SIZE, NUM_TOKENS = 128, 12
PROMPT_LENGTHS = (122, 3, 64, 127)
TOLERANCE = 2e-2  # of bfloat16's log-probs
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 0,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def check(die: Die) -> Finding:
    """A note where this software captures nothing, a problem where a graph computes something else."""
    eager_ids, eager_logprobs, eager_s = _generated(enforce_eager=True)
    try:
        ids, logprobs, captured_s = _generated(enforce_eager=False)
    except ValueError as error:  # what the platform says of its versions and settings
        return Finding(NAME, f"not captured; {in_ms(eager_s)} a step without", " ".join(str(error).split()))
    wrong = difference(ids, eager_ids) or difference(logprobs, eager_logprobs, TOLERANCE)
    if wrong:
        remedy = "set actor_rollout_ref.rollout.enforce_eager=True, and report it with the versions of CANN and driver"
        return Finding(NAME, f"captured and eager steps differ: {wrong}", remedy, is_fatal=True)
    return Finding(NAME, f"as without a graph; {in_ms(captured_s)} a step, {in_ms(eager_s)} without")


def _generated(enforce_eager: bool) -> tuple[Tensor, Tensor, float]:
    """Token ids and log-probs of all prompts, and the seconds of a step of a second generation, when all is warm."""
    with tempfile.TemporaryDirectory(prefix="die-layer-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(deepseek_v3_config(**SIZES)), encoding="utf-8")
        llm = LLM(
            folder,
            device="npu",
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            data_parallel_size=1,  # whatever the environment says
            block_size=BLOCK_SIZE,
            max_model_len=2 * BLOCK_SIZE,
            max_num_seqs=len(PROMPT_LENGTHS),
            num_gpu_blocks_override=4 * len(PROMPT_LENGTHS),
            enforce_eager=enforce_eager,
        )
    try:
        ids, logprobs = _generate(llm, seed=0)
        start = time.perf_counter()
        _generate(llm, seed=1)
        return ids, logprobs, (time.perf_counter() - start) / NUM_TOKENS
    finally:
        llm.shutdown()


def _generate(llm: LLM, seed: int) -> tuple[Tensor, Tensor]:
    draws = np.random.default_rng(seed)
    prompts = [TokensPrompt(prompt_token_ids=draws.integers(2, 1000, length).tolist()) for length in PROMPT_LENGTHS]
    params = [SamplingParams(max_tokens=NUM_TOKENS, seed=index, ignore_eos=True) for index in range(len(prompts))]
    samples = [output.outputs[0] for output in llm.generate(prompts, params)]
    return torch.tensor([s.token_ids for s in samples]), torch.tensor([s.sampled_logprobs for s in samples])


CHECK = Check(NAME, check)
