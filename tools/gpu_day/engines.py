"""Both engines on one device, as the parts drive them: a rollout engine with random weights, and a training step."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.ops import TrainOps
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups, initialize_model_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from mindspeed_llm.model import build_model
from tools.bench.models import Batch, parsed
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

# CUDA's op tables, on a CPU too: their kernels then run in Triton's interpreter.
TRAIN_OPS, ROLLOUT_OPS = "megatron.core.ops.cuda:cuda_ops", "vllm.ops.cuda:rollout_ops"


def new_llm(raw: dict[str, Any], device: str, provider: str, dtype: str, **arguments: Any) -> LLM:
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


@cache
def _groups() -> ProcessGroups:
    """Those of the one process, which no collective leaves."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return initialize_model_parallel()


class Trainer:
    """The training engine in one process: packed sequences, fp32 master weights, clipping."""

    def __init__(self, raw: dict[str, Any], ops: TrainOps, device: str, dtype: torch.dtype) -> None:
        self.device, self.groups = torch.device(device), _groups()
        model = build_model(parsed(raw), self.groups, ops, params_dtype=dtype, calculate_per_token_loss=True)
        model = model.to(self.device)
        model.init_weights(0)
        self.model = DistributedDataParallel(model.config, DistributedDataParallelConfig(True), model, self.groups)
        config = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0)
        self.optimizer = get_megatron_optimizer(config, self.model, self.groups, ops)

    def load(self, other: Trainer) -> None:
        """Take the weights of another one."""
        with torch.no_grad():
            for mine, theirs in zip(self.model.module.parameters(), other.model.module.parameters(), strict=True):
                mine.copy_(theirs)
        self.optimizer.reload_model_params()

    def step(self, batch: Batch) -> float:
        """Forward, backward and update on all sequences as one micro-batch; the mean loss of a token."""
        ids = [token for sequence in batch.sequences for token in sequence]
        lengths = torch.tensor([len(sequence) for sequence in batch.sequences])
        bounds = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        ids_T = torch.tensor(ids, device=self.device)
        positions_T = torch.cat([torch.arange(int(length)) for length in lengths]).to(self.device)
        weights_T = torch.ones(len(ids), device=self.device)
        weights_T[(bounds[1:] - 1).to(self.device)] = 0  # a sequence's last token predicts nothing
        packed = PackedSeqParams(bounds.int(), int(lengths.max()))
        num_labels = batch.num_tokens - len(batch.sequences)

        def forward_step(_: Iterator[None], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            losses_T = model(ids_T, positions_T, packed, ids_T.roll(-1))

            def loss_func(losses_T: Tensor) -> tuple[Tensor, Tensor]:
                loss = (losses_T * weights_T).sum() / num_labels
                return loss, loss.detach()

            return losses_T, loss_func

        self.optimizer.zero_grad()
        (loss,) = get_forward_backward_func(self.groups)(
            forward_step_func=forward_step,
            data_iterator=iter(()),
            model=self.model,
            num_microbatches=1,
            seq_length=batch.num_tokens,
            micro_batch_size=1,
        )
        finalize_model_grads(self.model, self.groups)
        self.optimizer.step()
        return float(loss)
