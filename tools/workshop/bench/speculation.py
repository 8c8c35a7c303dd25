"""``python -m tools.workshop.bench.speculation``: generation with drafts beside generation without them, in turns.

All engines are alive in one process and take the rounds in turns, on the same prompts and threads. Every round of an
engine that remembers texts begins without any. Figures are medians over rounds; tokens must be those without drafts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from verl.utils.tokenizer import hf_tokenizer
from vllm import LLM, SamplingParams

WAYS = ("ngram:2", "ngram:4", "ngram:7", "suffix:2", "suffix:4", "suffix:7")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.workshop.bench.speculation", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face directory")
    parser.add_argument("prompts", type=Path, help="JSON lines with question, or verl's parquet")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64], help="sequences of a step")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one warm-up")
    parser.add_argument("--ways", nargs="+", default=WAYS, help=f"method:num_speculative_tokens, as {WAYS[0]}")
    args = parser.parse_args(argv)
    prompts = read_prompts(args.model, args.prompts, args.num_prompts)
    for sequences in args.sequences:
        engines = {"off": make_engine(args.model, sequences, None)}
        engines |= {way: make_engine(args.model, sequences, way) for way in args.ways}
        for temperature in args.temperatures:
            params = SamplingParams(temperature=temperature, max_tokens=args.new_tokens, seed=7)
            report(engines, prompts, params, sequences, args.rounds)
    return 0


def read_prompts(model: Path, path: Path, count: int) -> list[Any]:
    """The first prompts of a file, as the model's chat template writes them."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        chats = [row["prompt"] for row in pq.read_table(path).slice(0, count).to_pylist()]
    else:
        lines = path.read_text(encoding="utf-8").splitlines()[:count]
        chats = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    tokenizer = hf_tokenizer(str(model))
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [{"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]


def make_engine(model: Path, sequences: int, way: str | None) -> LLM:
    drafts = None
    if way is not None:
        method, _, count = way.partition(":")
        drafts = {"method": method, "num_speculative_tokens": int(count)}
    return LLM(str(model), max_num_seqs=sequences, enforce_eager=None, speculative_config=drafts)


def report(engines: dict[str, LLM], prompts: list[Any], params: SamplingParams, sequences: int, rounds: int) -> None:
    """A line for each engine; RuntimeError where its tokens are others."""
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    found: dict[str, tuple[list[list[int]], int, list[int]]] = {}
    for _ in range(rounds + 1):
        for way, llm in engines.items():
            core = llm.engine.core
            if core.scheduler.speculation is not None:
                core.scheduler.speculation.forget()
            core.scheduler.kv.reset_prefix_cache()
            num_steps, start_s = core.num_steps, time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds[way].append(time.perf_counter() - start_s)
            counts = [0, 0, 0] if core.scheduler.speculation is None else core.scheduler.speculation.counts
            found[way] = [list(one.outputs[0].token_ids) for one in outputs], core.num_steps - num_steps, list(counts)
    off_s, tokens = median(seconds["off"][1:]), found["off"][0]
    print(f"{sequences} sequences, temperature {params.temperature}, {sum(map(len, tokens))} tokens", flush=True)
    for way, (own, steps, (verified, drafts, right)) in found.items():
        if own != tokens:
            raise RuntimeError(f"{way}: its tokens are not those without drafts")
        length = f"{1 + right / verified:.2f} tokens a verified step, {right / drafts:.0%} right" if verified else ""
        spent_s = median(seconds[way][1:])
        print(f"  {way:9} {spent_s:7.2f} s  {off_s / spent_s:5.2f} times  {steps:6} steps  {length}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
