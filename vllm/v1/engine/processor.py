"""Turns a caller's prompt and parameters into requests, and checks them before anything is queued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from vllm.config import VllmConfig
from vllm.inputs import PromptType
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer import LazyTokenizer
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import PromptGroup
from vllm.v1.request import Request
from vllm.v1.sample.extras import sampling_extras, sampling_problems
from vllm.v1.sample.rng import derive_seed


class Processor:
    """Makes requests with the engine's tokenizer and limits."""

    def __init__(self, config: VllmConfig, tokenizer: LazyTokenizer | None) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._num_prompts = 0  # over the engine's life: seeds those without a seed

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sample: those of config.json, of generation_config.json, and the tokenizer's."""
        hf = self.config.model.hf
        named = None if self.tokenizer is None else self.tokenizer.end_token_id
        is_new = named is not None and named not in hf.eos_token_ids and named < hf.vocab_size
        return (*hf.eos_token_ids, named) if is_new and named is not None else hf.eos_token_ids

    def group(self, name: str, request_id: str, prompt: PromptType, params: SamplingParams) -> PromptGroup:
        """Return the prompt's group, without samples yet; ValueError, with `name`, when it is not a prompt."""
        fields: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
        text: str | None = fields.get("prompt")
        if "prompt_token_ids" in fields:
            tokens = [int(token) for token in fields["prompt_token_ids"]]
        elif text is None:
            raise ValueError(f"{name} has keys {list(fields)}, expected 'prompt' or 'prompt_token_ids'")
        elif self.tokenizer is None:
            raise ValueError(f"{name} is text, but the engine has no tokenizer (skip_tokenizer_init=True)")
        else:
            tokens = self.tokenizer.load().encode(text)
        return PromptGroup(name, request_id, text, tokens, params, self.end_token_ids)

    def samples(self, groups: Sequence[PromptGroup], priorities: Sequence[int]) -> list[Request]:
        """Make the samples of groups that have none; return all that are unfinished.

        ValueError, before any is made, lists every prompt that cannot be run.
        """
        problems = [problem for group in groups for problem in self._group_problems(group)]
        if problems:
            raise ValueError("prompts cannot be run:\n" + "\n".join(f"  - {problem}" for problem in problems))
        for group, priority in zip(groups, priorities, strict=True):
            if not group.samples:
                self._add_samples(group, priority)
        return [request for group in groups for request in group.unfinished]

    def problems(self, request: Request) -> list[str]:
        """Return the reasons why this engine cannot run the request; empty when it can."""
        name, limit = f"request {request.request_id}", self.config.model.max_model_len
        problems = self._prompt_problems(name, request.token_ids[: request.num_prompt_tokens])
        if not problems and request.longest > limit:
            problems.append(f"{name} goes on to {request.longest} tokens, more than max_model_len={limit}; raise it")
        vocab_size = self.config.model.hf.vocab_size
        outside = [t for t in request.stop_ids.difference(self.end_token_ids) if not 0 <= t < vocab_size]
        return problems + [f"{name} stops at {t}, outside of the vocabulary of {vocab_size}" for t in outside]

    def _group_problems(self, group: PromptGroup) -> list[str]:
        """ValueError when it needs text and the tokenizer, which is loaded for it, cannot be read."""
        self.decoder(group.params)
        problems = self._prompt_problems(group.name, group.prompt_token_ids)
        hf = self.config.model.hf
        found = sampling_problems(group.params, group.eos_token_ids, hf.vocab_size, self.tokenizer)
        return problems + [f"{group.name}: {problem}" for problem in found]

    def _prompt_problems(self, name: str, tokens: list[int]) -> list[str]:
        limit, vocab_size = self.config.model.max_model_len - 1, self.config.model.hf.vocab_size
        if not tokens:
            return [f"{name} is empty"]
        problems = []
        if len(tokens) > limit:
            problems.append(
                f"{name} has {len(tokens)} tokens, the limit is {limit} (max_model_len={limit + 1} less one "
                "new token); shorten it or raise max_model_len"
            )
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            outside = next(t for t in tokens if not 0 <= t < vocab_size)
            problems.append(f"{name} holds token id {outside}, outside of the vocabulary of {vocab_size}")
        return problems

    def _add_samples(self, group: PromptGroup, priority: int) -> None:
        params, is_greedy = group.params, group.params.is_greedy
        room = self.config.model.max_model_len - len(group.prompt_token_ids)
        seed = params.seed
        if seed is None:
            seed = derive_seed(self.config.model.seed, self.config.parallel.replica, self._num_prompts)
        self._num_prompts += 1
        stop_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else group.eos_token_ids)
        extras = sampling_extras(params, self.tokenizer)
        for index in range(params.n):
            group.samples.append(
                Request(
                    group.sample_id(index),
                    group.prompt_token_ids,
                    max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                    min_tokens=params.min_tokens,
                    seed=seed % 2**64 if index == 0 else derive_seed(seed, index),
                    temperature=0.0 if is_greedy else params.temperature,
                    top_k=0 if is_greedy else params.top_k,
                    top_p=1.0 if is_greedy else params.top_p,
                    stop_ids=stop_ids,
                    num_top_logprobs=params.logprobs or 0,
                    num_prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                    extras=extras,
                    priority=priority,
                )
            )

    def watch_stop_strings(self, request: Request) -> None:
        """Prepare a request before it is queued here: with stop strings its output is decoded from now on."""
        extras = request.extras
        if extras is None or not extras.stop:
            return
        decode = self._decoder(extras.skip_special_tokens)
        assert decode is not None, request.request_id
        if request.detokenizer is None:
            request.detokenizer = IncrementalDetokenizer(
                decode, extras.stop, extras.include_stop_str_in_output, request.min_tokens
            )
        request.detokenizer.attach(decode)
        request.detokenizer.catch_up(request.output_token_ids)

    def decoder(self, params: SamplingParams) -> Callable[[list[int]], str] | None:
        """Return the function from token ids to text; None without a tokenizer or when no text is wanted."""
        return self._decoder(params.skip_special_tokens) if params.detokenize else None

    def _decoder(self, skip_special_tokens: bool) -> Callable[[list[int]], str] | None:
        if self.tokenizer is None:
            return None
        tokenizer = self.tokenizer.load()
        given = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return lambda ids: str(tokenizer.decode(ids, **given))
