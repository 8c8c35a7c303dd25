"""Both engines on one device, as the parts drive them: a rollout engine with random weights, and a training step."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.ops import TrainOps
from megatron.core.optimizer import OptimizerConfig
from tools.bench.train_engine import TrainEngine
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.ops.contract import RolloutOps

# CUDA's op tables, on a CPU too: their kernels then run in Triton's interpreter.
TRAIN_OPS, ROLLOUT_OPS = "megatron.core.ops.cuda:cuda_ops", "vllm.ops.cuda:rollout_ops"


def new_llm(raw: dict[str, Any], device: str, provider: str | RolloutOps, dtype: str, **arguments: Any) -> LLM:
    """An engine with random weights of a config.json."""
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        defaults = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 16}
        return LLM(
            folder,
            device=device,
            rollout_ops=provider,
            dtype=dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            data_parallel_size=1,
            **(defaults | arguments),
        )


def generated(llm: LLM, lengths: tuple[int, ...], num_tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids and log-probs of prompts of these lengths."""
    vocab_size = llm.config.model.hf.vocab_size
    samples = [output.outputs[0] for output in llm.generate(prompts(lengths, vocab_size), drawn(num_tokens))]
    return torch.tensor([s.token_ids for s in samples]), torch.tensor([s.sampled_logprobs for s in samples])


def prompts(lengths: tuple[int, ...], vocab_size: int, seed: int = 0) -> list[TokensPrompt]:
    """Random ids."""
    draws = np.random.default_rng(seed)
    return [TokensPrompt(prompt_token_ids=draws.integers(2, vocab_size, length).tolist()) for length in lengths]


def drawn(num_tokens: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(max_tokens=num_tokens, seed=0, ignore_eos=True)


class Trainer(TrainEngine):
    """The training engine on packed sequences, with gradients in fp32 and clipping."""

    def __init__(self, raw: dict[str, Any], ops: TrainOps, device: str, dtype: torch.dtype) -> None:
        config = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0)
        super().__init__(raw, ops, device, dtype, config, DistributedDataParallelConfig(grad_reduce_in_fp32=True))

    def load(self, other: Trainer) -> None:
        """Take the weights of another one."""
        with torch.no_grad():
            for mine, theirs in zip(self.model.module.parameters(), other.model.module.parameters(), strict=True):
                mine.copy_(theirs)
        self.optimizer.reload_model_params()
