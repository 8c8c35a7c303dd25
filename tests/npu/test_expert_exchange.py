"""Experts spread over ranks on the simulator: tokens reach them over hccl, and any layout equals one CPU process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import npusim
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.launcher import run_ranks
from tests.vllm.test_parallel import ALL, DISPATCH, EXPERTS, SHARES, SHARES_TOKENS, run_engines
from tests.vllm.tiny import write_checkpoint
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.engine.arg_utils import EngineArgs
from vllm.ops import reference
from vllm_ascend.ops import rollout_ops
from vllm_ascend.ops.exchanged_experts import MAX_TOKENS, tokens_of_a_call
from vllm_ascend.platform import NPUPlatform

WORLD = 4
KERNELS = {"npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"}
# Tokens of each rank; one has none, and all pad to the same number.
ACTIVE, ROWS = (40, 7, 0, 23), 40
LOCAL_EXPERTS, CHOICES, WIDTH = 2, 3, 8
BUFFER_MIB = 3  # holds the rows of a rank with 1,024 numbers each, and not with 2,048


CASES = {
    "kernels": (1024, torch.bfloat16, 2e-2),
    "more than a call takes": (2048, torch.bfloat16, 2e-2),
    "float32": (1024, torch.float32, 1e-5),
    "small hidden size": (48, torch.bfloat16, 2e-2),
}


def run_on_npus(*args: Any, **kwargs: Any) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_NPU_COUNT", str(WORLD))
        patch.setenv("HCCL_BUFFSIZE", str(BUFFER_MIB))
        return run_ranks(*args, device="npu", **kwargs)


def everyones_tensors(hidden: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, weights, ids of all ranks [WORLD, ROWS, ...] and all experts' matrices, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    experts = WORLD * LOCAL_EXPERTS

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, weights = floats(WORLD, ROWS, hidden), floats(WORLD, ROWS, CHOICES).abs()
    ids = torch.rand(WORLD, ROWS, experts, generator=generator).argsort(-1)[..., :CHOICES].contiguous()
    w13, w2 = floats(experts, 2 * WIDTH, hidden) / hidden**0.5, floats(experts, hidden, WIDTH) / WIDTH**0.5
    return x.to(dtype), weights, ids, w13.to(dtype), w2.to(dtype)


def exchange_on_npu() -> list[tuple[Tensor, set[str]]]:
    """This rank's results and the ops that made them, for each case."""
    rank = dist.get_rank()
    group = GroupCoordinator(rank, WORLD, dist.new_group(range(WORLD)))
    mine = slice(rank * LOCAL_EXPERTS, (rank + 1) * LOCAL_EXPERTS)
    found = []
    for hidden, dtype, _ in CASES.values():
        x, weights, ids, w13, w2 = everyones_tensors(hidden, dtype)
        w13, w2 = (w[mine].transpose(1, 2).contiguous().to("npu").transpose(1, 2) for w in (w13, w2))
        x, weights, ids = (tensor[rank].to("npu") for tensor in (x, weights, ids))
        npusim.reset_calls()
        out = rollout_ops().exchanged_experts(x, (w13, w2), (weights, ids), ACTIVE[rank], group)
        found.append((out.cpu(), set(npusim.calls())))
    return found


@pytest.fixture(scope="module")
def exchanged() -> list[dict[str, tuple[Tensor, set[str]]]]:
    return [dict(zip(CASES, found, strict=True)) for found in run_on_npus(exchange_on_npu, WORLD)]


