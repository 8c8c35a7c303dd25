"""Drafts on simulated dies: the tokens of a run without them, as far as the kernels' sums do not depend on the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.npu.test_graphs import NPU
from tests.vllm.test_graphs import build, results_of
from tests.vllm.tiny import TINY, write_checkpoint

WAYS: tuple[dict[str, Any], ...] = ({}, {"enforce_eager": False})


@pytest.mark.parametrize("way", WAYS, ids=["eager", "captured"])
def test_tokens_are_those_without_drafts(tmp_path: Path, way: dict[str, Any]) -> None:
    path = write_checkpoint(tmp_path, 0, **TINY | {"num_nextn_predict_layers": 1})
    tokens, logprobs = results_of(build(path, **NPU, **way))
    for method in ("mtp", "ngram", "suffix"):
        for count in (1, 3):
            drafts = {"method": method, "num_speculative_tokens": count, "prompt_lookup_min": 1, "adaptive": False}
            llm = build(path, **NPU, **way, speculative_config=drafts)
            for _ in range(2):  # of suffix, the second time all drafts are right
                found, found_logprobs = results_of(llm)
                print(method, count, llm.core.scheduler.speculation.counts, (found_logprobs - logprobs).abs().max())
                assert found == tokens
                torch.testing.assert_close(found_logprobs, logprobs, rtol=0, atol=1e-5)
            verified, num_drafts, right = llm.core.scheduler.speculation.counts
            assert verified and right < num_drafts


def test_costs_are_measured(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 0, **TINY | {"num_nextn_predict_layers": 1})
    llm = build(path, **NPU, enforce_eager=False, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    assert results_of(llm)[0] == results_of(build(path, **NPU))[0]
    assert (llm.core.scheduler.speculation.costs.plain[1:] > 0).all()
