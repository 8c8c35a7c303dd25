"""The exchange of experts of NVIDIA devices gives what the reference's gives; layouts are in test_parallel."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import deep_ep_form
from tests.parallel.launcher import run_ranks
from tests.vllm.test_parity import as_inputs
from tests.vllm.tiny import write_checkpoint
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.engine.arg_utils import EngineArgs
from vllm.ops import reference
from vllm.ops.contract import resolve
from vllm.ops.cpu import default_ops
from vllm.ops.cuda import exchange
from vllm.ops.cuda.deep_ep import with_deep_ep

ROWS, HIDDEN, WIDTH, TOPK = 5, 24, 16, 3
REFERENCE = reference.rollout_ops()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def exchange_both_ways(num_here: int, most_gathered: int) -> list[tuple[Tensor, Tensor]]:
    """(found, expected) of this rank's active rows in each dtype; the other rows are finite."""
    exchange.MOST_GATHERED_TOKENS = most_gathered
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    group = GroupCoordinator(rank, num_ranks, dist.group.WORLD)
    torch.manual_seed(rank)
    num_active = ROWS - rank % 3
    results = []
    for dtype in TOLERANCE:
        x, w13, w2 = (
            torch.randn(*shape).to(dtype)
            for shape in ((ROWS, HIDDEN), (num_here, 2 * WIDTH, HIDDEN), (num_here, HIDDEN, WIDTH))
        )
        ids = torch.stack([torch.randperm(num_ranks * num_here)[:TOPK] for _ in range(ROWS)])
        given = x, (w13, w2), (torch.rand(ROWS, TOPK), ids), num_active, group
        found = exchange.exchanged_experts(*given, experts=REFERENCE.fused_experts)
        assert found.shape == x.shape and found.dtype is dtype and found.isfinite().all()
        results.append((found[:num_active], REFERENCE.exchanged_experts(*given)[:num_active]))
    return results


def exchange_by_deep_ep(path: str) -> tuple[Tensor, Tensor]:
    """(found, expected) of this rank's active rows, of eight experts."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    config = EngineArgs(path, skip_tokenizer_init=True, max_num_seqs=ROWS).create_engine_config(rank, num_ranks)
    table, group = with_deep_ep(REFERENCE), GroupCoordinator(rank, num_ranks, dist.group.WORLD)
    torch.manual_seed(rank)
    num_here, hidden, num_active = 8 // num_ranks, 64, ROWS - rank % 3
    shapes = (ROWS, hidden), (num_here, 2 * WIDTH, hidden), (num_here, hidden, WIDTH)
    x, w13, w2 = (torch.randn(shape).bfloat16() for shape in shapes)
    ids = torch.stack([torch.randperm(8)[:TOPK] for _ in range(ROWS)])
    given = x, (w13, w2), (torch.rand(ROWS, TOPK), ids), num_active, group
    assert table.connect_exchange is not None
    with deep_ep_form.deep_ep_installed():
        table.connect_exchange(config, group)
        found = table.exchanged_experts(*given)
    assert found.shape == x.shape and found.isfinite().all()
    return found[:num_active], REFERENCE.exchanged_experts(*given)[:num_active]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_deep_ep_gives_what_the_reference_gives(num_ranks: int, tmp_path: Path) -> None:
    for found, expected in run_ranks(exchange_by_deep_ep, num_ranks, write_checkpoint(tmp_path), timeout_s=60):
        gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
        assert gap <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("num_ranks", "num_here", "most_gathered"),
    [(2, 4, 10), (4, 2, 20), (2, 4, 9)],
    ids=["gathered", "fewer experts here than choices of a token", "too many tokens"],
)
def test_ranks_get_what_the_reference_gives(num_ranks: int, num_here: int, most_gathered: int) -> None:
    for results in run_ranks(exchange_both_ways, num_ranks, num_here, most_gathered, timeout_s=60):
        for found, expected in results:
            gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
            assert gap <= TOLERANCE[expected.dtype]
            assert most_gathered >= num_ranks * ROWS or torch.equal(found, expected)


def generated(path: str, arguments: dict[str, Any]) -> list[tuple[list[int], Tensor]]:
    """First tokens, and the log-probs of two, by the host's own exchange and by DeepEP's low-latency kernels in the
    decode step.
    """
    results, dispatched = [], 0

    class Counting(deep_ep_form.Buffer):
        def low_latency_dispatch(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
            nonlocal dispatched
            dispatched += 1
            return super().low_latency_dispatch(*arguments, **options)

    with deep_ep_form.deep_ep_installed(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(deep_ep_form, "Buffer", Counting)
        for ops in (default_ops(), with_deep_ep(default_ops())):
            llm = LLM(
                path, skip_tokenizer_init=True, max_model_len=48, max_num_seqs=4, dtype="bfloat16", rollout_ops=ops,
                enable_expert_parallel=True, expert_exchange="dispatch", **arguments,
            )  # fmt: skip
            params = [SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True) for _ in range(3)]
            samples = [o.outputs[0] for o in llm.generate(as_inputs([[3, 4], [5], list(range(40, 60))]), params)]
            results.append(([s.token_ids[0] for s in samples], torch.tensor([s.sampled_logprobs for s in samples])))
            llm.shutdown()
    assert dispatched >= 2  # MoE layers
    return results


@pytest.mark.needs_torch("2.10", "torch.nn.functional.grouped_mm, without which the CUDA table refuses to start")
@pytest.mark.parametrize("shares_tokens", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_decodes_the_same_by_deep_ep(shares_tokens: bool, tmp_path: Path) -> None:
    arguments = {"tensor_parallel_size": 2, "use_sequence_parallel_moe": shares_tokens}
    for expected, found in run_ranks(generated, 2, write_checkpoint(tmp_path), arguments, timeout_s=60):
        assert found[0] == expected[0]  # the second tokens may differ where two are as likely
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0.03)


def test_what_deep_ep_lacks_is_named(tmp_path: Path) -> None:
    path, table = write_checkpoint(tmp_path, num_hidden_layers=1), with_deep_ep(REFERENCE)
    config = EngineArgs(path, skip_tokenizer_init=True).create_engine_config(0, 1)
    dtype, exchange_problem = table.problems(config)
    assert "dtype=float32: DeepEP takes bfloat16" in dtype
    assert "expert_exchange=all_gather over 1; set expert_exchange='dispatch'" in exchange_problem
    if importlib.util.find_spec("deep_ep") is None and hasattr(torch.nn.functional, "grouped_mm"):
        pytest.importorskip("triton")
        with pytest.raises(ValueError, match="needs deep_ep, which is not installed: build DeepEP 1"):
            resolve("vllm.ops.cuda:deep_ep_ops")
