"""FP8 products of the op table of NVIDIA devices against their specification, on a CPU."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="kernels of the CUDA table are written in Triton, which this environment lacks")

from hf_formats.fp8 import BLOCK, FP8_DTYPE, quantize
from tests import fp8_block_form
from tests.vllm import deep_gemm_form
from tests.vllm.capturing_platform import DEVICE
from tests.vllm.fp8_tiny import ALIGNED, fp8_tensors, write_directory
from tests.vllm.test_cuda_steps import OnlyOnTheDevice
from tests.vllm.test_parity import as_inputs
from tests.vllm.tiny import random_weights
from vllm import LLM, SamplingParams
from vllm.ops import reference, reference_fp8
from vllm.ops.contract import resolve
from vllm.ops.cuda.deep_gemm import in_whole_tiles
from vllm.ops.cuda.experts import ExpertOps
from vllm.ops.cuda.fp8 import Fp8Products, fits
from vllm.ops.cuda.launch import launch
from vllm.ops.cuda.rows import RowOps
from vllm.ops.reference_moe import silu_and_mul
from vllm.ops.weights import BlockScales, Fp8Operand, block_scales_of, dense, new_row_major_weight

assert os.environ["TRITON_INTERPRET"] == "1", "tests/conftest.py sets it before anything imports triton"

FP32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {FP32: 1e-5, BF16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", [pytest.param(FP32, marks=pytest.mark.slow), BF16], ids=["fp32", "bf16"])
FP8, REFERENCE = Fp8Products(launch), reference.rollout_ops()

pytestmark = [
    # Memory that no expert writes holds anything.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
    pytest.mark.needs_torch("2.10", "torch.nn.functional.grouped_mm, without which the CUDA table refuses to start"),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def held(dtype: torch.dtype, *shape: int, first_row: int = 0) -> Fp8Operand:
    """A random weight [(E,) O, I] whose rows begin `first_row` inside a block."""
    *experts, outputs, inputs = shape
    blocks = [quantize(torch.randn(first_row + outputs, inputs) / inputs**0.5) for _ in range(*experts or (1,))]
    values = torch.stack([block.weight_OI[first_row:] for block in blocks])
    scale_inv = torch.stack([block.scale_inv for block in blocks])
    row_blocks = (first_row + torch.arange(outputs)) // BLOCK
    if not experts:
        values, scale_inv = values[0], scale_inv[0]
    return Fp8Operand(values, BlockScales(scale_inv, row_blocks, None, dtype, first_row == 0))


def parameter_of(operand: Fp8Operand) -> nn.Parameter:
    """As a model holds it."""
    parameter = nn.Parameter(operand.values, requires_grad=False)
    parameter.block_scales = operand.scales  # type: ignore[attr-defined]
    return parameter


def assert_near(found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-3)
    assert gap <= (tolerance or TOLERANCE[expected.dtype]), f"off by {gap:.2e} of the largest value"


@DTYPES
def test_activations_are_quantised_as_specified(dtype: torch.dtype) -> None:
    """A strided slice with large, small, subnormal and zero blocks: the same numbers."""
    x = torch.randn(5, 3 + 9 * BLOCK).to(dtype)[:, 3:]
    for block, scale in enumerate((1e4, 1e-4, 0.0, 1e-39, 1e-36)):
        x[:, block * BLOCK : (block + 1) * BLOCK] *= scale
    found, expected = FP8.quantize(x), reference_fp8.quantize_rows(x)
    assert found.values_TI.dtype == FP8_DTYPE
    assert torch.equal(found.values_TI.float(), expected[0].float()) and torch.equal(found.scale_CT.T, expected[1])
    assert FP8.quantize(x[:0]).scale_CT.shape == (9, 0)


@DTYPES
def test_gated_rows_are_quantised_as_specified(dtype: torch.dtype) -> None:
    x = torch.randn(5, 4 * BLOCK).to(dtype)
    found, (values, scales) = FP8.silu_and_mul(x, torch.tensor([4]).int()), reference_fp8.quantize_rows(silu_and_mul(x))
    assert_near(found.scale_CT.T[:4], scales[:4])
    back = (found.values_TI.float(), values.float())
    assert_near(*(x[:4].unflatten(1, (-1, BLOCK)) * scales[:4, :, None] for x in back), tolerance=0.07)
    assert (back[0][:4] == back[1][:4]).float().mean() > 0.99  # exp differs in its last bit


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "first_row"),
    [(1, 128, 130, 0), (3, 1024, 70, 100), (20, 128, 70, 100), (65, 128, 64, 0)],
    ids=["one token", "split channels", "rows within a block", "large tiles"],
)
def test_linear(tokens: int, inputs: int, outputs: int, first_row: int, dtype: torch.dtype) -> None:
    weight = held(dtype, outputs, inputs, first_row=first_row)
    x = torch.randn(tokens, inputs + 8).to(dtype)[:, 8:]
    expected = reference_fp8.linear(x, weight)
    assert_near(FP8.linear(x, weight), expected)
    assert_near(expected, x @ dense(parameter_of(weight)).T, tolerance=0.05)
    assert FP8.linear(x[:0], weight).shape == (0, outputs)


@DTYPES
def test_products_of_many_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles beside the last output, of two experts and of none; rows by a map, and as they lie."""
    monkeypatch.setattr("vllm.ops.cuda.fp8._WIDE_OUTPUTS", 0)
    names: list[str] = []

    def launched(name: str, *arguments: Any, **options: Any) -> None:
        names.append(name)
        launch(name, *arguments, **options)

    wide = Fp8Products(launched)
    x, source = torch.randn(260, 256).to(dtype), torch.randint(0, 260, (300,))
    for outputs in (300, 128):
        weight = held(dtype, outputs, 256)
        assert_near(wide.linear(x, weight), reference_fp8.linear(x, weight))
    weight, ends = held(dtype, 3, 300, 256), torch.tensor([200, 200, 290]).int()
    for rows in (source, None):
        chosen, stops = (x, torch.tensor([200, 200, 250]).int()) if rows is None else (x[source], ends)
        found = wide.grouped(wide.quantize(x), weight, stops, rows)
        assert_near(found[: stops[-1]], reference_fp8.grouped(chosen, weight, stops)[: stops[-1]])
    assert names.count("wide_product") == 4 and "block_product" not in names


