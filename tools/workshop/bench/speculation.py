"""``python -m tools.workshop.bench.speculation``: generation with drafts beside generation without them, in turns.

All engines are alive in one process and take the rounds in turns, on the same prompts and threads. Figures are the
least of the rounds; tokens must be those without drafts. Every round of an engine that remembers texts begins without
any, or with those that the model in ``--before``, an earlier checkpoint of the same run, gives to the same prompts.
``limit`` is what the verified drafts give at most by the engine's measured costs: tokens of a step over its cost.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import Tensor

from verl.utils.tokenizer import hf_tokenizer
from vllm import LLM, SamplingParams

WAYS = ("ngram:2", "ngram:4", "ngram:7", "suffix:2", "suffix:4", "suffix:7")
VLLM_PROGRAM = Path(__file__).parent / "engines" / "vllm_drafts.py"
VLLM_LIMIT_S = 3600
_CACHE_GB = 4


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
    parser.add_argument("--fixed", action="store_true", help="verify every draft, whether or not that pays")
    parser.add_argument("--before", type=Path, help="an earlier checkpoint, whose answers engines remember")
    parser.add_argument("--vllm-python", type=Path, help="the interpreter of an environment with vLLM, for its n-grams")
    args = parser.parse_args(argv)
    prompts = read_prompts(args.model, args.prompts, args.num_prompts)
    for sequences in args.sequences:
        engines = {"off": make_engine(args.model, sequences, None, False)}
        engines |= {way: make_engine(args.model, sequences, way, not args.fixed) for way in args.ways}
        for temperature in args.temperatures:
            params = SamplingParams(temperature=temperature, max_tokens=args.new_tokens, seed=7)
            measure(engines, prompts, params, sequences, args)
            if args.vllm_python is not None:
                beside_vllm(prompts, params, sequences, args)
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


def make_engine(model: Path, sequences: int, way: str | None, adapts: bool) -> LLM:
    drafts = None
    if way is not None:
        method, _, count = way.partition(":")
        drafts = {"method": method, "num_speculative_tokens": int(count), "adaptive": adapts}
    return LLM(str(model), max_num_seqs=sequences, enforce_eager=None, speculative_config=drafts)


def measure(
    engines: dict[str, LLM], prompts: list[Any], params: SamplingParams, sequences: int, args: argparse.Namespace
) -> None:
    """A line for each engine; RuntimeError where its tokens are others."""
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    found: dict[str, tuple[list[list[int]], int, list[int]]] = {}
    for number in range(args.rounds + 1):
        for way, llm in engines.items():
            core = llm.engine.core
            prepare(llm, prompts, params, args, number)
            num_steps, start_s = core.num_steps, time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds[way].append(time.perf_counter() - start_s)
            counts = [0, 0, 0] if core.scheduler.speculation is None else core.scheduler.speculation.counts
            found[way] = [list(one.outputs[0].token_ids) for one in outputs], core.num_steps - num_steps, list(counts)
    off_s, tokens = min(seconds["off"][1:]), found["off"][0]
    print(f"{sequences} sequences, temperature {params.temperature}, {sum(map(len, tokens))} tokens", flush=True)
    for way, (own, steps, (verified, drafts, right)) in found.items():
        if own != tokens:
            raise RuntimeError(f"{way}: its tokens are not those without drafts")
        spent_s, length = min(seconds[way][1:]), ""
        if verified:
            length = f"{1 + right / verified:.2f} tokens a verified step, {right / drafts:.0%} right"
            length += limit(engines[way], sum(map(len, tokens)), drafts, right)
        print(f"  {way:9} {spent_s:7.2f} s  {off_s / spent_s:5.2f} times  {steps:6} steps  {length}", flush=True)


def prepare(llm: LLM, prompts: list[Any], params: SamplingParams, args: argparse.Namespace, number: int) -> None:
    """Leave an engine with nothing in its cache, and nothing in its memory but the earlier checkpoint's answers."""
    speculation = llm.engine.core.scheduler.speculation
    if speculation is not None:
        speculation.forget()
    if args.before is not None:
        llm.update_weights(weights_of(args.before))
        earlier = SamplingParams(temperature=params.temperature, max_tokens=params.max_tokens, seed=100 + number)
        llm.generate(prompts, earlier, use_tqdm=False)
        llm.update_weights(weights_of(args.model))
        if speculation is not None:
            speculation.counts = [0, 0, 0]
    llm.engine.core.scheduler.kv.reset_prefix_cache()


def weights_of(model: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - no mapping


def limit(llm: LLM, num_tokens: int, num_drafts: int, num_right: int) -> str:
    """What these drafts give at most by the engine's costs: tokens of a sequence and step, over what its rows cost."""
    speculation = llm.engine.core.scheduler.speculation
    if speculation is None or speculation.costs is None:
        return ""
    costs, sequences = speculation.costs, llm.engine.config.scheduler.max_num_seqs
    steps = num_tokens - num_right  # of sequences
    cost = np.interp(sequences * (1 + num_drafts / steps), np.arange(len(costs.verified)), costs.verified)
    return f", limit {num_tokens / steps * costs.plain[sequences] / cost:.2f}"


def beside_vllm(prompts: list[Any], params: SamplingParams, sequences: int, args: argparse.Namespace) -> None:
    """A line for vLLM's n-grams of 4 drafts, beside its own generation without them."""
    given = {
        "model": str(args.model),
        "prompts": [prompt["prompt_token_ids"] for prompt in prompts],
        "sequences": sequences,
        "temperature": params.temperature,
        "new_tokens": params.max_tokens,
        "rounds": args.rounds,
        "num_drafts": 4,
    }
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GB)}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [str(args.vllm_python), str(VLLM_PROGRAM)],
        input=json.dumps(given),
        env=environment,
        cwd=VLLM_PROGRAM.parent,  # our package of that name is in the repository's root
        capture_output=True,
        text=True,
        timeout=VLLM_LIMIT_S,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"vLLM has ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found = json.loads(lines[-1].removeprefix("RESULT "))
    off_s, ngram_s = (min(found[way]["seconds"][1:]) for way in ("off", "ngram"))
    print(f"  vLLM off  {off_s:7.2f} s, ngram:4 {ngram_s:7.2f} s  {off_s / ngram_s:5.2f} times", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
