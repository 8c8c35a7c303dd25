"""Nothing is made up: an op without a reference, a wrong argument and a reference that disagrees all fail by name."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from npusim.reference import REFERENCES, fill, reference


def test_an_op_without_a_reference_names_itself_and_the_remedy() -> None:
    assert "npu_fast_gelu" not in REFERENCES
    with pytest.raises(
        RuntimeError, match=r'npu_fast_gelu asks for the kernel aclnnFastGelu.*@reference\("npu_fast_gelu"\)'
    ):
        torch_npu.npu_fast_gelu(torch.ones(4, device="npu"))


def test_attention_of_torch_does_not_return_garbage() -> None:
    """It goes to npu_fusion_attention_v3 inside torch_npu, which has no reference of that name."""
    q = torch.randn(1, 2, 8, 16, device="npu", dtype=torch.float16)
    with pytest.raises(RuntimeError, match="npu_fusion_attention_v3 asks for the kernel"):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)


def test_the_old_operator_path_is_refused_by_name() -> None:
    x = torch.zeros(2, 4, 32, 32, device="npu", dtype=torch.float16)
    mask = torch.zeros(2, 1, 32, 32, device="npu", dtype=torch.bool)
    with pytest.raises(RuntimeError, match="'ScaledMaskedSoftmax' goes through the old aclop path"):
        torch_npu.npu_scaled_masked_softmax(x, mask)


def test_host_checks_of_torch_npu_are_real() -> None:
    q = torch.ones(2, 16, 256, device="npu", dtype=torch.float16)
    with pytest.raises(RuntimeError, match="head_num"):
        torch_npu.npu_fusion_attention(q, q, q, 0, "BSH")
    with pytest.raises(RuntimeError, match="unknown keyword argument|Unknown keyword|unexpected keyword"):
        torch.ops.npu.npu_rms_norm(q, q[0, 0], eps=1e-6)


def test_an_output_that_disagrees_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"op: output 1 is \(\(3,\), torch.float32\) in torch_npu, but \(\(2,\)"):
        fill("op", (torch.ones(2), torch.ones(3)), (torch.ones(2), torch.ones(2)))
    with pytest.raises(AssertionError, match="op: 2 outputs, but the reference gives 1"):
        fill("op", (torch.ones(2), torch.ones(3)), (torch.ones(2),))


def test_references_are_unique_and_of_real_ops() -> None:
    with pytest.raises(ValueError, match="two references for npu_rms_norm"):
        reference("npu_rms_norm")(lambda x: x)
    with pytest.raises(ValueError, match="torch_npu has no op named npu_no_such_op"):
        reference("npu_no_such_op")(lambda x: x)