def test_linear_layers_of_many_tokens_are_those_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its limits forbid it: whole groups of channels, whole blocks of rows, bfloat16."""
    monkeypatch.setattr("vllm.ops.cuda.fp8._CUBLAS_TOKENS", 3)
    calls: list[Tensor] = []
    products = Fp8Products(launch, partial(fp8_block_form.scaled_mm, calls))
    cases = [(BF16, 5, 208, 512, 0), (BF16, 2, 208, 512, 0), (BF16, 5, 200, 512, 0), (BF16, 5, 208, 640, 0)]
    for dtype, tokens, outputs, inputs, first_row in [*cases, (BF16, 5, 208, 512, 16), (FP32, 5, 208, 512, 0)]:
        weight, x = held(dtype, outputs, inputs, first_row=first_row), torch.randn(tokens, inputs).to(dtype)
        assert_near(products.linear(x, weight), reference_fp8.linear(x, weight))
    assert [len(call) for call in calls] == [8]


@pytest.mark.parametrize(
    ("dtype", "tokens", "first", "local"),
    [
        pytest.param(FP32, 3, 1, 2, id="some here, fp32"),
        pytest.param(BF16, 3, 4, 1, id="none here, bf16"),
        *(pytest.param(dtype, 5, 0, 4, id=f"all here, {dtype}", marks=pytest.mark.slow) for dtype in (FP32, BF16)),
    ],
)
def test_fused_experts(dtype: torch.dtype, tokens: int, first: int, local: int) -> None:
    """Expert 2 gets no token. Either product may also have a dequantised weight."""
    ids = torch.tensor([0, 1, 3])[torch.stack([torch.randperm(3)[:2] for _ in range(tokens)])]
    x, weights = torch.randn(tokens, BLOCK).to(dtype), torch.rand(tokens, 2)
    w13, w2 = held(dtype, local, 2 * BLOCK, BLOCK), held(dtype, local, BLOCK, BLOCK)
    experts = ExpertOps(launch, RowOps(launch), FP8)
    found = experts.fused_experts(x, (w13, w2), (weights, ids), first)
    assert_near(
        found, reference_fp8.fused_experts(x, (w13, w2), (weights, ids), first), 2e-3 if dtype == FP32 else None
    )
    mixed = experts.fused_experts(x, (w13, dense(parameter_of(w2))), (weights, ids), first)
    assert_near(mixed, found, tolerance=0.05)
    assert experts.fused_experts(x[:0], (w13, w2), (weights[:0], ids[:0]), first).shape == (0, BLOCK)


def test_products_of_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's form for a CPU stands in; a weight whose rows begin inside a block takes our kernel."""
    with pytest.raises(ValueError, match="needs DeepGEMM 2 .*not installed: install it, or set rollout_ops="):
        resolve("vllm.ops.cuda:deep_gemm_ops")
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm_form)
    monkeypatch.setattr(deep_gemm_form, "calls", [])
    ops = resolve("vllm.ops.cuda:deep_gemm_ops")
    assert ops.implementations["linear"] == "native (torch; FP8 weights: DeepGEMM)"
    x, weight = torch.randn(5, 256).to(BF16), held(BF16, 200, 256)
    assert_near(ops.linear(x, weight), reference_fp8.linear(x, weight))
    assert deep_gemm_form.calls.pop() == "fp8_gemm_nt"
    inside = held(BF16, 20, 128, first_row=120)
    assert_near(ops.linear(x[:, :128], inside), reference_fp8.linear(x[:, :128], inside))
    assert not deep_gemm_form.calls
    w13, w2, weights = held(BF16, 3, 256, 256), held(BF16, 3, 256, BLOCK), torch.rand(2, 2)
    x = torch.randn(2, 256).to(BF16)
    for first, choices in ((0, [0, 2]), (1, [0, 2]), (7, [0, 2])):  # expert 1 has no token; one is elsewhere; all are
        ids = torch.tensor(choices).expand(2, 2)
        found = ops.fused_experts(x, (w13, w2), (weights, ids), first)
        assert_near(found, reference_fp8.fused_experts(x, (w13, w2), (weights, ids), first))
    assert deep_gemm_form.calls == ["m_grouped_fp8_gemm_nt_contiguous"] * 6


