"""``python -m tools.workshop.bench.rollout``: our rollout engine beside vLLM on the CPU and transformers.

Every engine lives in a process of its own, with the same CPUs, threads and allocator; they are alive together and take
the rounds of each kind of work in turns on the same prompts. Figures are medians over rounds, ratios of medians in one
run. vLLM runs in an environment of its own, whose interpreter ``--vllm-python`` names; ``--engines ours`` needs none.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.workshop.bench import rollout_report
from tools.workshop.bench.models import CHECKPOINTS, ITEM_BYTES, Work, cache_bytes_per_token, parsed, write_checkpoint
from tools.workshop.bench.options import (
    add_engine_options,
    engine_problems,
    parser_of,
    refused,
    unknown_choices,
    write_report,
)
from tools.workshop.bench.remote import (
    EngineError,
    EngineProcess,
    EngineSpec,
    OthersLoad,
    cpus_for,
    quickest_variant,
    report_progress,
)

ENGINES = ("ours", "vllm", "transformers")
PROGRAM = "rollout_engines.py"
VARIANTS = ("eager,grouped_mm", "eager,eager", "sdpa,grouped_mm", "sdpa,eager")
MAX_SEQUENCES = 256
OUR_BLOCK_SIZE, VLLM_BLOCK_SIZE = 16, 128  # tokens, as these engines choose for themselves on a CPU


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit code: 1 when an engine failed, 2 for options that cannot work."""
    options = _options().parse_args(argv)
    if refused("tools.workshop.bench.rollout", _problems(options)):
        return 2
    reports = []
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as tmp:
        for checkpoint in options.checkpoints:
            reports.append(Bench(checkpoint, options, Path(tmp)).run())
            print(rollout_report.table(reports[-1]), flush=True)
    write_report(options.json, reports)
    return int(any(report["failures"] for report in reports))


