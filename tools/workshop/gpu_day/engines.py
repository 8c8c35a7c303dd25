"""Both engines on one device, as the parts drive them: a rollout engine with random weights, and a training step."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.ops import TrainOps
from megatron.core.optimizer import OptimizerConfig
from mindspeed_llm.hf_shapes import hf_tensors
from tools.workshop.bench.models import parsed
from tools.workshop.bench.train_engine import TrainEngine
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.model_executor.model_loader.checkpoint_reader import DUMMY_STD
from vllm.ops.contract import RolloutOps
from vllm.platforms import Platform
from vllm.platforms.cuda import CudaPlatform

# CUDA's op tables, on a CPU too: their kernels then run in Triton's interpreter.
TRAIN_OPS, ROLLOUT_OPS = "megatron.core.ops.cuda:cuda_ops", "vllm.ops.cuda:rollout_ops"
# Elements of a model that are drawn on the host, the same for every device: half a second. A GPU draws larger ones.
_MOST_OF_HOST = 1 << 26


class UnfilledCuda(CudaPlatform):
    """A GPU whose engine leaves its first weights as they are."""

    holds_values = False


def new_llm(
    raw: dict[str, Any], device: str | Platform, provider: str | RolloutOps, dtype: str, **arguments: Any
) -> LLM:
    """An engine with random weights of a config.json: a small model has the same on every device."""
    tensors = hf_tensors(parsed(raw))
    is_drawn_there = device == "cuda" and sum(math.prod(shape) for shape, _ in tensors.values()) > _MOST_OF_HOST
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        defaults = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 16}
        llm = LLM(
            folder,
            device=UnfilledCuda() if is_drawn_there else device,
            rollout_ops=provider,
            dtype=dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            data_parallel_size=1,
            **(defaults | arguments),
        )
    if is_drawn_there:
        llm.load_weights((name, drawn_weight(name, shape, "cuda")) for name, (shape, _) in tensors.items())
    return llm


def new_engine(raw: dict[str, Any], device: str | Platform, batch: int, longest: int, **arguments: Any) -> LLM:
    """An engine in bfloat16 with CUDA's ops, with room for ``batch`` sequences of at most ``longest`` tokens."""
    blocks = batch * (-(-longest // 16) + 1)
    sizes = {"max_model_len": longest, "max_num_seqs": batch, "num_gpu_blocks_override": blocks}
    given = {"provider": ROLLOUT_OPS, "dtype": "bfloat16", "enforce_eager": None}
    return new_llm(raw, device, **(given | sizes | arguments))


def drawn_weight(name: str, shape: tuple[int, ...], device: str) -> Tensor:
    """A tensor of a checkpoint as the engine's own dummy weights are: norms 1, biases 0, others normal."""
    if len(shape) == 1:
        return (torch.ones if name.endswith("norm.weight") else torch.zeros)(shape, device=device)
    return torch.randn(shape, device=device, dtype=torch.bfloat16) * DUMMY_STD


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


def gap(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of two tensors over the largest element of the second."""
    found, wanted = found.detach().double(), wanted.detach().to(found.device).double()
    return float((found - wanted).abs().max() / wanted.abs().max())


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