@pytest.mark.parametrize("counts", [[3, 0, 130, 128], [0, 0], [1] * 9, [257]])
def test_rows_of_experts_go_to_whole_tiles_and_back(counts: list[int]) -> None:
    """Seven rows more are of other ranks' experts."""
    ends, expert_S = (
        torch.tensor(counts).cumsum(0).int(),
        torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
    )
    row_M, expert_M, place_S = in_whole_tiles(ends, sum(counts) + 7)
    assert len(row_M) % 128 == 0 and expert_M.dtype == torch.int32
    assert torch.equal(row_M[place_S[: sum(counts)]], torch.arange(sum(counts)))
    assert torch.equal(expert_M[place_S[: sum(counts)]].long(), expert_S) and int((expert_M >= 0).sum()) == sum(counts)
    assert all(len(set(tile.tolist()) - {-1}) <= 1 for tile in expert_M.split(128))
    on_device = torch.empty_like(ends, device="meta")
    with OnlyOnTheDevice():
        in_whole_tiles(on_device, 5)


def build(path: str, **arguments: Any) -> LLM:
    sizes = {"max_model_len": 32, "max_num_seqs": 2, "block_size": 16, "dtype": "float32", "quantization": "fp8"}
    return LLM(path, skip_tokenizer_init=True, **(sizes | arguments))


