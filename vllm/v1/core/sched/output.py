"""The scheduler's output: what the model runner computes in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.request import Request


@dataclass
class SchedulerOutput:
    """One step: request i computes its next num_tokens[i] tokens. Running requests keep their order between steps, a
    newly admitted one comes in its place among them from the next step on.
    """

    requests: list[Request]
    num_tokens: list[int]
    # Per request: blocks added in this step; None: use request.block_ids, it is (re)admitted.
    new_block_ids: list[list[int] | None]
    removed: list[Request]  # finished, aborted or preempted since the last step: their rows are free
    total_num_tokens: int
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """By request: tokens that may come next. A step verifies them: request i's num_tokens[i] contain them."""
    num_draft_passes: int = 0  # of the prediction layer, for drafts of the next step
    num_sampled: list[int] | None = None  # of each request that gets tokens, how many; None: one each
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) blocks, all sources read before any target is written: done before the step computes."""

    def add(self, request: Request, num_tokens: int, new_block_ids: list[int] | None) -> None:
        self.requests.append(request)
        self.num_tokens.append(num_tokens)
        self.new_block_ids.append(new_block_ids)

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token: those whose tokens are all computed when the step is."""
        return [
            request
            for request, num_new in zip(self.requests, self.num_tokens, strict=True)
            if request.num_computed_tokens + num_new >= len(request.token_ids)
        ]

    @property
    def request_of_sample(self) -> list[Request]:
        """The request of each token that the step samples."""
        if self.num_sampled is None:
            return self.sampled
        return [one for one, count in zip(self.sampled, self.num_sampled, strict=True) for _ in range(count)]

    @property
    def is_decode_only(self) -> bool:
        """Whether every request brings exactly one token beside its drafts (also true of an empty step)."""
        return self.total_num_tokens == len(self.requests) + sum(map(len, self.drafts.values()))
