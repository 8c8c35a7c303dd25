"""``python -m tools.workshop.bench.threads --model DIR``: what generation and update of a model gain from more threads.

Beside ``torch.nn.functional.linear`` over all of the model's matrices, once with a row per sequence that is generated
and once with a row per token that is trained on. One thread and all of them take turns in one process; figures are the
best of all rounds, because other load only ever adds time. ``of linear`` is the gain divided by linear's: 1 where a
work scales as its products do.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.ops import resolve
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_state import destroy_model_parallel
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from tools.workshop.bench.models import Batch, random_batch
from tools.workshop.bench.options import aligned, parser_of, refused, thread_problems, write_report
from tools.workshop.bench.remote import OthersLoad
from tools.workshop.bench.train_engine import TrainEngine
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

COLUMNS = {
    "work": "<24",
    "1 thread s": ">10.3f",
    "all s": ">8.3f",
    "gain": ">6.2f",
    "of linear": ">9.2f",
    "others": ">7.2f",
}
PROMPT_TOKENS = 16


def main(argv: Sequence[str] | None = None) -> int:
    options = _options().parse_args(argv)
    problems = thread_problems(options.threads)
    if options.threads < 2:
        problems.append(f"--threads {options.threads}: the gain of one thread over one is not measured")
    if not (options.model / "config.json").is_file():
        problems.append(f"--model {options.model}: no config.json; expected a Hugging Face directory")
    if refused("tools.workshop.bench.threads", problems):
        return 2
    try:
        rows = measured(options)
    finally:
        destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
    print("\n".join(aligned(COLUMNS, [[row[name] for name in COLUMNS] for row in rows])))
    write_report(options.json, rows)
    return 0


def _options() -> argparse.ArgumentParser:
    parser = parser_of("threads", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory of a dense model")
    parser.add_argument("--threads", type=int, default=2, help="threads that are compared with one (default: 2)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--sequences", type=int, default=32, help="sequences that are generated at a time")
    parser.add_argument("--new-tokens", type=int, default=32, help="new tokens of each")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of an update, in sequences of 256")
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per work: its best seconds with one thread and with all, its gain, and that divided by linear's."""
    works = _works(options)
    seconds: dict[str, dict[int, list[float]]] = {name: {1: [], options.threads: []} for name in works}
    load, began = OthersLoad(), time.process_time()
    for _ in range(options.rounds + 1):
        for name, work in works.items():
            for num_threads, found in seconds[name].items():
                torch.set_num_threads(num_threads)
                start = time.perf_counter()
                work()
                found.append(time.perf_counter() - start)
    others = load.cores(time.process_time() - began)
    best = {name: [min(found[1:]) for found in of_work.values()] for name, of_work in seconds.items()}  # warm
    gains = {name: one / several for name, (one, several) in best.items()}
    return [
        {
            "work": name,
            "1 thread s": best[name][0],
            "all s": best[name][1],
            "gain": gain,
            "of linear": gain / gains[f"linear of {name.removeprefix('linear of ')}"],
            "others": others,
        }
        for name, gain in gains.items()
    ]


def _works(options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    dtype = getattr(torch, options.dtype)
    raw = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    lengths = [256] * max(1, options.tokens // 256)
    batch = random_batch(lengths, raw["vocab_size"], seed=0)
    source = HFCheckpoint(options.model)
    matrices = [tensor.to(dtype) for name in source.names() if (tensor := source.read(name)).dim() == 2]
    return {
        "generation": _generation(options),
        "linear of generation": _linear(matrices, options.sequences),
        "update": _update(raw, dtype, batch),
        "linear of update": _linear(matrices, batch.num_tokens),
    }


def _linear(matrices: list[Tensor], num_rows: int) -> Callable[[], object]:
    inputs = {size: torch.randn(num_rows, size, dtype=matrices[0].dtype) for size in {m.shape[1] for m in matrices}}

    def work() -> None:
        for _ in range(1 if num_rows >= 256 else 8):
            for matrix in matrices:
                F.linear(inputs[matrix.shape[1]], matrix)

    return work


def _generation(options: argparse.Namespace) -> Callable[[], object]:
    llm = LLM(
        str(options.model),
        dtype=options.dtype,
        max_num_seqs=options.sequences,
        max_model_len=PROMPT_TOKENS + options.new_tokens,
        enable_prefix_caching=False,
    )
    prompts = random_batch([PROMPT_TOKENS] * options.sequences, 1000, seed=1).sequences
    requests = [TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts]
    params = SamplingParams(temperature=1.0, max_tokens=options.new_tokens, ignore_eos=True, seed=0)
    return lambda: llm.generate(requests, params, use_tqdm=False)


def _update(raw: dict[str, Any], dtype: torch.dtype, batch: Batch) -> Callable[[], object]:
    engine = TrainEngine(
        raw,
        resolve("megatron.core.ops.cpu:cpu_ops"),
        "cpu",
        dtype,
        OptimizerConfig(lr=1e-6, clip_grad=1.0),
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
    )
    return lambda: engine.step(batch)


if __name__ == "__main__":
    raise SystemExit(main())
