"""Turns a caller's prompt and parameters into requests, and checks them before anything is queued."""

from __future__ import annotations

from collections.abc import Callable
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

    def problems(self, group: PromptGroup) -> list[str]:
        """Return the reasons why the group cannot be run; empty when it can.

        ValueError when it needs text and the tokenizer, which is loaded for it, cannot be read.
        """
        self.decoder(group.params)
        name, tokens, limit = group.name, group.prompt_token_ids, self.config.model.max_model_len - 1
        vocab_size = self.config.model.hf.vocab_size
        longest = max((len(tokens) + request.max_tokens for request in group.samples), default=0)
        if longest > limit + 1:
            return [f"{name} goes on to {longest} tokens, more than max_model_len={limit + 1} of this engine; raise it"]
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
        found = sampling_problems(group.params, group.eos_token_ids, vocab_size, self.tokenizer)
        return problems + [f"{name}: {problem}" for problem in found]

    def add_samples(self, group: PromptGroup, priority: int) -> None:
        params = group.params
        room = self.config.model.max_model_len - len(group.prompt_token_ids)
        seed = params.seed
        if seed is None:
            seed = derive_seed(self.config.model.seed, self.config.parallel.replica, self._num_prompts)
        self._num_prompts += 1
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(group.eos_token_ids)
        )
        extras, is_greedy = sampling_extras(params, self.tokenizer), params.is_greedy
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
