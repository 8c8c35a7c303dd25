"""The engines of the rollout benchmark behind one ``generate``: ours, vLLM, transformers; and a probe of the machine.

Run as a program of the engine's environment: ``python rollout_engines.py OPTIONS``; see ``engine_server``.
"""

from __future__ import annotations

import time
from typing import Any

from engine_server import Stopwatch, best_seconds, matmul_peaks, pretrained, serve


class StepClock:
    """Times the forwards of a model by hooks: the time between two of them, outside of the model, is the host's."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        # The start of each forward and the time inside it and its logits, by the wall and by this thread's CPU.
        self._began: list[tuple[float, float]] = []
        self._inside: list[tuple[float, float]] = []

    def watch(self, model: Any, is_step: bool = True) -> None:
        """Time a module; with ``is_step`` it runs once in every step, before the others (such as the logits')."""
        model.register_forward_pre_hook(lambda *_: self._enter(is_step))
        model.register_forward_hook(lambda *_: self._leave())

    def watch_call(self, owner: Any, name: str) -> None:
        """Time a method that runs the model, or a graph of it, once in every step and before the other modules."""
        run = getattr(owner, name)

        def watched(*args: Any) -> Any:
            self._enter(is_step=True)
            output = run(*args)
            self._leave()
            return output

        setattr(owner, name, watched)

    def steps(self) -> dict[str, list[int]]:
        """Microseconds of every step but the last: from forward to forward, and the part of it outside of the model."""
        found: dict[str, list[int]] = {"step_us": [], "host_us": [], "host_cpu_us": []}
        for begin, end, inside in zip(self._began, self._began[1:], self._inside, strict=False):
            found["step_us"].append(round(1e6 * (end[0] - begin[0])))
            found["host_us"].append(round(1e6 * (end[0] - begin[0] - inside[0])))
            found["host_cpu_us"].append(round(1e6 * (end[1] - begin[1] - inside[1])))
        return found

    def _enter(self, is_step: bool) -> None:
        now = time.perf_counter(), time.thread_time()
        if is_step:
            self._began.append(now)
            self._inside.append((0.0, 0.0))
        self._entered = now

    def _leave(self) -> None:
        if not self._inside:
            return  # a warm-up of the engine's own, before the first forget
        (wall, cpu), (entered, cpu_entered) = self._inside[-1], self._entered
        self._inside[-1] = wall + time.perf_counter() - entered, cpu + time.thread_time() - cpu_entered


class VllmEngine:
    """``vllm.LLM`` of this environment: this repository's in ours, vLLM's in its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        import vllm as library

        vllm: Any = library  # typed as ours, which lacks what the other one has
        self.name = f"{options['engine']} {getattr(vllm, '__version__', '')}".strip()
        self._new_params = vllm.SamplingParams
        self.clock = StepClock()
        self.llm = vllm.LLM(options["model"], **options["arguments"])
        if options["engine"] == "ours":
            worker = self.llm.core.worker
            self.clock.watch_call(worker.runner, "_forward")
            self._watch_logits(worker.model)
        else:
            self.llm.apply_model(self.clock.watch)
            self.llm.apply_model(self._watch_logits)

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, detokenize: bool) -> dict[str, Any]:
        """Time ``n`` samples of exactly ``max_tokens`` tokens for each prompt, at temperature 1."""
        params = self._new_params(n=n, temperature=1.0, max_tokens=max_tokens, ignore_eos=True, detokenize=detokenize)
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        self.clock.forget()
        stopwatch = Stopwatch()
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        measured = stopwatch.read()
        lengths = [len(sample.token_ids) for output in outputs for sample in output.outputs]
        return measured | self.clock.steps() | {"num_tokens": sum(lengths), "shortest": min(lengths)}

    def _watch_logits(self, model: Any) -> None:
        modules = {type(module).__name__: module for module in model.modules()}
        self.clock.watch(modules.get("LogitsProcessor") or modules["ParallelLMHead"], is_step=False)


class TransformersEngine:
    """``generate`` of transformers on left-padded prompts, with the variant that the options name."""

    def __init__(self, options: dict[str, Any]) -> None:
        from transformers import AutoTokenizer

        self.model, self.name = pretrained(options | options["arguments"])
        self.model.eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(options["model"])
        self.clock = StepClock()
        self.clock.watch(self.model)

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, detokenize: bool) -> dict[str, Any]:
        import torch

        self.clock.forget()
        stopwatch = Stopwatch()
        longest = max(map(len, prompts))
        ids_BL = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
        mask_BL = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        with torch.inference_mode():
            output_BL = self.model.generate(
                input_ids=ids_BL,
                attention_mask=mask_BL,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_tokens,
                num_return_sequences=n,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens = output_BL[:, longest:].tolist()
        if detokenize:
            self.tokenizer.batch_decode(tokens)
        measured = stopwatch.read()
        num_tokens = sum(map(len, tokens))
        return measured | self.clock.steps() | {"num_tokens": num_tokens, "shortest": min(map(len, tokens))}


class MachineProbe:
    """The machine's rates right now: bytes read per second and floating-point operations per second."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.name = options["engine"]

    def measure(self, num_bytes: int, dtype: str) -> dict[str, float]:
        """The best of several runs; ``num_bytes`` are read repeatedly, so that the caches count.

        Products are tried in float32 too: a machine without instructions for ``dtype`` is quicker that way.
        """
        import torch

        source = torch.ones(num_bytes // 4)
        target = torch.empty_like(source)
        reads = [num_bytes / best_seconds(source.sum, 6), 2 * num_bytes / best_seconds(lambda: target.copy_(source), 6)]
        return {"bytes_per_s": max(reads), "flops_per_s": max(matmul_peaks(dtype, "float32").values())}


ENGINES = {"ours": VllmEngine, "vllm": VllmEngine, "transformers": TransformersEngine, "probe": MachineProbe}

if __name__ == "__main__":
    serve(lambda options: ENGINES[options["engine"]](options))
