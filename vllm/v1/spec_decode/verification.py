"""Which drafts of a step were right: those that the engine has drawn itself, one after another."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.sampler import SamplerOutput


def accepted(step: SchedulerOutput, output: SamplerOutput) -> tuple[SamplerOutput, np.ndarray]:
    """The samples of a step whose drafts before them were all right, of one for each draft and one more, and how many
    each request has, int64, which the step notes.

    A sample that cannot be drawn is left to the next step, which begins with it.
    """
    tokens, kept, counts, first = output.token_ids.tolist(), list[int](), list[int](), 0
    for request in step.sampled:
        draft = step.drafts.get(request.request_id, [])
        count = 1
        for token in draft:
            at = first + count
            if token != tokens[at - 1] or not math.isfinite(output.logprobs[at]):
                break
            count += 1
        kept += range(first, first + count)
        counts.append(count)
        first += 1 + len(draft)
    step.num_sampled = counts
    found = replace(
        output,
        token_ids=output.token_ids[kept],
        logprobs=[output.logprobs[index] for index in kept],
        top=None if output.top is None else [output.top[index] for index in kept],
    )
    return found, np.array(counts, dtype=np.int64)