def works(options: argparse.Namespace) -> dict[str, Work]:
    """Every kind of work by its name.

    mixed: short prompts · shared: several samples of each of a few long prompts · unshared: as many samples of as many
    long prompts · prefill: long prompts, one token each · host: many short prompts whose text is wanted.
    """
    (shortest, longest), new_tokens = options.prompt_lengths, options.new_tokens
    count, long, n = options.num_prompts, options.long_prompt, options.samples
    num_shared = max(1, count // n)
    found = [
        Work("mixed", count, shortest, longest, new_tokens=new_tokens),
        Work("shared", num_shared, long, long, n=n, new_tokens=new_tokens),
        Work("unshared", num_shared * n, long, long, new_tokens=new_tokens),
        Work("prefill", num_shared * 4, long, long, new_tokens=1),
        *(
            Work(f"host{num}", num, shortest, longest, new_tokens=new_tokens, detokenize=True)
            for num in options.host_sequences
        ),
    ]
    return {work.name: work for work in found}


class Bench:
    """The engines of one checkpoint."""

    def __init__(self, checkpoint: str, options: argparse.Namespace, tmp: Path) -> None:
        self.options, self.checkpoint, self.raw = options, checkpoint, CHECKPOINTS[checkpoint]
        self.cpus = cpus_for(options.threads)
        self.scratch = tmp / checkpoint
        self.scratch.mkdir()
        self.model = Path(options.models or tmp / "models") / f"{checkpoint}-{options.dtype}"
        known = works(options)
        self.works = [known[name] for name in options.works]
        self.failures: dict[str, str] = {}
        self.starts: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Everything that was measured, and the figures made of it."""
        write_checkpoint(self.raw, self.options.dtype, self.model)
        with ExitStack() as stack:
            probe = stack.enter_context(self._start(EngineSpec("probe", {})))
            specs = [spec for engine in self.options.engines if (spec := self._spec(engine)) is not None]
            started = ((spec.engine, self._started(spec)) for spec in specs)
            processes = {engine: stack.enter_context(process) for engine, process in started if process is not None}
            measured, machine = self._in_turns(processes, probe)
        options = vars(self.options) | {"checkpoint": self.checkpoint}
        return rollout_report.report(options, measured, self.starts, machine) | {"failures": self.failures}

    def _spec(self, engine: str) -> EngineSpec | None:
        """How to start an engine; None, with the failure noted, when transformers has no variant that runs."""
        options = self.options
        # Room for one longest sample more than is needed, in whole blocks of the engine, so that none is preempted.
        block_size = OUR_BLOCK_SIZE if engine == "ours" else VLLM_BLOCK_SIZE
        num_tokens = max((work.num_samples + 1) * (work.max_tokens_per_sample + block_size) for work in self.works)
        arguments: dict[str, Any] = {
            "dtype": options.dtype,
            "max_model_len": max(work.max_tokens_per_sample for work in self.works) + 16,
            "max_num_seqs": MAX_SEQUENCES,
        }
        settings = {"model": str(self.model), "arguments": arguments}
        if engine == "ours":
            arguments |= {"num_gpu_blocks_override": -(-num_tokens // OUR_BLOCK_SIZE), "enable_prefix_caching": True}
            # Other op tables than the CPU's own capture no graphs.
            arguments |= {"rollout_ops": options.rollout_ops} if options.rollout_ops else {"enforce_eager": False}
            return EngineSpec(engine, settings, is_ours=True)
        if engine == "vllm":
            return EngineSpec(engine, settings, options.vllm_python, self._vllm_environment(num_tokens))
        specs = {
            variant.replace(",", " "): EngineSpec(engine, {**settings, "variant": variant.split(",")})
            for variant in options.variants
        }
        shortest, longest = options.prompt_lengths
        trial = Work("trial", options.num_prompts, shortest, longest, new_tokens=16)
        try:
            return quickest_variant(
                specs, self._start, lambda process: [self._generate(process, trial, s)["seconds"] for s in range(2)][-1]
            )
        except EngineError as error:
            self._fail(engine, error)
            return None

    def _vllm_environment(self, num_tokens: int) -> dict[str, str]:
        """One process, bound to our CPUs, with room for the largest work; its MLA kernels know one shape only."""
        hf = parsed(self.raw)
        has_mla = hf.is_mla and (hf.kv_lora_rank, hf.qk_rope_head_dim) == (512, 64)
        cache_bytes = num_tokens * cache_bytes_per_token(hf, ITEM_BYTES[self.options.dtype], has_mla)
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(-(-cache_bytes // 2**30)),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.cpus)),
            "VLLM_CACHE_ROOT": str(self.scratch / "cache" / "vllm"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        } | ({"VLLM_MLA_DISABLE": "1"} if hf.is_mla and not has_mla else {})

    def _started(self, spec: EngineSpec) -> EngineProcess | None:
        """The engine, started as often as is asked for, the first time with empty caches; None when it cannot.

        Seconds are from the start of its process: until it could be asked, and until its first token.
        """
        ready_seconds: list[float] = []
        first_token_seconds: list[float] = []
        self.starts.append(
            {"engine": spec.engine, "ready_seconds": ready_seconds, "first_token_seconds": first_token_seconds}
        )
        process: EngineProcess | None = None
        try:
            for _ in range(self.options.starts):
                if process is not None:
                    process.end()
                process = self._start(spec)
                seconds = self._generate(process, Work("first", 1, 16, 16, new_tokens=1), 0)["seconds"]
                ready_seconds.append(process.start_seconds)
                first_token_seconds.append(process.start_seconds + seconds)
        except EngineError as error:
            self._fail(spec.engine, error)
            if process is not None:
                process.end()
            return None
        return process

    def _start(self, spec: EngineSpec) -> EngineProcess:
        cache = self.scratch / "cache"  # empty at first, also of what compilers made
        names = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR")
        environment = {"XDG_CACHE_HOME": str(cache), **{n: str(cache / n) for n in names}, **spec.environment}
        return EngineProcess(PROGRAM, replace(spec, environment=environment), self.cpus, self.scratch)

    def _generate(self, process: EngineProcess, work: Work, seed: int) -> dict[str, Any]:
        """One round; EngineError when answers are not of the length that was asked for."""
        answer = process.ask(
            "generate",
            prompts=work.prompts(self.raw["vocab_size"], seed),
            n=work.n,
            max_tokens=work.new_tokens,
            detokenize=work.detokenize,
        )
        if answer["num_tokens"] != work.num_samples * work.new_tokens or answer["shortest"] != work.new_tokens:
            raise EngineError(
                f"{process.name} gave {answer['num_tokens']} tokens, {answer['shortest']} in the shortest sample, for "
                f"{work.num_samples} samples of {work.new_tokens}"
            )
        return answer

    def _in_turns(
        self, processes: dict[str, EngineProcess], probe: EngineProcess
    ) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
        """The answers of each engine to each kind of work, and the machine's rates before each round.

        The engines' first rounds of a kind of work come first and are not counted.
        """
        measured: list[dict[str, Any]] = []
        machine: list[dict[str, float]] = []
        num_bytes = (self.model / "model.safetensors").stat().st_size
        for work in self.works:
            found: dict[str, dict[str, Any]] = {
                engine: {"engine": engine, "name": process.name, "work": vars(work), "rounds": [], "others_cores": []}
                for engine, process in processes.items()
            }
            for round_ in range(self.options.rounds + 1):
                machine.append(probe.ask("measure", num_bytes=num_bytes, dtype=self.options.dtype))
                for engine, process in list(processes.items()):
                    load = OthersLoad()
                    try:
                        answer = self._generate(process, work, round_)
                    except EngineError as error:
                        self._fail(engine, error)
                        processes.pop(engine).end()
                        continue
                    rate = answer["num_tokens"] / answer["seconds"]
                    report_progress(f"{self.checkpoint} {work.name} {round_}: {process.name}: {rate:.0f} tok/s")
                    if round_:
                        found[engine]["rounds"].append(answer)
                        found[engine]["others_cores"].append(load.cores(answer["cpu_seconds"]))
            measured += [one for one in found.values() if one["rounds"]]
        return measured, machine

    def _fail(self, engine: str, error: EngineError) -> None:
        self.failures[engine] = str(error)
        report_progress(f"tools.workshop.bench.rollout: {self.checkpoint}: {error}")


def _problems(options: argparse.Namespace) -> list[str]:
    problems = engine_problems(options, ENGINES, VARIANTS)
    problems += unknown_choices(
        ("--checkpoints", CHECKPOINTS, options.checkpoints), ("--works", works(options), options.works)
    )
    for name, given in (("--starts", options.starts), ("--rounds", options.rounds)):
        if given < 1:
            problems.append(f"{name} is {given}; an engine is measured from 1 on")
    if max([*options.host_sequences, options.num_prompts]) > MAX_SEQUENCES:
        problems.append(f"--num-prompts and --host-sequences go up to {MAX_SEQUENCES}, which run at once")
    return problems


def _options() -> argparse.ArgumentParser:
    parser = parser_of("rollout", __doc__)
    parser.add_argument("--checkpoints", nargs="+", default=["A", "B", "C"], help=f"of {', '.join(CHECKPOINTS)}")
    default_works = ["mixed", "shared", "unshared", "prefill", "host64", "host256"]
    parser.add_argument(
        "--works", nargs="+", default=default_works, help=f"of {', '.join(default_works)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each work, after one warm-up")
    parser.add_argument("--starts", type=int, default=2, help="starts of each engine; the first has empty caches")
    parser.add_argument("--rollout-ops", help="our table of ops (default: the engine's)")
    add_engine_options(parser, ENGINES, ("ours", "transformers"), "bfloat16", VARIANTS)
    parser.add_argument("--num-prompts", type=int, default=64, help="samples that run at once, but for host")
    parser.add_argument("--long-prompt", type=int, default=512, help="tokens of a prompt of shared, unshared, prefill")
    parser.add_argument("--samples", type=int, default=16, help="samples of each prompt of shared")
    parser.add_argument("--host-sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--models", help="directory where checkpoints are kept (default: a temporary one)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