def logprobs_of(llm: LLM) -> Tensor:
    """Of all tokens after each of four tokens that follow a prompt; the first is of the prompt's pass."""
    params = SamplingParams(max_tokens=4, logprobs=ALIGNED["vocab_size"], temperature=0, ignore_eos=True)
    tops = llm.generate(as_inputs([[3, 4, 5]]), params)[0].outputs[0].top_logprobs
    assert tops is not None
    return torch.tensor([[top[token].logprob for token in range(ALIGNED["vocab_size"])] for top in tops])


def specified(x_TI: Tensor, weight_OI: Any) -> Tensor:
    products = reference_fp8 if isinstance(weight_OI, Fp8Operand) else reference
    return products.linear(x_TI, weight_OI)


SPECIFIED = replace(
    REFERENCE,
    linear=specified,
    fused_experts=reference_fp8.fused_experts,
    takes_fp8=fits,
    new_weight=new_row_major_weight,
)


def test_a_model_stays_near_that_of_dequantised_weights(tmp_path: Path) -> None:
    """Within twice what quantising the weights changes, where no token changes its experts."""
    weights = random_weights(ALIGNED)
    path = write_directory(tmp_path / "fp8", fp8_tensors(weights), config=ALIGNED)
    found, stored = logprobs_of(build(path, rollout_ops=SPECIFIED))[0], logprobs_of(build(path))[0]
    plain = write_directory(tmp_path / "plain", weights, config=ALIGNED)
    by_weights = (logprobs_of(build(plain, quantization=None))[0] - stored).abs().mean()
    assert 0.5 * by_weights < (found - stored).abs().mean() < 2 * by_weights < 0.1


@pytest.mark.slow
def test_a_model_is_that_of_the_specification(tmp_path: Path) -> None:
    """Also with new weights and after a sleep: captured steps go on with what they captured."""
    first, second = (fp8_tensors(random_weights(ALIGNED, seed)) for seed in (0, 3))
    path = write_directory(tmp_path, first, config=ALIGNED)
    captured = {"enforce_eager": False, "device": DEVICE, "cudagraph_capture_sizes": [1]}
    llm, other = build(path, rollout_ops="vllm.ops.cuda:rollout_ops", **captured), build(path, rollout_ops=SPECIFIED)
    for new in (first, second):
        if new is second:
            llm.sleep(2)
            llm.wake_up()
            llm.update_weights(new.items())
            other.update_weights(new.items())
        found, expected = logprobs_of(llm), logprobs_of(other)
        # A last bit before quantising may change an e4m3 value by its last bit, 1/16.
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)
        assert (found - expected).abs().mean() < 3e-4


def test_what_is_multiplied_in_fp8_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = ALIGNED | {"q_lora_rank": 160}
    path = write_directory(tmp_path, fp8_tensors(random_weights(config)), config=config)
    build(path)
    assert "weights held in FP8: storage only, they are dequantised for every product" in caplog.text
    model = build(path, rollout_ops=SPECIFIED).core.worker.model
    names = "layers.*.self_attn.kv_b, layers.*.self_attn.q_proj.weight"
    assert f"10 of 14 are multiplied in FP8, dequantised are {names}" in caplog.text
    found = [scales for scales in map(block_scales_of, model.parameters()) if scales is not None]
    whole = [torch.equal(s.row_blocks_R, torch.arange(len(s.row_blocks_R)) // BLOCK) for s in found]
    assert [s.has_whole_row_blocks for s in found] == whole and {*whole} == {True, False}


def test_only_whole_blocks_of_contiguous_inputs_fit() -> None:
    operand = held(BF16, 70, 256)
    assert fits(parameter_of(operand)) and not fits(nn.Parameter(torch.empty(8, 128), requires_grad=False))
    other = nn.Parameter(operand.values.t().contiguous().t(), requires_grad=False)
    other.block_scales = operand.scales  # type: ignore[attr-defined]
    assert not fits(other)
    ragged = BlockScales(operand.scales.scale_inv, operand.scales.row_blocks_R, torch.arange(256) // BLOCK, BF16)
    assert not fits(parameter_of(Fp8Operand(operand.values, ragged)))