@pytest.mark.parametrize("case", CASES)
def test_the_exchange_equals_all_experts_in_one_process(
    case: str, exchanged: list[dict[str, tuple[Tensor, set[str]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, dtype, tolerance = CASES[case]
    monkeypatch.setenv("HCCL_BUFFSIZE", str(BUFFER_MIB))
    at_once = [tokens_of_a_call(width, CHOICES, LOCAL_EXPERTS, WORLD) for width in (1024, 2048)]
    assert at_once[0] >= ROWS > at_once[1]
    x, weights, ids, w13, w2 = everyones_tensors(hidden, dtype)
    for rank, (out, ran) in enumerate(found[case] for found in exchanged):
        assert ran >= KERNELS if case == "kernels" else not ran & KERNELS
        assert out.isfinite().all() and out.dtype == dtype and out.shape == (ROWS, hidden)
        active = slice(0, ACTIVE[rank])
        alone = reference.fused_experts(x[rank, active], (w13, w2), (weights[rank, active], ids[rank, active]), 0)
        gap = (out[active].float() - alone.float()).abs()
        assert gap.numel() == 0 or gap.max() <= tolerance * alone.abs().max()


def four_tokens(path: str, llm_args: dict[str, Any]) -> tuple[list[tuple[list[int], list[float]]], set[str]]:
    """Four tokens of each prompt of this replica, their log-probs, and the ops that ran."""
    from tests.vllm.test_parity import as_inputs, make_prompts
    from vllm import LLM, SamplingParams

    llm = LLM(path, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, **llm_args)
    prompts = as_inputs(make_prompts(4, 12, seed=4))
    mine = prompts[:3] if llm.config.parallel.replica == 0 else prompts[3:]
    npusim.reset_calls()
    outputs = llm.generate(mine, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    ran = set(npusim.calls())
    llm.shutdown()
    return [(o.outputs[0].token_ids, o.outputs[0].sampled_logprobs) for o in outputs], ran


def run_both(tiny: str, layouts: list[Any], wide: str, wide_args: list[dict[str, Any]]) -> tuple[Any, Any]:
    return run_engines(tiny, layouts), [four_tokens(wide, llm_args) for llm_args in wide_args]


TP_DP = {
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "device": "npu",
    "rollout_ops": "vllm_ascend.ops:rollout_ops",
}
LAYOUTS: list[Any] = [(TP_DP | way, SHARES) for way in (EXPERTS, DISPATCH, SHARES_TOKENS)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engines(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any]]:
    """Of every rank: samples in float32, and those of a bfloat16 model of the kernels' sizes, also in graphs."""
    wide = write_checkpoint(tmp_path_factory.mktemp("wide"), hidden_size=1024, num_hidden_layers=2)
    wide_args = [llm_args | {"dtype": "bfloat16"} for llm_args, _ in LAYOUTS]
    wide_args += [llm_args | {"enforce_eager": False} for llm_args in wide_args[1:]]
    streams = {"multistream_overlap_shared_expert": True, "enable_multistream_mla": True}
    wide_args += [llm_args | streams for llm_args in wide_args[3:]]
    return run_on_npus(run_both, WORLD, tiny, LAYOUTS, wide, wide_args, timeout_s=500)


def test_generation_over_tp_dp_and_ep_equals_one_cpu_process(tiny: str, engines: list[tuple[Any, Any]]) -> None:
    """float32, 2 TP x 2 DP over hccl, experts over all four ranks, tokens reaching them in both ways."""
    alone = run_engines(tiny, [({}, [ALL])])[0]
    for rank, (by_layout, _) in enumerate(engines):
        for (llm_args, shares), result in zip(LAYOUTS, by_layout, strict=True):
            for index, samples in zip(shares[rank // 2], result, strict=True):
                for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(samples, alone[index], strict=True):
                    assert tokens == expected_tokens, (llm_args, rank, index)
                    assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def test_a_bfloat16_engine_runs_the_kernels(engines: list[tuple[Any, Any]]) -> None:
    """All ways give the same distribution up to bfloat16's rounding."""
    for _, ((gathered, _), *others) in engines:
        for dispatched, ran in others[:2]:
            assert ran >= KERNELS
            for (tokens, logprobs), (other_tokens, other_logprobs) in zip(gathered, dispatched, strict=True):
                assert tokens[0] == other_tokens[0] and logprobs[0] == pytest.approx(other_logprobs[0], abs=0.05)


@pytest.mark.parametrize("way", [0, 1], ids=["tokens on all TP ranks", "tokens shared out"])
def test_dispatch_in_captured_steps_equals_eager_ones(way: int, engines: list[tuple[Any, Any]]) -> None:
    for _, (_, *dispatched) in engines:
        (eager, _), (captured, _) = dispatched[way], dispatched[2 + way]
        assert [tokens for tokens, _ in captured] == [tokens for tokens, _ in eager]
        for (_, logprobs), (_, eager_logprobs) in zip(captured, eager, strict=True):
            assert logprobs == pytest.approx(eager_logprobs, abs=1e-2)  # another batch size, another rounding


@pytest.mark.parametrize("way", [0, 1], ids=["tokens on all TP ranks", "tokens shared out"])
def test_shared_experts_beside_the_exchange_change_no_bit(way: int, engines: list[tuple[Any, Any]]) -> None:
    for _, (_, *dispatched) in engines:
        (captured, _), (beside, _) = dispatched[2 + way], dispatched[4 + way]
        assert beside == captured


def test_the_configuration_refuses_what_cannot_be_exchanged(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any process starts: needs no device."""

    def problems(dtype: str, enforce_eager: bool) -> list[str]:
        args = EngineArgs(
            tiny,
            skip_tokenizer_init=True,
            dtype=dtype,
            tensor_parallel_size=2,
            data_parallel_size=2,
            enable_expert_parallel=True,
            expert_exchange="dispatch",
            enforce_eager=enforce_eager,
        )
        return NPUPlatform().config_problems(args.create_engine_config(0, WORLD), rollout_ops())

    monkeypatch.delenv("TASK_QUEUE_ENABLE", raising=False)
    assert problems("float32", True) == []
    (problem,) = problems("float32", False)
    assert "only the kernels for half precision and 1024 to 7168 can be captured" in problem


def test_a_graph_of_more_tokens_than_a_call_takes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(
        write_checkpoint(tmp_path, hidden_size=1024, num_hidden_layers=1),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        tensor_parallel_size=2,
        data_parallel_size=2,
        enable_expert_parallel=True,
        expert_exchange="dispatch",
        enforce_eager=False,
        max_num_seqs=64,
    )
    config = args.create_engine_config(0, WORLD)
    monkeypatch.delenv("TASK_QUEUE_ENABLE", raising=False)
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    (problem,) = NPUPlatform().config_problems(config, rollout_ops())
    assert "32 tokens of a rank do not fit one call" in problem and "raise HCCL_BUFFSIZE" in problem
    monkeypatch.setenv("HCCL_BUFFSIZE", "2")
    assert NPUPlatform().config_problems(config, rollout_ops()) == []


def test_deepseek_v3_over_256_dies_fits_the_recipes_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert on a die; HCCL_BUFFSIZE=300 holds a decode step of 64 sequences of a TP 2 replica in one call."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "300")
    assert 32 <= tokens_of_a_call(7168, 8, 1, 256) < MAX_TOKENS
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    with pytest.raises(ValueError, match="set HCCL_BUFFSIZE to a multiple of it"):
        tokens_of_a_call(7168, 8, 1, 256)
    with pytest.raises(ValueError, match="over 768 ranks"):
        tokens_of_a_call(7168, 8, 1, 768)
