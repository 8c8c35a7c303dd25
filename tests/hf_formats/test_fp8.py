"""Block-wise FP8: bounded error, repeatable, and any slice of a weight is restored to the whole weight's bits."""

from __future__ import annotations

import pytest
import torch

from hf_formats.fp8 import Fp8Blocks, Fp8Weight, dequantize, is_quantized, quantization_problems, quantize


@pytest.mark.parametrize("shape", [(128, 128), (300, 130), (24, 64), (130, 3), (1, 1)])
def test_error_is_half_a_step_of_e4m3(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    quantised, scale, _ = quantize(weight)
    assert quantised.dtype == torch.float8_e4m3fn
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    back = dequantize(Fp8Blocks(quantised, scale), torch.float32)
    # 3 mantissa bits: relative error 2^-4 for normal values, half of the smallest step (2^-9 of the scale) below.
    bound = (
        weight.abs() * 2**-4
        + scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]] * 2**-10
    )
    assert ((back - weight).abs() <= bound * (1 + 1e-5)).all()


def test_requantising_what_was_dequantised_changes_nothing() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    quantised, scale, _ = quantize(weight)
    again, scale_again, _ = quantize(dequantize(Fp8Blocks(quantised, scale), torch.float32))
    assert torch.equal(again.view(torch.uint8), quantised.view(torch.uint8))
    torch.testing.assert_close(scale_again, scale, rtol=2e-7, atol=0)


def test_zero_blocks_and_bad_values() -> None:
    weight = torch.zeros(256, 128)
    weight[200, 5] = 3.0
    quantised, scale, _ = quantize(weight)
    assert scale.flatten().tolist() == [1.0, pytest.approx(3 / 448)]
    assert torch.equal(dequantize(Fp8Blocks(quantised, scale), torch.float32), weight)
    for bad in (float("nan"), float("inf")):
        weight[0, 0] = bad
        with pytest.raises(ValueError, match=r"of shape \(256, 128\) holds inf or nan"):
            quantize(weight)
    with pytest.raises(ValueError, match="scale_inv has shape"):
        dequantize(Fp8Blocks(quantised, scale[:1]))


def test_which_tensors_are_quantised() -> None:
    layer = "model.layers.3."
    for name in (
        "self_attn.q_a_proj",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.experts.7.up_proj",
    ):
        assert is_quantized(f"{layer}{name}.weight")
    for name in ("mlp.gate", "eh_proj", "input_layernorm", "self_attn.kv_a_layernorm", "shared_head.head"):
        assert not is_quantized(f"{layer}{name}.weight")
    assert not is_quantized("lm_head.weight")
    assert not is_quantized("model.embed_tokens.weight")


def test_subnormal_scales_count_as_zero_blocks() -> None:
    weight = torch.ones(130, 200)
    weight[128:] = 1e-40
    assert quantize(weight).scale_inv[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_are_restored_as_in_the_whole(dtype: torch.dtype) -> None:
    weight = torch.randn(300, 260, generator=torch.Generator().manual_seed(2))
    values, scales, _ = quantize(weight)
    whole = dequantize(Fp8Blocks(values, scales), dtype)
    for rows, columns in (((0, 300), (0, 260)), ((5, 130), (120, 260)), ((128, 256), (0, 1)), ((299, 300), (127, 129))):
        blocks = Fp8Weight(values, scales).cut("x", rows, columns)
        assert torch.equal(dequantize(blocks, dtype), whole[slice(*rows), slice(*columns)])
    scales[1, 2] = 0
    with pytest.raises(ValueError, match=r"x_scale_inv is 0.0 for block \(1, 2\)"):
        Fp8Weight(values, scales).cut("x", (130, 131), (250, 260))


def test_other_quantisations_are_named() -> None:
    assert not quantization_problems({})
    other = {"quantization_config": {"quant_method": "awq", "fmt": "e5m2"}}
    for problem, key in zip(quantization_problems(other), ("quant_method", "fmt", "weight_block_size"), strict=True):
        assert problem.startswith(f"quantization_config.{key}=")
