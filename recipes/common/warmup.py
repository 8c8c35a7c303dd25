"""Supervised warm-up of the tiny model on the noisy corpus, by the same training engine as the GRPO update."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import Tokenizer

from hf_formats.config import load_hf_config
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.ops import reference_ops
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mindspeed_llm.cli_io import say
from mindspeed_llm.export_weights import export_weights
from mindspeed_llm.hf_checkpoint import save_hf_checkpoint
from mindspeed_llm.model import build_model
from recipes.common.corpus import CorpusStyle, Example, examples, training_rows
from recipes.common.short_folder import start_method
from recipes.common.tokenizer import DEEPSEEK, ChatForm

PEAK_LR, MIN_LR, LR_WARMUP_STEPS = 4e-3, 4e-4, 20
LONGEST_TEXT = 512  # tokens; a longer prompt teaches so small a model little, and costs the most
MAX_BATCH_TOKENS = 4096  # long texts make smaller batches, so that the warm-up takes the same time on any data
REPORT_EVERY = 50
TIMEOUT_MINUTES = 10

Tokens = tuple[list[int], list[int]]  # of a text: prompt and response


@dataclass(frozen=True)
class Warmup:
    """One warm-up: ``hf_dir`` has config and tokenizer, ``out_dir`` receives the BF16 checkpoint."""

    hf_dir: Path
    train_parquet: Path
    style: CorpusStyle
    out_dir: Path
    seed: int
    num_steps: int
    batch_size: int
    num_processes: int
    chat: ChatForm = DEEPSEEK


@dataclass(frozen=True)
class PackedTexts:
    """Texts packed into T tokens. ``is_learned_T`` marks tokens whose *next* token is part of a response."""

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    labels_T: torch.Tensor
    is_learned_T: torch.Tensor
    sequences: PackedSeqParams


def run_warmup(warmup: Warmup) -> None:
    """Train on ``num_processes`` gloo processes of one thread each, so that every machine gets the same result."""
    with tempfile.TemporaryDirectory(prefix="warmup_") as rendezvous:
        arguments = (_run_rank, (warmup, rendezvous), warmup.num_processes)
        mp.start_processes(*arguments, daemon=True, start_method=start_method())


def _run_rank(rank: int, warmup: Warmup, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{rendezvous}/store", warmup.num_processes),  # a URL would not take every path
        rank=rank,
        world_size=warmup.num_processes,
        timeout=timedelta(minutes=TIMEOUT_MINUTES),
    )
    try:
        train(warmup)
    finally:
        dist.destroy_process_group()


def train(warmup: Warmup) -> None:
    """The warm-up on this rank of an initialised process group: pure data parallelism, fp32."""
    groups, ops = parallel_state.initialize_model_parallel(), reference_ops()
    hf = load_hf_config(warmup.hf_dir)
    model = build_model(
        hf, groups, ops, params_dtype=torch.float32, calculate_per_token_loss=True, moe_router_bias_update_rate=1e-3
    )
    model.init_weights(warmup.seed)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model, groups)
    optimizer_config = OptimizerConfig(lr=PEAK_LR, min_lr=MIN_LR, weight_decay=0.0, adam_beta2=0.95)
    optimizer = get_megatron_optimizer(optimizer_config, ddp, groups, ops)
    scheduler = OptimizerParamScheduler(
        optimizer,
        max_lr=PEAK_LR,
        min_lr=MIN_LR,
        lr_warmup_steps=min(LR_WARMUP_STEPS, warmup.num_steps - 1),
        lr_decay_steps=warmup.num_steps,
        lr_decay_style="cosine",
    )
    started = time.monotonic()
    for step, (mine, num_learned) in enumerate(islice(batches(warmup, groups.rank), warmup.num_steps), start=1):
        optimizer.zero_grad()
        logits_TV = ddp(mine.input_ids_T, mine.position_ids_T, mine.sequences)
        loss_T = vocab_parallel_cross_entropy(logits_TV, mine.labels_T, groups.tp, ops)
        loss = (loss_T * mine.is_learned_T).sum() / num_learned
        loss.backward()
        finalize_model_grads(ddp, groups)
        optimizer.step()
        scheduler.step()
        if step % REPORT_EVERY == 0 or step == warmup.num_steps:
            total = loss.detach().clone()
            dist.all_reduce(total, group=groups.dp)
            if groups.rank == 0:
                say(f"warm-up step {step}/{warmup.num_steps}, loss {total:.3f}, {time.monotonic() - started:.0f} s")
    weights = export_weights(model, hf, groups, dtype=torch.bfloat16)
    save_hf_checkpoint(weights, warmup.out_dir, warmup.hf_dir, is_writer=groups.rank == 0)
    parallel_state.destroy_model_parallel()


def batches(warmup: Warmup, rank: int) -> Iterator[tuple[PackedTexts, int]]:
    """This rank's share of every batch, and the number of learned tokens in the whole batch."""
    tokenizer = Tokenizer.from_file(str(warmup.hf_dir / "tokenizer.json"))
    rows = training_rows(warmup.train_parquet)
    texts = _token_lists(examples(rows, warmup.seed, warmup.style), len(rows), tokenizer, warmup.chat)
    waiting = next(texts)
    while True:
        batch, num_tokens = [waiting], _length(waiting)
        for waiting in texts:
            num_tokens += _length(waiting)
            if len(batch) == warmup.batch_size or num_tokens > MAX_BATCH_TOKENS:
                break
            batch.append(waiting)
        num_learned = sum(len(response) for _, response in batch)
        yield pack(batch[rank :: warmup.num_processes]), num_learned


def _token_lists(texts: Iterator[Example], num_rows: int, tokenizer: Any, chat: ChatForm) -> Iterator[Tokens]:
    """Yield (prompt, response) token ids forever; texts above ``LONGEST_TEXT`` are left out."""
    end = tokenizer.token_to_id(chat.eos)

    @cache
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    found_short = False
    for position, example in enumerate(texts):
        prompt, response = encode(chat.text(example.messages)), [*encode(example.response), end]
        if len(prompt) + len(response) <= LONGEST_TEXT:
            found_short = True
            yield prompt, response
        elif not found_short and position >= num_rows:
            raise ValueError(f"no problem of {num_rows} fits into {LONGEST_TEXT} tokens: give shorter ones")


def _length(text: Tokens) -> int:
    return len(text[0]) + len(text[1])


def pack(texts: Sequence[Tokens]) -> PackedTexts:
    """Concatenate texts; the last token of a text has no next one and is not learned from."""

    def packed(numbers: Iterable[Iterable[float]]) -> torch.Tensor:
        return torch.tensor(list(chain.from_iterable(numbers)))

    whole = [[*prompt, *response] for prompt, response in texts]
    lengths = [len(text) for text in whole]
    return PackedTexts(
        packed(whole),
        packed(range(length) for length in lengths),
        packed([*text[1:], 0] for text in whole),
        packed([0.0] * (len(prompt) - 1) + [1.0] * len(response) + [0.0] for prompt, response in texts),
        PackedSeqParams(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), max(lengths)),
    )
